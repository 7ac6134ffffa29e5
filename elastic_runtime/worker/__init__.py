"""What a training script may use: where to write, how to report progress, how to resume.

    from elastic_runtime import worker

    context = worker.context()
    restored = worker.checkpoint.load(context.checkpoint_dir)
    …
    worker.log(step=step, loss=loss, samples=seen)

Everything works in a plain `python script.py` too. Nothing here is needed by a script that only trains.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from elastic_runtime.worker.context import Context, context
from elastic_runtime.worker.progress import log

if TYPE_CHECKING:
    from elastic_runtime.worker import checkpoint
    from elastic_runtime.worker.batches import Batch, batches

__all__ = ["Batch", "Context", "batches", "checkpoint", "context", "log"]


def __getattr__(name: str) -> Any:
    # torch and numpy are not loaded for a script that only reports progress.
    if name == "checkpoint":
        return importlib.import_module("elastic_runtime.worker.checkpoint")
    if name in ("Batch", "batches"):
        return getattr(importlib.import_module("elastic_runtime.worker.batches"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
