"""A regression model's predictions on one split, judged: metrics with intervals, slices, comparison."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from elastic_runtime.evaluation.assessment import ComparedMetric, Resampling, RowDescription
from elastic_runtime.evaluation.bootstrap import FloatArray, IntArray, Interval
from elastic_runtime.evaluation.regression import (
    REGRESSION_NAMES,
    regression_columns,
    regression_summary,
    residual_quantiles,
)

__all__ = ["RegressionAssessment"]

_MAIN, _AGAINST, _SLICE = range(3)


class RegressionAssessment:
    """See `elastic_runtime.evaluation.assessment.Assessment`."""

    primary = "r2"
    slice_primary = "rmse"

    def __init__(self, output: FloatArray, target: FloatArray, resampling: Resampling) -> None:
        """Judge `output` (n,) or (n, 1), finite, against `target` (n,), in the same unit."""
        self.target = np.asarray(target, dtype=np.float64)
        self.predicted = np.asarray(output, dtype=np.float64).reshape(-1)
        self._resampling = resampling
        self._columns = regression_columns(self.target, self.predicted)
        self.quantiles = residual_quantiles(self.target, self.predicted)
        found = self._summarise(self._columns, _MAIN)
        self.metrics: Mapping[str, Interval] = _kept(found)
        self.undefined: dict[str, str] = {}
        self.remarks: list[str] = []
        if "r2" not in self.metrics:
            self.undefined["r2"] = (
                f"the target is {self.target[0]:g} in every row, and R² compares with the target's spread"
            )
            self.primary = "rmse"

    @property
    def residuals(self) -> FloatArray:
        """Prediction minus target, shape (n,)."""
        return self.predicted - self.target

    def on_rows(self, rows: IntArray, purpose: int) -> dict[str, Interval]:
        """Return RMSE, MAE, R² and mean error of the rows; R² is absent where their target is constant."""
        columns = regression_columns(self.target[rows], self.predicted[rows])
        return _kept(self._summarise(columns, _SLICE, purpose))

    def against(self, baseline: RegressionAssessment) -> list[ComparedMetric]:
        """Compare R² (where it is defined), RMSE and MAE, resampling both models' rows together."""

        def differences(counts: FloatArray) -> FloatArray:
            return regression_summary(self._columns, counts) - regression_summary(baseline._columns, counts)

        each = np.ones(len(self.target), dtype=np.int64)
        found = dict(
            zip(REGRESSION_NAMES, self._resampling.intervals(each, differences, _AGAINST), strict=True)
        )
        return [
            ComparedMetric(
                name=name,
                model=self.metrics[name].value,
                baseline=baseline.metrics[name].value,
                difference=found[name],
                higher_is_better=name == "r2",
            )
            for name in ("r2", "rmse", "mae")
            if name in self.metrics
        ]

    def badness(self) -> FloatArray:
        """Return the absolute error of each row."""
        return np.abs(self.residuals)

    def describe_row(self, row: int) -> RowDescription:
        """Return true value, prediction and error."""
        return {
            "true": float(self.target[row]),
            "predicted": float(self.predicted[row]),
            "error": float(self.predicted[row] - self.target[row]),
        }

    def _summarise(self, columns: FloatArray, *purpose: int) -> dict[str, Interval]:
        each = np.ones(columns.shape[1], dtype=np.int64)
        found = self._resampling.intervals(each, lambda counts: regression_summary(columns, counts), *purpose)
        return dict(zip(REGRESSION_NAMES, found, strict=True))


def _kept(found: Mapping[str, Interval]) -> dict[str, Interval]:
    return {name: interval for name, interval in found.items() if not np.isnan(interval.value)}
