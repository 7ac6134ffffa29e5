"""ROC curves and the area under them, exact under ties and for many resamples at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elastic_runtime.evaluation.bootstrap import FloatArray, IntArray, ratio

__all__ = ["RankedScores", "RocCurve", "area_under_roc", "micro_average_curve", "rank_scores", "roc_curve"]


@dataclass(frozen=True, kw_only=True)
class RankedScores:
    """Rows sorted by score and cut into the shortest list of segments that leaves the AUC unchanged.

    Only the order of positives against negatives matters, so neighbours with the same label share a segment
    (unless a tie with the other label sets them apart).
    """

    order: IntArray
    """Row numbers by rising score, shape (n,)."""
    starts: IntArray
    """Where each segment starts in `order`, shape (segments,)."""
    positive: FloatArray
    """1 for a segment of positives, 0 for negatives, shape (segments, 1)."""
    tied: FloatArray
    """1 where a segment of positives ties with the segment of negatives before it, shape (segments, 1)."""


@dataclass(frozen=True, kw_only=True)
class RocCurve:
    """Points of a ROC curve from (0, 0) to (1, 1), with finite thresholds, falling."""

    name: str
    false_positive_rate: FloatArray
    true_positive_rate: FloatArray
    thresholds: FloatArray
    auc: float


def rank_scores(scores: FloatArray, positive: IntArray) -> RankedScores:
    """Prepare `area_under_roc`: `scores` (n,) rise with the belief that `positive` (n,), 0 or 1, is 1."""
    label = np.asarray(positive, dtype=np.int64)
    order = np.lexsort((label, scores))
    sorted_scores, sorted_label = scores[order], label[order]
    new_score = np.concatenate([[True], sorted_scores[1:] != sorted_scores[:-1]])
    group = np.cumsum(new_score) - 1
    in_group = np.bincount(group)
    positives_in_group = np.bincount(group, weights=sorted_label)
    mixed = ((positives_in_group > 0) & (positives_in_group < in_group))[group]
    new_label = np.concatenate([[True], sorted_label[1:] != sorted_label[:-1]])
    beside_mixed = mixed | np.concatenate([[False], mixed[:-1]])
    starts = np.flatnonzero(new_label | (new_score & beside_mixed))
    return RankedScores(
        order=order,
        starts=starts,
        positive=sorted_label[starts, None].astype(np.float64),
        tied=(mixed[starts] & (sorted_label[starts] == 1))[:, None].astype(np.float64),
    )


def area_under_roc(ranked: RankedScores, counts: FloatArray) -> FloatArray:
    """Return the area under the ROC curve for each weighting of the rows, shape (b,).

    `counts` (n, b) says how often each row counts. The area is the Mann-Whitney statistic: the share of
    pairs of a positive and a negative that the score orders rightly, a tie counting half; NaN without pairs.
    Source: Hanley and McNeil, Radiology 143 (1982), 29-36.
    """
    weight = np.add.reduceat(counts[ranked.order], ranked.starts, axis=0)
    of_positives = weight * ranked.positive
    of_negatives = weight - of_positives
    below = np.cumsum(of_negatives, axis=0)
    tie = np.zeros_like(below)
    tie[1:] = of_negatives[:-1]
    right = (of_positives * (below - 0.5 * ranked.tied * tie)).sum(axis=0)
    pairs = of_positives.sum(axis=0) * of_negatives.sum(axis=0)
    return ratio(right, pairs)


def roc_curve(name: str, scores: FloatArray, positive: IntArray, *, points: int = 200) -> RocCurve:
    """Return the ROC curve of `scores` (n,) for the labels `positive` (n,), which must contain both 0 and 1.

    Corners only (points on a straight stretch are left out), thinned to at most `points`; the area is
    computed from all rows. The first threshold, above every score, is infinite in scikit-learn and finite
    here, because artifact metadata is JSON.
    """
    false_rate, true_rate, thresholds = _corners(scores, positive)
    if len(thresholds) > points:
        kept = _thinned(false_rate, true_rate, points)
        false_rate, true_rate, thresholds = false_rate[kept], true_rate[kept], thresholds[kept]
    area = area_under_roc(rank_scores(scores, positive), np.ones((len(scores), 1)))
    return RocCurve(
        name=name,
        false_positive_rate=np.asarray(false_rate, dtype=np.float64),
        true_positive_rate=np.asarray(true_rate, dtype=np.float64),
        thresholds=thresholds,
        auc=float(area[0]),
    )


def micro_average_curve(probabilities: FloatArray, target: IntArray) -> RocCurve:
    """Return the ROC curve over all (row, class) decisions of a multi-class model at once."""
    one_hot = np.zeros(probabilities.shape, dtype=np.int64)
    one_hot[np.arange(len(target)), target] = 1
    return roc_curve("micro-average", probabilities.ravel(), one_hot.ravel())


def _corners(scores: FloatArray, positive: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    # By falling score, one point after each group of equal scores.
    order = np.argsort(-scores, kind="stable")
    falling = scores[order]
    label = np.asarray(positive, dtype=np.int64)[order]
    last = np.append(np.flatnonzero(np.diff(falling)), len(falling) - 1)
    hits = np.append(0, np.cumsum(label)[last])
    alarms = np.append(0, last + 1) - hits
    thresholds = np.append(max(1.0, falling[0] + 1e-6), falling[last])
    # Whole numbers: whether three points lie on one line is decided exactly.
    rise, run = np.diff(hits), np.diff(alarms)
    bend = np.concatenate([[True], rise[:-1] * run[1:] != rise[1:] * run[:-1], [True]])
    return alarms[bend] / alarms[-1], hits[bend] / hits[-1], thresholds[bend]


def _thinned(false_rate: FloatArray, true_rate: FloatArray, points: int) -> IntArray:
    # Even steps along the curve's length, not along its index: corners crowd where scores are dense.
    length = np.concatenate([[0.0], np.cumsum(np.hypot(np.diff(false_rate), np.diff(true_rate)))])
    wanted = np.linspace(0, length[-1], points)
    kept = np.unique(np.searchsorted(length, wanted))
    return np.unique(np.concatenate([[0], kept[kept < len(length)], [len(length) - 1]]))
