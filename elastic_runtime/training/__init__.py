"""In-place recovery as the training process sees it: `elastic.run`, `Job`, steps, and the round they live in.

    channel    the link to the agent: what it says, and the thread that listens
    sockets    which sockets belong to a round, and how a blocked collective is set free
    group      the process group of one round
    codec      state as JSON text plus a list of tensors
    state      what a script attached, and the position of the job
    sync       who needs state, and the broadcast that gives it
    rollback   what an abandoned step touched, put back
    buffers    small buffers as numbers that a sum carries exactly
    reduction  gradients, loss and buffers summed over the ranks
    module     the wrapper that `attach` returns
    data       the order of the samples and each rank's share
    loading    samples to batches, in this process or in loader workers
    step       one optimizer step, from its first micro-batch to its commit
    session    one worker through all its rounds
    job        what `train` is given
    loop       `run`

Importing this package loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from elastic_runtime.training.channel import RoundChanged

if TYPE_CHECKING:
    from elastic_runtime.training.job import Job
    from elastic_runtime.training.loop import run
    from elastic_runtime.training.module import ElasticDataParallel
    from elastic_runtime.training.step import Step

__all__ = ["ElasticDataParallel", "Job", "RoundChanged", "Step", "run"]

_PLACES = {"ElasticDataParallel": "module", "Job": "job", "Step": "step", "run": "loop"}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
