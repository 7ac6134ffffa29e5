"""Regression metrics against scikit-learn; the bootstrap against theory."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference

from elastic_runtime.evaluation.assessment import Resampling
from elastic_runtime.evaluation.bootstrap import bootstrap, percentile_intervals, resampled_counts
from elastic_runtime.evaluation.classifier import ClassificationAssessment
from elastic_runtime.evaluation.regression import (
    REGRESSION_NAMES,
    regression_columns,
    regression_summary,
    residual_quantiles,
)
from elastic_runtime.evaluation.regressor import RegressionAssessment

values = st.floats(-1e6, 1e6, allow_nan=False)


def summary(target: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    found = regression_summary(regression_columns(target, predicted), np.ones((len(target), 1)))
    return dict(zip(REGRESSION_NAMES, found[:, 0], strict=True))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(values, values), min_size=2, max_size=40))
def test_metrics_are_those_of_scikit_learn(pairs: list[tuple[float, float]]) -> None:
    target, predicted = (np.array(side) for side in zip(*pairs, strict=True))
    found = summary(target, predicted)
    assert found["rmse"] == pytest.approx(reference.root_mean_squared_error(target, predicted), abs=1e-9)
    assert found["mae"] == pytest.approx(reference.mean_absolute_error(target, predicted), abs=1e-9)
    assert found["mae"] <= found["rmse"] * (1 + 1e-9) + 1e-12
    if np.ptp(target) > 1e-3:
        assert found["r2"] == pytest.approx(reference.r2_score(target, predicted), rel=1e-6, abs=1e-6)


def test_r2_survives_a_target_far_from_zero() -> None:
    target = 1e9 + np.arange(100.0)
    assert summary(target, target + 1)["r2"] == pytest.approx(1 - 1 / np.var(np.arange(100)))


def test_r2_of_a_constant_target_is_undefined() -> None:
    found = summary(np.full(5, 3.7), np.arange(5.0))
    assert np.isnan(found["r2"])
    assert np.isfinite([found["rmse"], found["mae"]]).all()


def test_residual_quantiles() -> None:
    found = residual_quantiles(np.zeros(101), np.arange(101.0))
    assert found[0.5] == 50
    assert found[0.05] == 5
    assert found[0.95] == 95


@pytest.mark.parametrize("sizes", [[1] * 50, [40, 10], [25] * 2 + [1] * 150], ids=["rows", "cells", "mixed"])
def test_resampled_counts_are_draws_with_replacement(sizes: list[int]) -> None:
    cells = np.array(sizes)
    rows = int(cells.sum())
    counts = np.concatenate(
        list(resampled_counts(cells, 4000, np.random.default_rng(1), block_bytes=50_000)), axis=1
    )
    assert counts.shape == (len(cells), 4000)
    assert (counts.sum(axis=0) == rows).all()
    np.testing.assert_allclose(counts.mean(axis=1), cells, rtol=0.12)
    np.testing.assert_allclose(counts[0].var(), cells[0] * (1 - cells[0] / rows), rtol=0.12)


def test_blocks_bound_the_memory() -> None:
    def mean(counts: np.ndarray) -> np.ndarray:
        return counts[:1] / counts.sum(axis=0)

    tracemalloc.start()
    bootstrap(
        np.ones(20_000, dtype=np.int64), mean, resamples=500, rng=np.random.default_rng(0), block_bytes=2**22
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # All counts at once would be 80 MB.
    assert peak < 2**24


def test_the_interval_of_a_mean_is_that_of_the_normal_theory() -> None:
    sample = np.random.default_rng(5).normal(10, 2, size=2000)
    resampling = Resampling(resamples=4000, confidence=0.95, seed=0)
    (interval,) = resampling.intervals(
        np.ones(2000, dtype=np.int64), lambda counts: (sample @ counts / 2000)[None], 0
    )
    half = 1.96 * sample.std() / np.sqrt(2000)
    assert interval.value == pytest.approx(sample.mean())
    assert interval.low == pytest.approx(sample.mean() - half, abs=0.1 * half)
    assert interval.high == pytest.approx(sample.mean() + half, abs=0.1 * half)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(8)
    resampling = Resampling(resamples=400, confidence=0.9, seed=0)
    covered = 0
    for _ in range(300):
        hits = rng.binomial(200, 0.8)
        sizes = np.array([hits, 200 - hits])
        (interval,) = resampling.intervals(sizes, lambda counts: counts[:1] / 200, 0)
        assert interval.low is not None
        assert interval.high is not None
        covered += interval.low <= 0.8 <= interval.high
    assert 0.85 <= covered / 300 <= 0.95


def test_undefined_resamples_are_left_out_and_undefined_values_get_no_interval() -> None:
    samples = np.array([[0.0, np.nan, 2.0], [np.nan] * 3, [1.0, 2.0, 3.0]])
    found = percentile_intervals(np.array([1.0, 1.0, np.nan]), samples, 0.9)
    assert found[0].low == pytest.approx(0.1)
    assert found[0].high == pytest.approx(1.9)
    assert (found[1].low, found[2].low) == (None, None)


def classifier(
    seed: int = 0, *, skill: float = 1.5, rows: int = 400, data_seed: int = 1
) -> ClassificationAssessment:
    rng = np.random.default_rng(data_seed)
    target = rng.integers(4, size=rows)
    logits = np.random.default_rng(seed + 100).normal(size=(rows, 4))
    logits[np.arange(rows), target] += skill
    return ClassificationAssessment(
        logits, target, "abcd", Resampling(resamples=300, confidence=0.95, seed=3), calibration_bins=15
    )


def test_the_same_seed_gives_the_same_intervals_and_they_hold_the_value() -> None:
    first, second = classifier(), classifier()
    assert first.metrics == second.metrics
    for name, interval in first.metrics.items():
        if name != "calibration_error":
            assert interval.low is not None
            assert interval.high is not None
            assert interval.low <= interval.value <= interval.high
            assert interval.low < interval.high


def test_macro_auc_is_that_of_scikit_learn() -> None:
    found = classifier()
    expected = reference.roc_auc_score(found.target, found.probabilities, multi_class="ovr")
    assert found.metrics["auc"].value == pytest.approx(expected)


def test_a_model_does_not_differ_from_itself() -> None:
    for metric in classifier().against(classifier()):
        assert metric.difference.value == 0
        assert (metric.difference.low, metric.difference.high) == (0, 0)
        assert metric.verdict == "no clear difference"


def test_a_better_model_is_found_better_and_the_pairing_narrows_the_interval() -> None:
    good, poor = classifier(seed=0, skill=3.0), classifier(seed=0, skill=2.0)
    compared = {metric.name: metric for metric in good.against(poor)}
    assert next(iter(compared)) == "accuracy"
    assert {metric.verdict for metric in compared.values()} == {"better"}
    assert {metric.verdict for metric in poor.against(good)} == {"worse"}
    accuracy = compared["accuracy"]
    assert accuracy.difference.value == pytest.approx(
        good.metrics["accuracy"].value - poor.metrics["accuracy"].value
    )
    assert accuracy.difference.low is not None
    assert accuracy.difference.high is not None
    alone = [good.metrics["accuracy"], poor.metrics["accuracy"]]
    widths = [(one.high or 0) - (one.low or 0) for one in alone]
    assert accuracy.difference.high - accuracy.difference.low < np.hypot(*widths)


def test_regression_models_are_compared_on_r2_first() -> None:
    rng = np.random.default_rng(2)
    target = rng.normal(size=300)
    resampling = Resampling(resamples=300, confidence=0.95, seed=0)
    good = RegressionAssessment(target + 0.1 * rng.normal(size=300), target, resampling)
    poor = RegressionAssessment(target + 0.9 * rng.normal(size=300), target, resampling)
    compared = good.against(poor)
    assert [metric.name for metric in compared] == ["r2", "rmse", "mae"]
    assert {metric.verdict for metric in compared} == {"better"}
    assert compared[1].difference.value < 0 < compared[0].difference.value


def test_without_r2_the_comparison_is_about_rmse() -> None:
    resampling = Resampling(resamples=0, confidence=0.95, seed=0)
    model = RegressionAssessment(np.array([1.0, 2.0]), np.array([1.0, 1.0]), resampling)
    assert model.primary == "rmse"
    assert "every row" in model.undefined["r2"]
    assert [metric.name for metric in model.against(model)] == ["rmse", "mae"]
    assert model.metrics["rmse"].low is None


def test_a_single_class_leaves_auc_undefined_and_says_so() -> None:
    resampling = Resampling(resamples=100, confidence=0.95, seed=0)
    logits = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.5]])
    found = ClassificationAssessment(
        logits, np.array([0, 0]), ("cat", "dog", "eel"), resampling, calibration_bins=5
    )
    assert "auc" not in found.metrics
    assert "'cat'" in found.undefined["auc"]
    assert found.main_curve is None
    assert found.metrics["accuracy"].value == 0.5
    assert any("No row has the class 'dog', 'eel'" in remark for remark in found.remarks)


def test_a_class_that_is_never_predicted_is_remarked_on() -> None:
    resampling = Resampling(resamples=0, confidence=0.95, seed=0)
    logits = np.array([[1.0, 0.0], [1.0, 0.0]])
    found = ClassificationAssessment(logits, np.array([0, 1]), ("no", "yes"), resampling, calibration_bins=5)
    assert any("never predicts the class 'yes'" in remark for remark in found.remarks)
    assert found.per_class[1].precision is None
    assert found.per_class[1].recall == 0


def test_a_thousand_resamples_of_ten_thousand_rows_take_a_moment() -> None:
    rng = np.random.default_rng(0)
    target = rng.integers(10, size=10_000)
    logits = rng.normal(size=(10_000, 10))
    logits[np.arange(10_000), target] += 1.5
    start = time.process_time()
    found = ClassificationAssessment(
        logits,
        target,
        [str(i) for i in range(10)],
        Resampling(resamples=1000, confidence=0.95, seed=0),
        calibration_bins=15,
    )
    # Measured: about 1 s of one core, of which the ten ROC rankings are most.
    assert time.process_time() - start < 15
    assert found.metrics["auc"].low is not None
    assert not found.remarks
