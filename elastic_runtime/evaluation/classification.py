"""Classification metrics as pure functions of numpy arrays, point values and resampled ones alike.

The functions that take `counts` (cells, b) evaluate b weightings of the same rows at once; the value on the
rows themselves is the column in which every cell has its own size.

An undefined value is NaN, never a silent 0: the recall of a class without rows, the precision of a class
that is never predicted, the ROC of a split with one class only. Averages leave undefined classes out, as
scikit-learn does with `zero_division=numpy.nan`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elastic_runtime.evaluation.bootstrap import FloatArray, IntArray, ratio

__all__ = [
    "SUMMARY_NAMES",
    "ClassScores",
    "brier_per_row",
    "confusion_matrix",
    "confusion_summary",
    "log_loss_per_row",
    "per_class_scores",
    "predicted_class",
    "probabilities_from",
]

SUMMARY_NAMES = (
    "accuracy",
    "f1_macro",
    "f1_weighted",
    "precision_macro",
    "precision_weighted",
    "recall_macro",
)
"""Order of the values that `confusion_summary` returns. (Weighted recall is the accuracy.)"""

_PROBABILITY_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class ClassScores:
    """Per-class scores, each of shape (classes, b)."""

    precision: FloatArray
    recall: FloatArray
    f1: FloatArray
    support: FloatArray
    predicted: FloatArray


def probabilities_from(output: FloatArray) -> tuple[FloatArray, FloatArray, str]:
    """Turn a classifier's output (n, classes) into probabilities.

    Returns probabilities (n, classes) float64, their natural logarithms, and a remark for the report or "".
    Outputs are logits by contract; rows that are non-negative and sum to 1 are probabilities already, which
    is remarked on because a softmax of them would flatten every confidence.
    """
    scores = np.asarray(output, dtype=np.float64)
    within = scores.shape[1] > 1 and bool(np.all((scores >= 0) & (scores <= 1 + _PROBABILITY_TOLERANCE)))
    if not within:
        return (*_softmax(scores), "")
    if np.allclose(scores.sum(axis=1), 1, atol=_PROBABILITY_TOLERANCE):
        clipped = np.clip(scores, np.finfo(np.float32).tiny, None)
        probabilities = clipped / clipped.sum(axis=1, keepdims=True)
        return (
            probabilities,
            np.log(probabilities),
            "The model's outputs are probabilities, not logits (every row is non-negative and sums to 1); "
            "they were used as they are. Export the model without its softmax to meet the contract.",
        )
    return (
        *_softmax(scores),
        "Every output of the model lies between 0 and 1 but the rows do not sum to 1. They were read as "
        "logits; if they are meant as probabilities, confidences and calibration are wrong.",
    )


def _softmax(logits: FloatArray) -> tuple[FloatArray, FloatArray]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    logarithms = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return np.exp(logarithms), logarithms


def predicted_class(probabilities: FloatArray) -> IntArray:
    """Return the most probable class of each row, shape (n,); a tie goes to the lower index."""
    best: IntArray = probabilities.argmax(axis=1)
    return best


def confusion_matrix(target: IntArray, predicted: IntArray, classes: int) -> IntArray:
    """Return the counts (classes, classes): row = true class, column = predicted class."""
    cells = np.bincount(target * classes + predicted, minlength=classes * classes)
    return cells.reshape(classes, classes)


def per_class_scores(
    true_class: IntArray, predicted: IntArray, counts: FloatArray, classes: int
) -> ClassScores:
    """Return precision, recall and F1 per class.

    `true_class` and `predicted` (cells,) describe the cells, `counts` (cells, b) their weights. F1 is
    2 tp / (2 tp + fp + fn): 0 for a class that occurs and is never hit, NaN for one that neither occurs nor
    is predicted.
    """
    every = np.arange(classes)[:, None]
    is_true = (every == true_class).astype(np.float64)
    is_predicted = (every == predicted).astype(np.float64)
    support = is_true @ counts
    chosen = is_predicted @ counts
    hits = (is_true * is_predicted) @ counts
    return ClassScores(
        precision=ratio(hits, chosen),
        recall=ratio(hits, support),
        f1=ratio(2 * hits, support + chosen),
        support=support,
        predicted=chosen,
    )


def confusion_summary(
    true_class: IntArray, predicted: IntArray, counts: FloatArray, classes: int
) -> FloatArray:
    """Return the averages `SUMMARY_NAMES` for each weighting, shape (6, b).

    Macro averages weigh classes equally, weighted averages by their number of rows; both leave out classes
    for which the score is undefined. Macro recall is also known as balanced accuracy.
    """
    scores = per_class_scores(true_class, predicted, counts, classes)
    accuracy = (true_class == predicted).astype(np.float64) @ counts / counts.sum(axis=0)
    return np.stack(
        [
            accuracy,
            _mean(scores.f1),
            _mean(scores.f1, scores.support),
            _mean(scores.precision),
            _mean(scores.precision, scores.support),
            _mean(scores.recall),
        ]
    )


def log_loss_per_row(log_probabilities: FloatArray, target: IntArray) -> FloatArray:
    """Return minus the natural logarithm of the true class's probability, shape (n,), in nats."""
    return -log_probabilities[np.arange(len(target)), target]


def brier_per_row(probabilities: FloatArray, target: IntArray) -> FloatArray:
    """Return each row's Brier score, shape (n,): summed squared error of the probabilities.

    For two classes half of it, which is the usual (p - y)² (as scikit-learn's `scale_by_half="auto"`).
    """
    error: FloatArray = np.square(probabilities).sum(axis=1)
    error += 1 - 2 * probabilities[np.arange(len(target)), target]
    return error / 2 if probabilities.shape[1] == 2 else error


def _mean(values: FloatArray, weights: FloatArray | None = None) -> FloatArray:
    defined = ~np.isnan(values)
    weighed = defined.astype(np.float64) if weights is None else np.where(defined, weights, 0.0)
    return ratio((np.where(defined, values, 0.0) * weighed).sum(axis=0), weighed.sum(axis=0))
