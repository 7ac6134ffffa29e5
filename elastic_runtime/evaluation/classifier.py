"""A classifier's predictions on one split, judged: metrics with intervals, curves, slices, comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from elastic_runtime.evaluation.assessment import ComparedMetric, Resampling, RowDescription
from elastic_runtime.evaluation.bootstrap import FloatArray, IntArray, Interval, ratio
from elastic_runtime.evaluation.calibration import Reliability, reliability
from elastic_runtime.evaluation.classification import (
    SUMMARY_NAMES,
    brier_per_row,
    confusion_matrix,
    confusion_summary,
    log_loss_per_row,
    per_class_scores,
    predicted_class,
    probabilities_from,
)
from elastic_runtime.evaluation.roc import (
    RankedScores,
    RocCurve,
    area_under_roc,
    micro_average_curve,
    rank_scores,
    roc_curve,
)

__all__ = ["ClassRow", "ClassificationAssessment"]

_MAIN, _LOSSES, _AUC, _AGAINST, _SLICE = range(5)
_AUC_VISITS = 1e9  # rows x classes x resamples: about a quarter of a minute
_MIN_RESAMPLES = 100


@dataclass(frozen=True, kw_only=True)
class ClassRow:
    """Scores of one class; None where undefined."""

    label: str
    rows: int
    predicted: int
    precision: float | None
    recall: float | None
    f1: float | None
    auc: float | None


class ClassificationAssessment:
    """See `elastic_runtime.evaluation.assessment.Assessment`."""

    primary = "accuracy"
    slice_primary = "accuracy"

    def __init__(
        self,
        output: FloatArray,
        target: IntArray,
        classes: Sequence[str],
        resampling: Resampling,
        *,
        calibration_bins: int,
    ) -> None:
        """Judge `output` (n, classes), finite, against `target` (n,), class indexes from 0 to classes - 1."""
        self.classes = tuple(classes)
        self.target = target
        self.probabilities, self._log_probabilities, remark = probabilities_from(output)
        self.predicted = predicted_class(self.probabilities)
        self._resampling = resampling
        count = len(self.classes)
        self.confusion = confusion_matrix(target, self.predicted, count)
        self.reliability: Reliability = reliability(self.probabilities, target, bins=calibration_bins)
        self._losses = np.stack(
            [
                log_loss_per_row(self._log_probabilities, target),
                brier_per_row(self.probabilities, target),
            ]
        )
        self.metrics: Mapping[str, Interval] = {}
        self.undefined: dict[str, str] = {}
        self.remarks: list[str] = [remark] if remark else []
        self._rankings = self._rank()
        self.metrics = self._measure()
        self.per_class: tuple[ClassRow, ...] = self._per_class()
        self.curves: tuple[RocCurve, ...] = self._curves()
        self._remark_on_classes()

    @property
    def main_curve(self) -> RocCurve | None:
        """The ROC curve to show alone: the second class of two, or the micro-average; None if undefined."""
        return self.curves[0] if self.curves else None

    @property
    def majority_accuracy(self) -> float:
        """Accuracy of always answering the most frequent class of this split."""
        return float(self.confusion.sum(axis=1).max() / len(self.target))

    def on_rows(self, rows: IntArray, purpose: int) -> dict[str, Interval]:
        """Return accuracy, macro F1 and log loss of the rows."""
        cells, sizes = self._cells(rows)
        found = self._resampling.intervals(
            sizes, lambda counts: self._summary(cells, counts), _SLICE, purpose
        )
        named = dict(zip(SUMMARY_NAMES, found, strict=True))
        return {
            "accuracy": named["accuracy"],
            "f1_macro": named["f1_macro"],
            "log_loss": Interval(value=float(self._losses[0, rows].mean())),
        }

    def against(self, baseline: ClassificationAssessment) -> list[ComparedMetric]:
        """Compare accuracy, macro F1, log loss and Brier score, resampling both models' rows together."""
        count = len(self.classes)
        joint = (self.target * count + self.predicted) * count + baseline.predicted
        cells, sizes = np.unique(joint, return_counts=True)
        truth, ours, theirs = cells // count**2, cells // count % count, cells % count

        def summaries(counts: FloatArray) -> FloatArray:
            mine = confusion_summary(truth, ours, counts, count)
            other = confusion_summary(truth, theirs, counts, count)
            # Differences of counts, not of shares: 0.96 - 0.95 is not 0.01.
            hits = (ours == truth).astype(np.float64) - (theirs == truth)
            accuracy = hits @ counts / counts.sum(axis=0)
            return np.stack([accuracy, mine[1] - other[1]])

        difference = self._losses - baseline._losses
        found = [
            *self._resampling.intervals(sizes, summaries, _AGAINST, 0),
            *self._resampling.intervals(
                np.ones(len(self.target), dtype=np.int64),
                lambda counts: difference @ counts / counts.sum(axis=0),
                _AGAINST,
                1,
            ),
        ]
        names = ("accuracy", "f1_macro", "log_loss", "brier")
        return [
            ComparedMetric(
                name=name,
                model=self.metrics[name].value,
                baseline=baseline.metrics[name].value,
                difference=interval,
                higher_is_better=name in SUMMARY_NAMES,
            )
            for name, interval in zip(names, found, strict=True)
        ]

    def badness(self) -> FloatArray:
        """Return the log loss of each row: confident mistakes come first."""
        losses: FloatArray = self._losses[0]
        return losses

    def describe_row(self, row: int) -> RowDescription:
        """Return true class, prediction and the two probabilities."""
        truth, guess = int(self.target[row]), int(self.predicted[row])
        return {
            "true": self.classes[truth],
            "predicted": self.classes[guess],
            "confidence": float(self.probabilities[row, guess]),
            "probability of the true class": float(self.probabilities[row, truth]),
        }

    def _cells(self, rows: IntArray | None = None) -> tuple[IntArray, IntArray]:
        pairs = self.target * len(self.classes) + self.predicted
        cells, sizes = np.unique(pairs if rows is None else pairs[rows], return_counts=True)
        return cells, sizes

    def _summary(self, cells: IntArray, counts: FloatArray) -> FloatArray:
        count = len(self.classes)
        return confusion_summary(cells // count, cells % count, counts, count)

    def _rank(self) -> dict[int, RankedScores]:
        """Rankings of the classes whose ROC is defined; of two classes the second stands for both."""
        support = np.bincount(self.target, minlength=len(self.classes))
        defined = [i for i, rows in enumerate(support) if 0 < rows < len(self.target)]
        if len(self.classes) == 2:
            defined = [i for i in defined if i == 1]
        return {i: rank_scores(self.probabilities[:, i], self.target == i) for i in defined}

    def _measure(self) -> dict[str, Interval]:
        rows = len(self.target)
        each = np.ones(rows, dtype=np.int64)
        cells, sizes = self._cells()
        summary = self._resampling.intervals(sizes, lambda counts: self._summary(cells, counts), _MAIN)
        measured = dict(zip(SUMMARY_NAMES, summary, strict=True))
        if self._rankings:
            measured["auc"] = self._auc(each)
        else:
            only = self.classes[int(self.target[0])]
            self.undefined["auc"] = f"every row has the class {only!r}, and a ROC curve needs two classes"
        measured["log_loss"], measured["brier"] = self._resampling.intervals(
            each, lambda counts: self._losses @ counts / counts.sum(axis=0), _LOSSES
        )
        measured["calibration_error"] = Interval(value=self.reliability.expected_error)
        if np.isnan(measured["precision_weighted"].value):
            del measured["precision_weighted"]
            self.undefined["precision_weighted"] = "no class that occurs in this split is ever predicted"
        return measured

    def _auc(self, each: IntArray) -> Interval:
        def mean_area(counts: FloatArray) -> FloatArray:
            areas = np.stack([area_under_roc(ranked, counts) for ranked in self._rankings.values()])
            defined = ~np.isnan(areas)
            total = np.where(defined, areas, 0).sum(axis=0)
            number = defined.sum(axis=0)
            return ratio(total, number.astype(np.float64))[None]

        wanted = self._resampling.resamples
        affordable = int(_AUC_VISITS / (len(each) * len(self._rankings)))
        resamples = min(wanted, max(affordable, _MIN_RESAMPLES))
        if resamples < wanted:
            self.remarks.append(
                f"The interval of auc comes from {resamples:,} resamples, not {wanted:,}, because ranking "
                f"{len(each):,} rows for {len(self._rankings):,} classes is slow."
            )
        return self._resampling.intervals(each, mean_area, _AUC, resamples=resamples)[0]

    def _per_class(self) -> tuple[ClassRow, ...]:
        cells, sizes = self._cells()
        count = len(self.classes)
        scores = per_class_scores(cells // count, cells % count, sizes[:, None].astype(np.float64), count)
        each = np.ones((len(self.target), 1))
        areas = {i: float(area_under_roc(ranked, each)[0]) for i, ranked in self._rankings.items()}
        if len(self.classes) == 2 and 1 in areas:
            areas[0] = areas[1]
        return tuple(
            ClassRow(
                label=label,
                rows=int(scores.support[i, 0]),
                predicted=int(scores.predicted[i, 0]),
                precision=_defined(scores.precision[i, 0]),
                recall=_defined(scores.recall[i, 0]),
                f1=_defined(scores.f1[i, 0]),
                auc=areas.get(i),
            )
            for i, label in enumerate(self.classes)
        )

    def _curves(self) -> tuple[RocCurve, ...]:
        """The main curve, then for more than two classes the three classes that are separated worst."""
        if not self._rankings:
            return ()
        if len(self.classes) == 2:
            return (roc_curve(self.classes[1], self.probabilities[:, 1], self.target == 1),)
        worst = sorted(self._rankings, key=lambda i: self.per_class[i].auc or 0.0)[:3]
        return (
            micro_average_curve(self.probabilities, self.target),
            *(roc_curve(self.classes[i], self.probabilities[:, i], self.target == i) for i in worst),
        )

    def _remark_on_classes(self) -> None:
        absent = [row.label for row in self.per_class if not row.rows]
        if absent:
            self.remarks.append(
                f"No row has the class {_listed(absent)}: recall and ROC are undefined there, and macro "
                "averages leave undefined values out."
            )
        never = [row.label for row in self.per_class if row.rows and not row.predicted]
        if never:
            self.remarks.append(f"The model never predicts the class {_listed(never)}, which occurs here.")


def _defined(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _listed(labels: Sequence[str]) -> str:
    shown = ", ".join(repr(label) for label in labels[:5])
    return shown + (f" and {len(labels) - 5} more" if len(labels) > 5 else "")
