"""From raw rows to a checked, split and normalised dataset folder, with a report (docs/formats.md)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from elastic_runtime.preprocessing.config import PreprocessConfig

if TYPE_CHECKING:
    from elastic_runtime.preprocessing.report import render_report
    from elastic_runtime.preprocessing.run import PreprocessResult, preprocess

__all__ = ["PreprocessConfig", "PreprocessResult", "preprocess", "render_report"]

# pandas, pandera and matplotlib are loaded when the work starts, not when a configuration is checked.
_LAZY = {"PreprocessResult": "run", "preprocess": "run", "render_report": "report"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
