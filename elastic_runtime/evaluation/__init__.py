"""Judging a trained model: metrics with intervals, slices, comparison with a baseline, gates and reports.

Importing this package is cheap; each name loads its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_runtime.evaluation.config import EvaluateConfig
    from elastic_runtime.evaluation.evaluator import evaluate
    from elastic_runtime.evaluation.gates import GateResult
    from elastic_runtime.evaluation.outputs import write_outputs
    from elastic_runtime.evaluation.result import Evaluation

__all__ = ["EvaluateConfig", "Evaluation", "GateResult", "evaluate", "write_outputs"]

_HOME = {
    "EvaluateConfig": "config",
    "Evaluation": "result",
    "GateResult": "gates",
    "evaluate": "evaluator",
    "write_outputs": "outputs",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"elastic_runtime.evaluation.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
