"""The model folder: written once by training, read by evaluation and serving (see docs/formats.md).

Reading the configuration needs no torch; `save_model` and `load_model` load it when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from elastic_runtime.models.config import ModelConfig, TensorSpec, read_config

if TYPE_CHECKING:
    from elastic_runtime.models.load import LoadedModel, load_model, load_weights
    from elastic_runtime.models.save import save_model

__all__ = [
    "LoadedModel",
    "ModelConfig",
    "TensorSpec",
    "load_model",
    "load_weights",
    "read_config",
    "save_model",
]

_LAZY = {
    "LoadedModel": "elastic_runtime.models.load",
    "load_model": "elastic_runtime.models.load",
    "load_weights": "elastic_runtime.models.load",
    "save_model": "elastic_runtime.models.save",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
