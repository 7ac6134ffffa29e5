from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_runtime.errors import InputError
from elastic_runtime.training.data import Plan, micro_batches, order, share
from elastic_runtime.worker.batches import batches


def plan(samples: int = 10, **changes: Any) -> Plan:
    given_values = {
        "global_batch": 4, "epochs": 2, "drop_last": False, "shuffle": True, "seed": 3, "weights": None, **changes,
    }  # fmt: skip
    return Plan.of(range(samples), **given_values)


@given(
    samples=st.integers(1, 50), global_batch=st.integers(1, 20), epochs=st.integers(1, 3), micro=st.integers(1, 5),
    worlds=st.lists(st.integers(1, 5), min_size=1, max_size=6),
)  # fmt: skip
def test_every_sample_once_an_epoch_whatever_the_worlds(
    samples: int, global_batch: int, epochs: int, micro: int, worlds: list[int]
) -> None:
    found = plan(samples, global_batch=global_batch, epochs=epochs)
    for epoch in range(epochs):
        taken: list[int] = []
        for step in range(epoch * found.per_epoch, (epoch + 1) * found.per_epoch):
            world = worlds[step % len(worlds)]
            parts = [
                part
                for rank in range(world)
                for part in micro_batches(share(found.whole(step), rank=rank, world=world), micro)
            ]
            assert all(1 <= len(part) <= micro for part in parts)
            assert sum(map(len, parts)) == found.size(step)
            taken += [int(number) for part in parts for number in part]
        assert sorted(taken) == list(range(samples))


def test_the_order_is_that_of_unmodified_scripts() -> None:
    found = plan(23, global_batch=5, epochs=3)
    for batch in batches(23, global_batch=5, epochs=3, seed=3, rank=1, world_size=2):
        np.testing.assert_array_equal(batch.indices, share(found.whole(batch.step), rank=1, world=2))
        assert batch.global_size == found.size(batch.step)


def test_a_position_needs_nothing_before_it() -> None:
    fresh = plan(100, epochs=50)
    np.testing.assert_array_equal(plan(100, epochs=50).whole(1_100), fresh.whole(1_100))
    assert fresh.epoch(1_100) == 44


def test_shares_from_a_step_on_are_those_of_the_steps() -> None:
    found = plan(10, global_batch=4, epochs=2)
    given_parts = list(found.shares(2, rank=2, world=3, micro_batch=1))
    assert [[len(part) for part in parts] for parts in given_parts] == [[], [1], [1], []]


def test_drop_last_and_no_shuffle() -> None:
    found = plan(10, drop_last=True, shuffle=False)
    assert found.total == 4
    np.testing.assert_array_equal(found.whole(3), [4, 5, 6, 7])


def test_weights_draw_with_replacement_by_seed_and_epoch() -> None:
    weights = np.array([0.0, 1.0, 3.0, 0.0])
    drawn = order(4, seed=1, epoch=0, weights=weights)
    assert set(drawn) <= {1, 2}
    np.testing.assert_array_equal(drawn, order(4, seed=1, epoch=0, weights=weights))
    many = np.concatenate([order(4, seed=1, epoch=epoch, weights=weights) for epoch in range(2_000)])
    assert 0.70 < np.mean(many == 2) < 0.80


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch": 0}, "global_batch=0 must be a whole number of at least 1"),
        ({"global_batch": 2.5}, "global_batch=2.5"),
        ({"epochs": True}, "epochs=True"),
        ({"drop_last": True, "global_batch": 11}, "leaves no step of 10 samples"),
        ({"weights": [1.0]}, r"weights has shape \(1,\)"),
        ({"weights": [-1.0] + [1.0] * 9}, "weights must be finite"),
        ({"weights": [0.0] * 10}, "not all zero"),
    ],
)
def test_bad_parameters_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan(**changes)


def test_a_dataset_needs_a_length_and_samples() -> None:
    given_values: dict[str, Any] = {"drop_last": False, "shuffle": True, "seed": 0, "weights": None}
    given_values.update(global_batch=1, epochs=1)
    with pytest.raises(InputError, match="has no length"):
        Plan.of(iter([]), **given_values)
    with pytest.raises(InputError, match="0 samples"):
        Plan.of([], **given_values)
