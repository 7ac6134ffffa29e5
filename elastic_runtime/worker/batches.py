"""Which samples a worker takes: a function of seed, epoch, step, rank and world size, and of nothing else.

The order of an epoch does not depend on the number of workers, and the position is the count of finished steps. So a
job that restarts, or goes on with another number of workers, neither loses a sample nor repeats one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

__all__ = ["Batch", "batches", "steps_per_epoch"]


@dataclass(frozen=True)
class Batch:
    """This worker's share of one global batch."""

    step: int
    """Number of the optimizer step, from 0, over all epochs."""
    epoch: int
    """Number of the epoch, from 0."""
    indices: np.ndarray
    """Sample numbers of this worker's share, int64; may be empty."""
    global_size: int
    """Samples in the whole batch; the last of an epoch may be smaller."""


def steps_per_epoch(samples: int, global_batch: int) -> int:
    """Return how many batches an epoch has; the last one holds what is left."""
    return -(-samples // global_batch)


def batches(
    samples: int, *, global_batch: int, epochs: int, seed: int, rank: int, world_size: int, start: int = 0
) -> Iterator[Batch]:
    """Yield the shares of `rank` from step `start` on. Every sample is in exactly one share of an epoch.

    Raises `ValueError` if there is no sample or no place in a batch.
    """
    if samples < 1 or global_batch < 1:
        raise ValueError(f"samples={samples} and global_batch={global_batch} must be at least 1")
    per_epoch = steps_per_epoch(samples, global_batch)
    for epoch in range(start // per_epoch, epochs):
        order = np.random.default_rng((seed, epoch)).permutation(samples)
        first = start - epoch * per_epoch if epoch == start // per_epoch else 0
        for position in range(first, per_epoch):
            whole = order[position * global_batch : (position + 1) * global_batch]
            yield Batch(epoch * per_epoch + position, epoch, whole[rank::world_size], len(whole))
