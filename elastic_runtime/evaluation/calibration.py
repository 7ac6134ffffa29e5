"""How far a classifier's confidence can be believed: reliability curve and expected calibration error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elastic_runtime.evaluation.bootstrap import FloatArray, IntArray

__all__ = ["DEFAULT_BINS", "Reliability", "reliability"]

DEFAULT_BINS = 15


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """Confidence bins that hold at least one row; all arrays have shape (bins,)."""

    edges_low: FloatArray
    edges_high: FloatArray
    rows: IntArray
    confidence: FloatArray
    accuracy: FloatArray
    expected_error: float
    """Expected calibration error: mean over the rows of |accuracy - confidence| of their bin, 0 to 1."""
    largest_error: float
    """Largest |accuracy - confidence| of any bin (noisy for bins of few rows)."""


def reliability(probabilities: FloatArray, target: IntArray, *, bins: int = DEFAULT_BINS) -> Reliability:
    """Bin rows by the probability of their predicted class and compare it with how often it was right.

    `probabilities` (n, classes), `target` (n,). Equal-width bins over [0, 1], a row on an edge belongs to the
    lower bin. No bootstrap interval is offered: the error is biased upwards by |noise| in every bin, more so
    in a resample, and a percentile interval would often lie wholly above the estimate. Source: Guo, Pleiss,
    Sun and Weinberger, On Calibration of Modern Neural Networks, ICML 2017, section 2.
    """
    confidence = probabilities.max(axis=1)
    right = (probabilities.argmax(axis=1) == target).astype(np.float64)
    edges = np.linspace(0, 1, bins + 1)
    index = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, bins - 1)
    rows = np.bincount(index, minlength=bins)
    used = rows > 0
    mean_confidence = np.bincount(index, weights=confidence, minlength=bins)[used] / rows[used]
    accuracy = np.bincount(index, weights=right, minlength=bins)[used] / rows[used]
    gap = np.abs(accuracy - mean_confidence)
    return Reliability(
        edges_low=edges[:-1][used],
        edges_high=edges[1:][used],
        rows=rows[used],
        confidence=mean_confidence,
        accuracy=accuracy,
        expected_error=float((gap * rows[used]).sum() / rows.sum()),
        largest_error=float(gap.max()),
    )
