"""Splits: shares, classes, no equal features in two splits, and independence of the order of the rows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_runtime.errors import DataError
from elastic_runtime.preprocessing import PreprocessConfig
from elastic_runtime.preprocessing.arranging import Arranged, arrange
from elastic_runtime.preprocessing.hashing import equal_groups, row_hashes
from elastic_runtime.preprocessing.splitting import plan_splits
from elastic_runtime.preprocessing.targets import Target

FRACTIONS = {"train": 0.7, "validation": 0.15, "test": 0.15}


def do_arrange(
    matrix: npt.NDArray[np.float64], labels: npt.NDArray[Any], classes: int | None = 2, **fields: Any
) -> Arranged:
    target = Target(values=labels, classes=None if classes is None else tuple(map(str, range(classes))))
    config = PreprocessConfig(source="x.csv", **fields)
    return arrange(config, matrix, target, {}, names=("y", [f"f{i}" for i in range(matrix.shape[1])]))


def shared_between_splits(arranged: Arranged) -> int:
    """Count pairs of splits that have a stored feature row in common."""
    rows = [
        {row.tobytes() for row in np.ascontiguousarray(arranged.stored[arranged.split_of == split])}
        for split in range(3)
    ]
    return sum(bool(a & b) for a, b in itertools.combinations(rows, 2))


def test_shares_are_exact_when_rows_differ() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], [600, 300, 100])
    arranged = do_arrange(rng.normal(size=(1000, 3)), labels, classes=3)
    counts = np.zeros((3, 3), dtype=int)
    np.add.at(counts, (arranged.split_of, labels[arranged.order]), 1)
    assert counts.tolist() == [[420, 210, 70], [90, 45, 15], [90, 45, 15]]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_promises_hold_for_any_rows(data: st.DataObject) -> None:
    rows = data.draw(st.integers(12, 80))
    # Few different values, so that equal feature rows abound.
    values = st.sampled_from([0.0, 1.0, 1.0 + 1e-12, 2.0, -3.5, 1e9, 1e9 + 1e-3])
    matrix = np.array(data.draw(st.lists(st.tuples(values, values), min_size=rows, max_size=rows)))
    regression = data.draw(st.booleans())
    labels = np.array(data.draw(st.lists(st.integers(0, 1), min_size=rows, max_size=rows)))
    labels = labels.astype(np.float64) if regression else labels
    classes = None if regression else 2
    seed = data.draw(st.integers(0, 2**63 - 1))
    normalise = data.draw(st.sampled_from(["standard", "none"]))
    shuffle = np.array(data.draw(st.permutations(range(rows))))
    try:
        first = do_arrange(matrix, labels, classes, seed=seed, normalise=normalise)
    except DataError:
        with pytest.raises(DataError):
            do_arrange(matrix[shuffle], labels[shuffle], classes, seed=seed, normalise=normalise)
        return
    second = do_arrange(matrix[shuffle], labels[shuffle], classes, seed=seed, normalise=normalise)
    assert sorted(first.order.tolist()) == list(range(rows))
    assert set(first.split_of.tolist()) == {0, 1, 2}
    assert shared_between_splits(first) == 0
    assert first.stored.tobytes() == second.stored.tobytes()
    assert labels[first.order].tolist() == labels[shuffle][second.order].tolist()
    assert first.split_of.tolist() == second.split_of.tolist()
    assert first.statistics == second.statistics


def test_rows_that_only_float32_makes_equal_stay_together() -> None:
    rng = np.random.default_rng(1)
    base = rng.normal(size=(50, 2)) * 1000
    matrix = np.concatenate([base, base + 1e-7])
    labels = np.tile(np.arange(50) % 2, 2)
    assert len(np.unique(matrix, axis=0)) == 100
    plain = plan_splits(row_hashes(list(matrix.T)), labels, FRACTIONS, 0, classes=("0", "1"), target_name="y")
    assert np.any(plain.split_of[:50] != plain.split_of[50:]), "the rows would be torn by their exact values"
    arranged = do_arrange(matrix, labels)
    assert len(np.unique(arranged.stored, axis=0)) < 60
    assert shared_between_splits(arranged) == 0


def test_another_seed_gives_another_split() -> None:
    matrix = np.random.default_rng(0).normal(size=(200, 2))
    labels = np.arange(200) % 2
    splits = [
        frozenset(a.order[a.split_of == 2]) for a in (do_arrange(matrix, labels, seed=s) for s in (0, 1))
    ]
    assert splits[0] != splits[1]
    assert len(splits[0] & splits[1]) < 20


def test_statistics_are_of_the_training_split_only() -> None:
    rng = np.random.default_rng(0)
    matrix = rng.normal(3.0, 5.0, size=(100, 2))
    matrix[:, 1] = 0.1
    arranged = do_arrange(matrix, np.arange(100) % 2)
    train = matrix[arranged.order[arranged.split_of == 0]]
    f0, f1 = arranged.statistics["f0"], arranged.statistics["f1"]
    assert f0.mean == pytest.approx(train[:, 0].mean(), rel=1e-12)
    assert f0.std == pytest.approx(train[:, 0].std(), rel=1e-12)
    assert (f0.min, f0.max) == (train[:, 0].min(), train[:, 0].max())
    assert (f1.mean, f1.std, f1.min, f1.max) == (0.1, 1.0, 0.1, 0.1)
    expected = (matrix[arranged.order, 0] - f0.mean) / f0.std
    np.testing.assert_array_equal(arranged.stored[:, 0], expected.astype(np.float32))
    assert not arranged.stored[:, 1].any()
    stored = arranged.stored[arranged.split_of == 0, 0]
    assert abs(stored.mean()) < 1e-6
    assert stored.std() == pytest.approx(1.0, abs=1e-6)


def test_without_normalisation_values_stay() -> None:
    matrix = np.random.default_rng(0).normal(3.0, 5.0, size=(100, 2))
    arranged = do_arrange(matrix, np.arange(100) % 2, normalise="none")
    np.testing.assert_array_equal(arranged.stored, matrix[arranged.order].astype(np.float32))


def test_empty_splits_are_allowed() -> None:
    matrix = np.random.default_rng(0).normal(size=(10, 1))
    fields = {"train_fraction": 0.5, "validation_fraction": 0.0, "test_fraction": 0.5}
    arranged = do_arrange(matrix, np.arange(10) % 2, **fields)
    assert np.bincount(arranged.split_of, minlength=3).tolist() == [5, 0, 5]
    only_train = do_arrange(
        matrix, np.arange(10) % 2, train_fraction=1, validation_fraction=0, test_fraction=0
    )
    assert set(only_train.split_of.tolist()) == {0}


def test_small_class_is_in_every_split() -> None:
    matrix = np.random.default_rng(0).normal(size=(103, 1))
    labels = np.repeat([0, 1], [100, 3])
    arranged = do_arrange(matrix, labels)
    assert sorted(arranged.split_of[labels[arranged.order] == 1].tolist()) == [0, 1, 2]


def test_no_split_wins_all_ties_of_small_classes() -> None:
    matrix = np.random.default_rng(0).normal(size=(1000, 1))
    arranged = do_arrange(matrix, np.arange(1000) % 100, classes=100)
    assert np.bincount(arranged.split_of).tolist() == [700, 150, 150]


def test_many_classes_of_three_rows() -> None:
    matrix = np.random.default_rng(0).normal(size=(300, 1))
    arranged = do_arrange(matrix, np.arange(300) % 100, classes=100)
    assert np.bincount(arranged.split_of).tolist() == [100, 100, 100]


def test_large_groups_leave_no_split_empty() -> None:
    matrix = np.repeat([[1.0], [2.0], [3.0]], [98, 1, 1], axis=0)
    arranged = do_arrange(matrix, np.zeros(100), None)
    assert set(arranged.split_of.tolist()) == {0, 1, 2}


def test_conflicts_are_the_rows_with_equal_features_and_another_target() -> None:
    matrix = np.array([[1.0], [1.0], [2.0], [2.0], [3.0], [4.0], [5.0], [6.0], [7.0], [8.0]])
    labels = np.array([0, 1, 0, 0, 1, 1, 1, 0, 0, 1])
    assert np.flatnonzero(do_arrange(matrix, labels).conflicts).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [
        (
            [0] * 8 + [1] * 2,
            ("no", "yes"),
            r"column 'y': too few rows .* class 'yes' has 2, each class needs 3",
        ),
        (list(range(10)), tuple("abcdefghij"), r"class 'a' has 1, .* and 5 more classes"),
        ([0.0, 0.0], None, r"too few rows: 2 different feature rows for 3 splits"),
    ],
)
def test_too_few_rows(labels: list[Any], classes: tuple[str, ...] | None, message: str) -> None:
    hashes = row_hashes([np.arange(len(labels), dtype=np.float64)])
    with pytest.raises(DataError, match=message):
        plan_splits(hashes, np.array(labels), FRACTIONS, 0, classes=classes, target_name="y")


def test_copies_of_one_row_do_not_count_as_rows() -> None:
    hashes = row_hashes([np.zeros(50)])
    with pytest.raises(DataError, match="1 different feature rows"):
        plan_splits(hashes, np.zeros(50), FRACTIONS, 0, classes=None, target_name="y")


@given(st.lists(st.tuples(st.floats(allow_nan=False), st.integers(0, 3)), min_size=1, max_size=40))
def test_hash_groups_are_the_equal_rows(rows: list[tuple[float, int]]) -> None:
    columns = [np.array([r[0] for r in rows]) + 0.0, np.array([r[1] for r in rows], dtype=np.float64)]
    groups = equal_groups(row_hashes(columns))
    for i, j in itertools.combinations(range(len(rows)), 2):
        assert (groups[i] == groups[j]) == (rows[i] == rows[j])


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ([np.array([1.5])], ("0x716ca1cc9f9fd0d", "0x2da126ac21f6737d")),
        ([pa.array(["Bern"]), pa.array([None], pa.int64())], ("0x898ae3885db67c2", "0xfc0da8e0353da1a")),
    ],
)
def test_hashes_do_not_change_between_versions(columns: list[Any], expected: tuple[str, str]) -> None:
    """Other hashes would change the splits of every user: do it only with a note in the changelog."""
    assert tuple(hex(lane) for lane in row_hashes(columns)[0]) == expected


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (pa.array([None], pa.int64()), pa.array([0])),
        (pa.array([None], pa.float64()), pa.array([0.0])),
        (pa.array([None], pa.string()), pa.array([""])),
        (pa.array([None], pa.bool_()), pa.array([False])),
        (pa.array([[1]]), pa.array([[1, 1]])),
    ],
)
def test_missing_is_not_the_value_that_stands_for_it(left: pa.Array, right: pa.Array) -> None:
    assert row_hashes([left]).tolist() != row_hashes([right]).tolist()
