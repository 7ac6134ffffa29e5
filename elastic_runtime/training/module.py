"""The module that `attach` returns: DDP to whoever looks, with the steps' own reduction underneath."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_runtime.errors import InputError

__all__ = ["ElasticDataParallel"]


class ElasticDataParallel(DistributedDataParallel):
    """Wraps `module`; its forward is the module's, its state_dict has DDP's names (`module.…`).

    It is a DistributedDataParallel for `isinstance` and for tools that take the wrapper off by `.module`, but runs
    nothing of it: DDP's reducer is bound to one process group for life, and waits for gradients that an empty share
    never has. Gradients are summed by `step.backward` and the end of the inner loop.
    """

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.device_ids = None
        self.output_device = None
        self.dim = 0
        self.broadcast_buffers = True
        self.find_unused_parameters = True
        self.gradient_as_bucket_view = True
        self.static_graph = False
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True

    @property
    def process_group(self) -> Any:  # type: ignore[override]
        """The default group of the present round; None if this worker is alone without one."""
        return dist.group.WORLD if dist.is_initialized() else None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return what the module returns."""
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: gradients are summed once a step, after its last micro-batch, in any case."""
        yield

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]

    def join(self, *_arguments: Any, **_options: Any) -> Any:
        """Refuse. Raises `InputError`: a share may be empty without it."""
        raise _refusal("join", "shares of uneven or zero size need no join: iterate over the step")

    def join_hook(self, **_options: Any) -> Any:
        """Refuse. Raises `InputError`."""
        raise _refusal("join_hook", "shares of uneven or zero size need no join: iterate over the step")

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Refuse. Raises `InputError`."""
        raise _refusal(
            "register_comm_hook", "the reduction is not DDP's; use plain torchrun with DDP for one"
        )

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """Refuse. Raises `InputError`."""
        raise _refusal("scatter", "batches arrive on job.device")

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Refuse. Raises `InputError`."""
        raise _refusal("gather", "one process drives one device")


def _refusal(name: str, fix: str) -> InputError:
    return InputError(
        f"{name}() is DistributedDataParallel's and has no meaning for an attached module: {fix}"
    )
