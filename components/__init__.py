"""The four Kubeflow components. Importing a name loads kfp; importing this package does not."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["elastic_train", "evaluate", "preprocess", "serve"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f"kfp_elastic.components.{name}.component"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
