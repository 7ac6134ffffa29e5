"""What the two tasks have in common: intervals over rows, comparison of two models, the slots to fill."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

from elastic_runtime.evaluation.bootstrap import (
    FloatArray,
    IntArray,
    Interval,
    bootstrap,
    percentile_intervals,
)

__all__ = ["Assessment", "ComparedMetric", "Resampling", "RowDescription"]

RowDescription = dict[str, Any]
"""Columns of one row in the table of worst examples."""


@dataclass(frozen=True, kw_only=True)
class ComparedMetric:
    """One metric of two models on the same rows; `difference` is model minus baseline, with its interval."""

    name: str
    model: float
    baseline: float
    difference: Interval
    higher_is_better: bool

    @property
    def verdict(self) -> str:
        """`better`, `worse`, `no clear difference` when the interval contains zero, or empty without one."""
        if self.difference.low is None or self.difference.high is None:
            return ""
        if not self.difference.excludes_zero:
            return "no clear difference"
        return "better" if (self.difference.low > 0) == self.higher_is_better else "worse"


@dataclass(frozen=True, kw_only=True)
class Resampling:
    """How intervals are made. Each use has a random stream of its own, named by `purpose`, so that asking for
    slices or a baseline does not change the intervals of the main metrics.
    """

    resamples: int
    confidence: float
    seed: int

    def intervals(
        self,
        sizes: IntArray,
        statistic: Callable[[FloatArray], FloatArray],
        *purpose: int,
        resamples: int | None = None,
    ) -> list[Interval]:
        """Return each statistic on the rows themselves with its interval (none when `resamples` is 0).

        `sizes` (cells,) are the rows per cell, `statistic` maps counts (cells, b) to (statistics, b).
        """
        value = statistic(sizes[:, None].astype(np.float64))[:, 0]
        wanted = self.resamples if resamples is None else resamples
        if not wanted:
            return [Interval(value=float(one)) for one in value]
        rng = np.random.default_rng([self.seed, *purpose])
        samples = bootstrap(sizes, statistic, resamples=wanted, rng=rng)
        return percentile_intervals(value, samples, self.confidence)


class Assessment(Protocol):
    """A model's predictions on the rows of one split, judged. Implemented once per task."""

    primary: str
    """Metric of the comparison with a baseline: `accuracy`, or `r2` (`rmse` where that is undefined)."""

    slice_primary: str
    """Metric by which slices are compared: `accuracy` or `rmse`."""

    metrics: Mapping[str, Interval]
    """Defined metrics by name, without the split's prefix."""

    undefined: Mapping[str, str]
    """Why a metric is not among `metrics`, by name."""

    remarks: Sequence[str]
    """What the reader of the report should know."""

    def on_rows(self, rows: IntArray, purpose: int) -> dict[str, Interval]:
        """Return the metrics of the slice with these rows (row numbers); undefined ones are absent."""

    def against(self, baseline: Self) -> list[ComparedMetric]:
        """Compare with a baseline's assessment of the same rows; the primary metric comes first."""

    def badness(self) -> FloatArray:
        """Return how wrong each row is, shape (n,); larger is worse."""

    def describe_row(self, row: int) -> RowDescription:
        """Return what to show of a row among the worst examples."""
