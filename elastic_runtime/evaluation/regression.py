"""Regression metrics as pure functions of numpy arrays, point values and resampled ones alike."""

from __future__ import annotations

import numpy as np

from elastic_runtime.evaluation.bootstrap import FloatArray

__all__ = [
    "QUANTILES",
    "REGRESSION_NAMES",
    "regression_columns",
    "regression_summary",
    "residual_quantiles",
]

REGRESSION_NAMES = ("rmse", "mae", "r2", "mean_error")
"""Order of the values that `regression_summary` returns."""

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


def regression_columns(target: FloatArray, predicted: FloatArray) -> FloatArray:
    """Return the per-row terms that `regression_summary` sums, shape (5, n), float64.

    Targets are centred first, so that R² stays exact when the target is large against its spread.
    """
    truth = np.asarray(target, dtype=np.float64)
    residual = np.asarray(predicted, dtype=np.float64) - truth
    centred = truth - truth.mean()
    return np.stack([np.square(residual), np.abs(residual), residual, centred, np.square(centred)])


def regression_summary(columns: FloatArray, counts: FloatArray) -> FloatArray:
    """Return `REGRESSION_NAMES` for each weighting of the rows, shape (4, b).

    `columns` come from `regression_columns`, `counts` (n, b) say how often each row counts. R² is
    1 - (squared error) / (squared deviation of the target from its mean), NaN where the target is constant;
    `mean_error` is the mean of prediction - target. Errors are in the target's unit.
    """
    total = counts.sum(axis=0)
    squared, absolute, signed, first, second = columns @ counts
    spread = second - np.square(first) / total
    # A resample of one repeated row leaves only rounding noise.
    varies = spread > 1e-12 * np.maximum(second, np.finfo(np.float64).tiny)
    r2 = 1 - np.divide(squared, spread, out=np.full(len(total), np.nan), where=varies)
    return np.stack([np.sqrt(squared / total), absolute / total, r2, signed / total])


def residual_quantiles(target: FloatArray, predicted: FloatArray) -> dict[float, float]:
    """Return the `QUANTILES` of prediction - target, in the target's unit."""
    residual = np.asarray(predicted, dtype=np.float64) - np.asarray(target, dtype=np.float64)
    return {
        level: float(value) for level, value in zip(QUANTILES, np.quantile(residual, QUANTILES), strict=True)
    }
