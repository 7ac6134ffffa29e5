"""Seeded percentile bootstrap, vectorised over the resamples and bounded in memory.

A bootstrap sample of n rows drawn with replacement is a vector of counts: how often each row was drawn. A
statistic that looks at rows only through a cell they share (such as the pair of true and predicted class)
needs only the counts of the cells, and those are multinomial with the cells' shares as probabilities. So a
statistic here is a function of counts, and 1000 resamples of a million rows with 100 cells cost as much as
1000 draws from a multinomial with 100 outcomes. Nothing is approximated by this.

Source: B. Efron and R. J. Tibshirani, An Introduction to the Bootstrap, 1993: the percentile interval is
section 13.3, the paired (two-model) case section 8.4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "FloatArray",
    "IntArray",
    "Interval",
    "bootstrap",
    "percentile_intervals",
    "ratio",
    "resampled_counts",
]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_BLOCK_BYTES = 4 * 2**20  # blocks that stay in the cache were twice as fast as 64 MiB ones
_MULTINOMIAL_GAIN = 4  # a multinomial draw of one cell costs about as much as drawing this many rows


def ratio(numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    """Return numerator / denominator by element; NaN, for undefined, where the denominator is 0."""
    undefined: FloatArray = np.full(np.broadcast(numerator, denominator).shape, np.nan)
    return np.divide(numerator, denominator, out=undefined, where=denominator > 0, dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value with its bootstrap interval; `low` and `high` are None when no interval was computed."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval exists and lies on one side of zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def resampled_counts(
    sizes: IntArray, resamples: int, rng: np.random.Generator, *, block_bytes: int = _BLOCK_BYTES
) -> Iterator[FloatArray]:
    """Yield blocks of bootstrap counts, shape (cells, resamples of the block), float64.

    `sizes` (cells,) says how many rows each cell holds; each column of a block sums to the number of rows.
    At most about `block_bytes` bytes are held at a time (never less than one resample).
    """
    cells = len(sizes)
    rows = int(sizes.sum())
    by_cell = cells * _MULTINOMIAL_GAIN <= rows
    width = max(1, min(resamples, block_bytes // (16 * max(cells, 1 if by_cell else rows))))
    cell_of_row = None if cells == rows else np.repeat(np.arange(cells, dtype=np.int64), sizes)
    done = 0
    while done < resamples:
        block = min(width, resamples - done)
        if by_cell:
            counts = rng.multinomial(rows, sizes / rows, size=block).T
        else:
            drawn = rng.integers(rows, size=(block, rows), dtype=np.int64)
            if cell_of_row is not None:
                drawn = cell_of_row[drawn]
            drawn *= block
            drawn += np.arange(block)[:, None]
            counts = np.bincount(drawn.ravel(), minlength=cells * block).reshape(cells, block)
        yield counts.astype(np.float64)
        done += block


def bootstrap(
    sizes: IntArray,
    statistic: Callable[[FloatArray], FloatArray],
    *,
    resamples: int,
    rng: np.random.Generator,
    block_bytes: int = _BLOCK_BYTES,
) -> FloatArray:
    """Return `statistic` of every resample, shape (statistics, resamples).

    `statistic` maps counts (cells, b) to values (statistics, b); NaN where a resample leaves it undefined.
    """
    blocks = [
        statistic(counts) for counts in resampled_counts(sizes, resamples, rng, block_bytes=block_bytes)
    ]
    return np.concatenate(blocks, axis=1)


def percentile_intervals(values: FloatArray, samples: FloatArray, confidence: float) -> list[Interval]:
    """Return the percentile interval of each statistic.

    `values` (statistics,) are the estimates on the rows themselves, `samples` (statistics, resamples) those
    of the resamples. A resample that leaves a statistic undefined (NaN) is not counted; an undefined
    estimate, or one that every resample leaves undefined, gets no interval.
    """
    tail = (1 - confidence) / 2
    intervals = []
    for value, drawn in zip(values, samples, strict=True):
        defined = drawn[~np.isnan(drawn)]
        if np.isnan(value) or not len(defined):
            intervals.append(Interval(value=float(value)))
            continue
        low, high = np.quantile(defined, [tail, 1 - tail])
        intervals.append(Interval(value=float(value), low=float(low), high=float(high)))
    return intervals
