"""Classification metrics against scikit-learn and against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference

from elastic_runtime.evaluation.calibration import reliability
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
from elastic_runtime.evaluation.roc import area_under_roc, micro_average_curve, rank_scores, roc_curve


def make(rows: int, classes: int, seed: int, *, skill: float = 1.5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    target = rng.integers(classes, size=rows)
    logits = rng.normal(size=(rows, classes))
    logits[np.arange(rows), target] += skill
    return logits, target


def summary(target: np.ndarray, predicted: np.ndarray, classes: int) -> dict[str, float]:
    values = confusion_summary(target, predicted, np.ones((len(target), 1)), classes)[:, 0]
    return dict(zip(SUMMARY_NAMES, values, strict=True))


labels = st.integers(1, 6).flatmap(
    lambda classes: st.tuples(
        st.just(classes),
        st.lists(
            st.tuples(st.integers(0, classes - 1), st.integers(0, classes - 1)), min_size=1, max_size=40
        ),
    )
)


@settings(max_examples=200, deadline=None)
@given(labels)
def test_averages_are_those_of_scikit_learn(case: tuple[int, list[tuple[int, int]]]) -> None:
    classes, pairs = case
    target, predicted = (np.array(side) for side in zip(*pairs, strict=True))
    found = summary(target, predicted, classes)
    options = {"labels": range(classes), "zero_division": np.nan}
    assert found["accuracy"] == reference.accuracy_score(target, predicted)
    for average in ("macro", "weighted"):
        assert found[f"f1_{average}"] == pytest.approx(
            reference.f1_score(target, predicted, average=average, **options)
        )
        expected = reference.precision_score(target, predicted, average=average, **options)
        if np.isnan(found[f"precision_{average}"]):
            # scikit-learn gives 0 here: every prediction is a class that does not occur.
            assert average == "weighted"
            assert not set(target) & set(predicted)
        else:
            assert found[f"precision_{average}"] == pytest.approx(expected)
    assert found["recall_macro"] == pytest.approx(
        reference.recall_score(target, predicted, average="macro", **options)
    )


@settings(max_examples=100, deadline=None)
@given(labels, st.randoms(use_true_random=False))
def test_no_metric_depends_on_the_order_of_rows_or_on_how_they_are_pooled(case, random) -> None:  # type: ignore[no-untyped-def]
    classes, pairs = case
    shuffled = list(pairs)
    random.shuffle(shuffled)
    target, predicted = (np.array(side) for side in zip(*pairs, strict=True))
    found = summary(target, predicted, classes)
    other = summary(*(np.array(side) for side in zip(*shuffled, strict=True)), classes)
    cells, sizes = np.unique(target * classes + predicted, return_counts=True)
    pooled = confusion_summary(cells // classes, cells % classes, sizes[:, None].astype(float), classes)
    for i, name in enumerate(SUMMARY_NAMES):
        assert found[name] == pytest.approx(other[name], nan_ok=True)
        assert found[name] == pytest.approx(pooled[i, 0], nan_ok=True)
        assert np.isnan(found[name]) or 0 <= found[name] <= 1


def test_an_undefined_score_is_nan_and_never_zero() -> None:
    target, predicted = np.array([0, 0, 1]), np.array([0, 2, 0])
    scores = per_class_scores(target, predicted, np.ones((3, 1)), 4)
    assert scores.recall[:, 0].tolist() == pytest.approx([0.5, 0, np.nan, np.nan], nan_ok=True)
    assert scores.precision[:, 0].tolist() == pytest.approx([0.5, np.nan, 0, np.nan], nan_ok=True)
    assert scores.f1[:, 0].tolist() == pytest.approx([0.5, 0, 0, np.nan], nan_ok=True)
    assert confusion_matrix(target, predicted, 4).tolist() == [
        [1, 0, 1, 0],
        [1, 0, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 0],
    ]


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_losses_are_those_of_scikit_learn(classes: int) -> None:
    logits, target = make(500, classes, seed=classes)
    probabilities, logarithms, remark = probabilities_from(logits)
    assert remark == ""
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    assert log_loss_per_row(logarithms, target).mean() == pytest.approx(
        reference.log_loss(target, probabilities)
    )
    one_hot = np.eye(classes)[target]
    expected = np.square(probabilities - one_hot).sum(axis=1).mean() / (2 if classes == 2 else 1)
    assert brier_per_row(probabilities, target).mean() == pytest.approx(expected)
    if classes == 2:
        assert expected == pytest.approx(reference.brier_score_loss(target, probabilities[:, 1]))


def test_a_confident_mistake_has_a_finite_loss() -> None:
    _, logarithms, _ = probabilities_from(np.array([[0.0, 4000.0]]))
    assert log_loss_per_row(logarithms, np.array([0])).tolist() == [4000.0]


def test_outputs_that_are_probabilities_already_are_used_and_said() -> None:
    given_probabilities = np.array([[0.9, 0.1, 0.0], [0.2, 0.2, 0.6]])
    probabilities, logarithms, remark = probabilities_from(given_probabilities)
    np.testing.assert_allclose(probabilities, given_probabilities, atol=1e-6)
    assert np.isfinite(logarithms).all()
    assert "probabilities, not logits" in remark


def test_outputs_between_0_and_1_that_do_not_sum_to_1_are_noticed() -> None:
    probabilities, _, remark = probabilities_from(np.array([[0.9, 0.8], [0.1, 0.3]]))
    assert "do not sum to 1" in remark
    assert predicted_class(probabilities).tolist() == [0, 1]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_auc_is_that_of_scikit_learn(seed: int, ties: bool) -> None:
    logits, target = make(300, 2, seed=seed, skill=0.7)
    scores = np.round(logits[:, 1] - logits[:, 0], 0 if ties else 12)
    weights = np.random.default_rng(seed).integers(0, 4, size=(300, 7)).astype(float)
    areas = area_under_roc(rank_scores(scores, target), weights)
    for column, area in enumerate(areas):
        assert area == pytest.approx(
            reference.roc_auc_score(target, scores, sample_weight=weights[:, column]), abs=1e-12
        )


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 1), st.integers(0, 3)), min_size=1, max_size=25))
def test_auc_is_the_share_of_pairs_in_order(rows: list[tuple[int, int, int]]) -> None:
    score, label, weight = (np.array(side, dtype=float) for side in zip(*rows, strict=True))
    right = pairs = 0.0
    for i in np.flatnonzero(label == 1):
        for j in np.flatnonzero(label == 0):
            pairs += weight[i] * weight[j]
            right += weight[i] * weight[j] * ((score[i] > score[j]) + 0.5 * (score[i] == score[j]))
    area = area_under_roc(rank_scores(score, label.astype(int)), weight[:, None])[0]
    assert area == pytest.approx(right / pairs if pairs else np.nan, nan_ok=True)
    opposite = area_under_roc(rank_scores(-score, label.astype(int)), weight[:, None])[0]
    assert area + opposite == pytest.approx(1 if pairs else np.nan, nan_ok=True)


def test_ranking_merges_rows_that_cannot_change_the_area() -> None:
    scores = np.arange(1000.0)
    assert len(rank_scores(scores, (scores >= 400).astype(int)).starts) == 2


@pytest.mark.parametrize("rows", [50, 20_000])
def test_a_roc_curve_is_finite_rising_short_and_has_the_exact_area(rows: int) -> None:
    logits, target = make(rows, 2, seed=3, skill=0.8)
    probabilities, _, _ = probabilities_from(logits)
    curve = roc_curve("second", probabilities[:, 1], target)
    assert np.isfinite(curve.thresholds).all()
    assert (np.diff(curve.thresholds) < 0).all()
    assert curve.thresholds[0] > probabilities[:, 1].max()
    for rate in (curve.false_positive_rate, curve.true_positive_rate):
        assert (rate[0], rate[-1]) == (0.0, 1.0)
        assert (np.diff(rate) >= 0).all()
    assert len(curve.thresholds) <= 201
    assert curve.auc == pytest.approx(reference.roc_auc_score(target, probabilities[:, 1]))
    drawn = np.trapezoid(curve.true_positive_rate, curve.false_positive_rate)
    assert drawn == pytest.approx(curve.auc, abs=2e-3)


@pytest.mark.parametrize("ties", [False, True])
def test_the_points_of_a_roc_curve_are_on_that_of_scikit_learn(ties: bool) -> None:
    logits, target = make(120, 2, seed=4, skill=0.8)
    scores = np.round(logits[:, 1] - logits[:, 0], 0 if ties else 12)
    curve = roc_curve("second", scores, target)
    false_rate, true_rate, thresholds = reference.roc_curve(target, scores, drop_intermediate=False)
    at = {value: place for place, value in enumerate(thresholds)}
    for i, threshold in enumerate(curve.thresholds[1:], start=1):
        assert curve.false_positive_rate[i] == pytest.approx(false_rate[at[threshold]])
        assert curve.true_positive_rate[i] == pytest.approx(true_rate[at[threshold]])
    # Nothing but points on straight stretches is left out.
    drawn = np.trapezoid(curve.true_positive_rate, curve.false_positive_rate)
    assert drawn == pytest.approx(np.trapezoid(true_rate, false_rate))
    assert len(curve.thresholds) < len(thresholds) or ties


def test_the_micro_average_pools_every_decision() -> None:
    logits, target = make(400, 5, seed=9)
    probabilities, _, _ = probabilities_from(logits)
    expected = reference.roc_auc_score(np.eye(5)[target], probabilities, multi_class="ovr", average="micro")
    assert micro_average_curve(probabilities, target).auc == pytest.approx(expected)


def test_calibration_error_by_hand() -> None:
    confidence = np.array([0.6, 0.7, 0.95, 0.95])
    probabilities = np.stack([confidence, 1 - confidence], axis=1)
    found = reliability(probabilities, np.array([0, 1, 0, 0]), bins=2)
    # One bin, 0.5 to 1: mean confidence 0.8, share right 0.75.
    assert found.rows.tolist() == [4]
    assert found.expected_error == pytest.approx(0.05)
    found = reliability(probabilities, np.array([0, 1, 0, 0]), bins=10)
    # 0.6 belongs to (0.5, 0.6], 0.7 to (0.6, 0.7]: gaps 0.4, 0.7 and twice 0.05.
    assert found.rows.tolist() == [1, 1, 2]
    assert found.expected_error == pytest.approx((0.4 + 0.7 + 0.05 * 2) / 4)
    assert found.largest_error == pytest.approx(0.7)


def test_a_model_that_knows_its_chances_is_calibrated() -> None:
    rng = np.random.default_rng(0)
    chance = rng.uniform(size=200_000)
    target = (rng.uniform(size=200_000) < chance).astype(int)
    found = reliability(np.stack([1 - chance, chance], axis=1), target)
    assert found.expected_error < 0.005
    overconfident = np.clip(chance * 3 - 1, 0.001, 0.999)
    assert reliability(np.stack([1 - overconfident, overconfident], axis=1), target).expected_error > 0.1


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 5), st.integers(1, 60), st.integers(0, 10**6), st.integers(2, 20))
def test_calibration_bins_hold_every_row_once(classes: int, rows: int, seed: int, bins: int) -> None:
    logits, target = make(rows, classes, seed=seed)
    probabilities, _, _ = probabilities_from(logits)
    found = reliability(probabilities, target, bins=bins)
    right = (probabilities.argmax(axis=1) == target).mean()
    assert found.rows.sum() == rows
    assert (found.rows * found.accuracy).sum() / rows == pytest.approx(right)
    assert (found.confidence > found.edges_low - 1e-12).all()
    assert (found.confidence <= found.edges_high + 1e-12).all()
    assert 0 <= found.expected_error <= found.largest_error + 1e-12
    assert found.largest_error <= 1
