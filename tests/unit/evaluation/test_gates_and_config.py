"""Gates, configuration and slices: right verdicts, and one clear error for a wrong request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_runtime.errors import InputError, UnknownNameError
from elastic_runtime.evaluation import EvaluateConfig
from elastic_runtime.evaluation.gates import GATES, applicable_to, check_gates, judge
from elastic_runtime.evaluation.slices import MAX_SLICES, MISSING, cut


@pytest.mark.parametrize(
    ("gates", "error", "parts"),
    [
        (
            {"min_acuracy": 0.9},
            UnknownNameError,
            ["unknown gate 'min_acuracy'", "did you mean 'min_accuracy'"],
        ),
        ({"min_accuracy": 95}, InputError, ["min_accuracy=95", "0 to 1", "write 0.95"]),
        ({"min_accuracy": -0.1}, InputError, ["min_accuracy=-0.1", "0 to 1"]),
        ({"min_accuracy": True}, InputError, ["min_accuracy=True", "not a finite number"]),
        ({"min_accuracy": "0.9"}, InputError, ["min_accuracy='0.9'", "not a finite number"]),
        ({"min_accuracy": None}, InputError, ["min_accuracy=None"]),
        ({"max_rmse": float("nan")}, InputError, ["max_rmse=nan"]),
        ({"max_rmse": float("inf")}, InputError, ["max_rmse=inf"]),
        ({"max_mae": -1}, InputError, ["max_mae=-1", "below 0, the smallest value"]),
        ({"min_r2": 1.2}, InputError, ["min_r2=1.2"]),
        ([0.9], InputError, ["not a mapping"]),
        ({3: 0.9}, UnknownNameError, ["unknown gate '3'"]),
    ],
)
def test_a_wrong_gate_is_one_clear_error(gates: Any, error: type[Exception], parts: list[str]) -> None:
    with pytest.raises(error) as caught:
        EvaluateConfig(gates=gates)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"split": ""}, ["split=''", "name of a split"]),
        ({"split": 3}, ["split=3"]),
        ({"bootstrap": 50}, ["bootstrap=50", "100 or more", "0 for none"]),
        ({"bootstrap": -1}, ["bootstrap=-1", "0 turns"]),
        ({"bootstrap": 10**6}, ["bootstrap=1000000"]),
        ({"bootstrap": 150.5}, ["bootstrap=150.5"]),
        ({"bootstrap": True}, ["bootstrap=True"]),
        ({"seed": -1}, ["seed=-1"]),
        ({"confidence": 95}, ["confidence=95", "0.95"]),
        ({"slice_bins": 1}, ["slice_bins=1"]),
        ({"calibration_bins": 1000}, ["calibration_bins=1000"]),
        ({"gates": {"min_slice_accuracy": 0.5}}, ["min_slice_accuracy", "slice_by"]),
    ],
)
def test_a_wrong_field_is_one_clear_error(fields: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        EvaluateConfig(**fields)
    for part in parts:
        assert part in str(caught.value)


def test_whole_floats_are_taken_for_ints_and_gates_are_frozen() -> None:
    config = EvaluateConfig(bootstrap=500.0, seed=7.0, gates={"min_accuracy": 1})  # type: ignore[arg-type]
    assert (config.bootstrap, config.seed) == (500, 7)
    assert isinstance(config.bootstrap, int)
    assert dict(config.gates) == {"min_accuracy": 1.0}
    with pytest.raises(TypeError):
        config.gates["min_f1"] = 0.0  # type: ignore[index]


@pytest.mark.parametrize(("gate", "task"), [("min_r2", "classification"), ("min_accuracy", "regression")])
def test_a_gate_of_the_other_task_is_refused(gate: str, task: str) -> None:
    with pytest.raises(InputError, match=f"{gate} applies to .*but the task is {task}.*use one of"):
        applicable_to(check_gates({gate: 0.5}), task)


def test_max_regression_applies_to_both_tasks() -> None:
    for task in ("classification", "regression"):
        applicable_to({"max_regression": 0.1}, task)


@pytest.mark.parametrize(
    ("name", "limit", "value", "passed", "words"),
    [
        ("min_accuracy", 0.95, 0.95, True, "accuracy 0.95 is at least 0.95"),
        ("min_accuracy", 0.95, 0.9499999, False, "accuracy 0.9499999 is below 0.95"),
        ("max_rmse", 2, 2.5, False, "root mean squared error 2.5 is above 2"),
        ("max_regression", 0.01, 0.96 - 0.95, True, "0.01 worse than the baseline's"),
        ("max_regression", 0.01, 0.02, False, "0.02 worse than the baseline's, allowed is at most 0.01"),
        ("max_regression", 0.0, -0.02, True, "0.02 better than the baseline's"),
        ("max_regression", -0.05, -0.02, False, "allowed is at most -0.05 worse"),
    ],
)
def test_verdicts(name: str, limit: float, value: float, passed: bool, words: str) -> None:
    result = judge({name: limit}, {name: (value, "")})
    assert result.passed is passed
    assert result.verdict == ("passed" if passed else "failed")
    assert words in result.rules[0].reason
    assert (result.rules[0].limit, result.rules[0].value) == (limit, value)


def test_every_broken_limit_is_in_the_reason() -> None:
    result = judge(
        {"min_accuracy": 0.9, "min_f1": 0.9, "min_auc": 0.5},
        {"min_accuracy": (0.8, ""), "min_f1": (0.7, ""), "min_auc": (0.6, "")},
    )
    assert result.reason.startswith("2 of 3 limits broken: accuracy 0.8")
    assert "macro F1 0.7" in result.reason
    assert [rule.passed for rule in result.rules] == [False, False, True]


def test_no_limits_pass_and_say_that_nothing_was_asked() -> None:
    result = judge({}, {})
    assert result.passed
    assert "no limit was asked for" in result.reason


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([gate for gate in GATES.values() if gate.high == 1 and gate.low == 0]),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 0.5),
)
def test_a_stricter_limit_never_passes_what_a_looser_one_fails(gate, limit, value, step) -> None:  # type: ignore[no-untyped-def]
    loose = judge({gate.name: limit}, {gate.name: (value, "")}).passed
    stricter = limit + step if gate.at_least else limit - step
    strict = judge({gate.name: stricter}, {gate.name: (value, "")}).passed
    assert loose or not strict


def labels_of(column: pd.Series, **options: Any) -> dict[str, int]:
    return {label: len(rows) for label, rows in cut(column, bins=options.pop("bins", 4), **options)}


def test_text_slices_by_size_with_missing_values_last() -> None:
    found = labels_of(pd.Series(["b", "a", "b", None, "c", "b", "a"]))
    assert list(found.items()) == [("b", 3), ("a", 2), ("c", 1), (MISSING, 1)]


def test_booleans_and_few_numbers_are_values_not_bins() -> None:
    assert labels_of(pd.Series([True, False, True])) == {"True": 2, "False": 1}
    assert list(labels_of(pd.Series([3.0, 1.0, 3.0, np.nan])).items()) == [("1", 1), ("3", 2), (MISSING, 1)]


def test_many_numbers_are_cut_at_their_quantiles() -> None:
    found = labels_of(pd.Series(np.arange(100.0)))
    assert found == {"0 to under 24": 24, "24 to under 49": 25, "49 to under 74": 25, "74 to 99": 26}


def test_a_value_that_fills_whole_bins_is_a_slice_of_its_own() -> None:
    values = np.concatenate([np.zeros(900), np.arange(1, 101)])
    found = labels_of(pd.Series(values))
    assert found["0 to under 1"] == 900
    assert sum(found.values()) == 1000


def test_normalised_features_are_shown_in_the_unit_of_the_source() -> None:
    source = np.repeat([20.0, 40.0], 5)
    stored = pd.Series(((source - 30) / 10).astype(np.float32))
    assert labels_of(stored, scale=(30.0, 10.0)) == {"20": 5, "40": 5}


def test_classes_are_shown_by_label() -> None:
    assert labels_of(pd.Series([0, 2, 2]), labels=["cat", "dog", "eel"]) == {"cat": 1, "eel": 2}


@pytest.mark.parametrize("zone", [None, "Europe/Paris"])
def test_times_are_cut_like_numbers(zone: str | None) -> None:
    times = pd.Series(pd.date_range("2024-01-01", periods=40, freq="D", tz=zone))
    found = labels_of(times, bins=2)
    assert sum(found.values()) == 40
    assert len(found) == 2
    assert next(iter(found)).startswith("2024-01-01T00" if zone is None else "2023-12-31T23")


def test_rare_values_are_pooled() -> None:
    values = [f"v{i}" for i in range(200) for _ in range(1 + (i < 5))]
    found = labels_of(pd.Series(values))
    assert len(found) == MAX_SLICES
    assert list(found)[-1] == f"(other: {200 - MAX_SLICES + 1} values)"
    assert sum(found.values()) == len(values)


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=60),
        st.lists(st.integers(-5, 40), min_size=1, max_size=60),
        st.lists(st.sampled_from(["a", "b", None, ""]), min_size=1, max_size=30),
    ),
    st.integers(2, 8),
)
def test_every_row_is_in_exactly_one_slice(values: list[Any], bins: int) -> None:
    slices = cut(pd.Series(values), bins=bins)
    rows = np.concatenate([index for _, index in slices])
    assert sorted(rows.tolist()) == list(range(len(values)))
    assert len({label for label, _ in slices}) == len(slices)
    assert all(len(index) for _, index in slices)
