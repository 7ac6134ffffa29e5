from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_runtime.worker.batches import batches, steps_per_epoch

sizes = {
    "samples": st.integers(1, 60),
    "global_batch": st.integers(1, 20),
    "epochs": st.integers(1, 3),
    "seed": st.integers(0, 2**32),
}


@given(**sizes, worlds=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_every_sample_is_taken_once_an_epoch_through_restarts_and_resizes(
    samples: int, global_batch: int, epochs: int, seed: int, worlds: list[int], data: st.DataObject
) -> None:
    total = steps_per_epoch(samples, global_batch) * epochs
    cuts = sorted(
        data.draw(st.lists(st.integers(0, total), min_size=len(worlds) - 1, max_size=len(worlds) - 1))
    )
    taken: dict[int, list[int]] = {epoch: [] for epoch in range(epochs)}
    for world, first, last in zip(worlds, [0, *cuts], [*cuts, total], strict=True):
        for rank in range(world):
            for batch in batches(samples, global_batch=global_batch, epochs=epochs, seed=seed, rank=rank,
                                 world_size=world, start=first):  # fmt: skip
                if batch.step >= last:
                    break
                taken[batch.epoch].extend(batch.indices.tolist())
    for epoch in range(epochs):
        assert sorted(taken[epoch]) == list(range(samples))


def test_the_order_differs_between_epochs_and_seeds() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        found = batches(50, global_batch=50, epochs=2, seed=seed, rank=0, world_size=1, start=epoch)
        return list(next(found).indices)

    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert order(0, 1) == order(0, 1)


def test_a_resume_in_a_later_epoch_has_that_epochs_order() -> None:
    whole = list(batches(10, global_batch=3, epochs=3, seed=1, rank=0, world_size=1))
    resumed = list(batches(10, global_batch=3, epochs=3, seed=1, rank=0, world_size=1, start=6))
    assert [batch.step for batch in resumed] == list(range(6, 12))
    for left, right in zip(whole[6:], resumed, strict=True):
        np.testing.assert_array_equal(left.indices, right.indices)


def test_a_finished_run_has_nothing_left() -> None:
    assert list(batches(10, global_batch=5, epochs=2, seed=0, rank=0, world_size=1, start=4)) == []


def test_the_last_batch_is_smaller_and_says_so() -> None:
    found = list(batches(10, global_batch=4, epochs=1, seed=0, rank=1, world_size=4))
    assert [batch.global_size for batch in found] == [4, 4, 2]
    assert [len(batch.indices) for batch in found] == [1, 1, 1]
    assert [len(batch.indices) for batch in batches(10, global_batch=4, epochs=1, seed=0, rank=3, world_size=4)] == [1, 1, 0]  # fmt: skip


@pytest.mark.parametrize(("samples", "global_batch"), [(0, 4), (4, 0)])
def test_nothing_to_take_is_an_error(samples: int, global_batch: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        next(batches(samples, global_batch=global_batch, epochs=1, seed=0, rank=0, world_size=1))
