"""The result of an evaluation, and its machine-readable document."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from elastic_runtime.evaluation.assessment import ComparedMetric
from elastic_runtime.evaluation.bootstrap import Interval
from elastic_runtime.evaluation.classifier import ClassificationAssessment
from elastic_runtime.evaluation.config import EvaluateConfig
from elastic_runtime.evaluation.gates import GateResult
from elastic_runtime.evaluation.regressor import RegressionAssessment
from elastic_runtime.evaluation.roc import RocCurve
from elastic_runtime.evaluation.slices import SliceRow

__all__ = ["MAX_VIEW_CLASSES", "SCHEMA", "Comparison", "Evaluation", "Slices", "WorstExample"]

SCHEMA = 1

MAX_VIEW_CLASSES = 100
"""The confusion matrix of more classes is left out of Kubeflow's artifact metadata."""


@dataclass(frozen=True, kw_only=True)
class Slices:
    """Metrics per slice of `column`; `worst` is the label of the worst slice that is not small, or None."""

    column: str
    metric: str
    rows: tuple[SliceRow, ...]
    worst: str | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Metrics of the model and of the baseline on the same rows, the primary metric first."""

    metrics: tuple[ComparedMetric, ...]

    @property
    def drop(self) -> float:
        """How much worse the model is in the primary metric (negative: better)."""
        primary = self.metrics[0]
        return -primary.difference.value if primary.higher_is_better else primary.difference.value


@dataclass(frozen=True, kw_only=True)
class WorstExample:
    """A row that the model got most wrong: its number in the split, the prediction, its extra columns."""

    row: int
    prediction: Mapping[str, Any]
    columns: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Everything that an evaluation found. `write_outputs` makes the report, summary and document of it."""

    model_name: str
    dataset_name: str
    task: str
    target: str
    rows: int
    config: EvaluateConfig
    gate: GateResult
    assessment: ClassificationAssessment | RegressionAssessment | None
    """The details; None when predictions were not finite, so that nothing could be measured."""
    slices: Slices | None = None
    baseline: Comparison | None = None
    worst: tuple[WorstExample, ...] = ()
    remarks: tuple[str, ...] = ()
    """What a reader should know, in sentences."""

    @property
    def split(self) -> str:
        """Name of the split that was evaluated."""
        return self.config.split

    @property
    def metrics(self) -> dict[str, float]:
        """Finite metrics, flat: `test_accuracy`, `test_accuracy_low`, `test_accuracy_high`, `test_rows` …

        The prefix is the split. Undefined metrics are absent; `undefined` says why.
        """
        flat: dict[str, float] = {f"{self.split}_rows": float(self.rows)}
        for name, interval in (self.assessment.metrics if self.assessment else {}).items():
            flat.update(_flat(f"{self.split}_{name}", interval))
        if self.slices is not None:
            worst = next((row for row in self.slices.rows if row.label == self.slices.worst), None)
            if worst is not None:
                name = f"{self.split}_worst_slice_{self.slices.metric}"
                flat[name] = worst.metrics[self.slices.metric].value
        if self.baseline is not None:
            primary = self.baseline.metrics[0]
            flat[f"{self.split}_baseline_{primary.name}"] = primary.baseline
            flat.update(_flat(f"{self.split}_baseline_difference", primary.difference))
        return flat

    @property
    def undefined(self) -> dict[str, str]:
        """Why a metric is not among `metrics`, by name without the split's prefix."""
        return dict(self.assessment.undefined) if self.assessment else {}

    def confusion_view(self) -> tuple[list[str], list[list[int]]] | None:
        """Return labels and counts (row: true class) for Kubeflow's confusion matrix.

        None for regression, and for more than `MAX_VIEW_CLASSES` classes, which no browser shows.
        """
        if not isinstance(self.assessment, ClassificationAssessment):
            return None
        if len(self.assessment.classes) > MAX_VIEW_CLASSES:
            return None
        return list(self.assessment.classes), self.assessment.confusion.tolist()

    def roc_view(self) -> RocCurve | None:
        """Return the one curve for Kubeflow's ROC view, with finite thresholds.

        The second of two classes, else the micro-average over all classes; None where it is undefined.
        """
        if not isinstance(self.assessment, ClassificationAssessment):
            return None
        return self.assessment.main_curve

    def to_dict(self) -> dict[str, Any]:
        """Return what evaluation.json holds: plain JSON types, finite numbers, None for undefined."""
        config = self.config
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "model": self.model_name,
            "dataset": self.dataset_name,
            "task": self.task,
            "target": self.target,
            "split": self.split,
            "rows": self.rows,
            "metrics": self.metrics,
            "undefined": self.undefined,
            "gate": {"verdict": self.gate.verdict, **asdict(self.gate)},
            "bootstrap": {
                "resamples": config.bootstrap,
                "confidence": config.confidence,
                "seed": config.seed,
                "method": "percentile",
            },
            "slices": None if self.slices is None else asdict(self.slices),
            "baseline": None if self.baseline is None else self._comparison(self.baseline),
            "worst_examples": [asdict(example) for example in self.worst],
            "remarks": list(self.remarks),
        }
        if isinstance(self.assessment, ClassificationAssessment):
            document["classification"] = _classification(self.assessment)
        elif isinstance(self.assessment, RegressionAssessment):
            document["regression"] = {
                "residual_quantiles": {
                    f"{level:g}": value for level, value in self.assessment.quantiles.items()
                }
            }
        plain: dict[str, Any] = _plain(document)
        return plain

    @staticmethod
    def _comparison(comparison: Comparison) -> dict[str, Any]:
        rows = [{**asdict(metric), "verdict": metric.verdict} for metric in comparison.metrics]
        return {"primary": comparison.metrics[0].name, "drop": comparison.drop, "metrics": rows}


def _flat(name: str, interval: Interval) -> dict[str, float]:
    flat = {name: interval.value}
    if interval.low is not None and interval.high is not None:
        flat |= {f"{name}_low": interval.low, f"{name}_high": interval.high}
    return flat


def _classification(assessment: ClassificationAssessment) -> dict[str, Any]:
    return {
        "classes": list(assessment.classes),
        "confusion_matrix": assessment.confusion.tolist(),
        "per_class": [asdict(row) for row in assessment.per_class],
        "reliability": asdict(assessment.reliability),
        "roc": [asdict(curve) for curve in assessment.curves],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)
