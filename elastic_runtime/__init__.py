"""The runtime behind the Kubeflow components: launching, supervising and observing elastic jobs.

A training script says `import elastic_runtime as elastic` and uses `elastic.run`, or `elastic_runtime.worker`; the
command line is `elastic_runtime.cli`. Importing this package is cheap: it loads neither torch, nor kfp, nor torchx.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_runtime.training import Job, RoundChanged, run

__version__ = "0.1.0"

__all__ = ["Job", "RoundChanged", "__version__", "run"]


def __getattr__(name: str) -> Any:
    if name in ("Job", "RoundChanged", "run"):
        return getattr(importlib.import_module("elastic_runtime.training"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
