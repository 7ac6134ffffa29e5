"""Which samples a step has: a function of seed, epoch and step; rank and world size only cut it into shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elastic_runtime.errors import InputError

__all__ = ["Plan", "micro_batches", "order", "share"]


def order(
    samples: int, *, seed: int, epoch: int, shuffle: bool = True, weights: np.ndarray | None = None
) -> np.ndarray:
    """Return the order of the samples in `epoch`: int64 of shape (samples,).

    A permutation; with `weights` (shape (samples,), relative, not all zero), that many draws with replacement.
    """
    generator = np.random.default_rng((seed, epoch))
    if weights is not None:
        return generator.choice(samples, size=samples, p=weights / weights.sum())
    return generator.permutation(samples) if shuffle else np.arange(samples)


def share(whole: np.ndarray, *, rank: int, world: int) -> np.ndarray:
    """Return the part of a global batch that `rank` takes; empty if there are more ranks than samples."""
    return whole[rank::world]


def micro_batches(own: np.ndarray, size: int | None) -> list[np.ndarray]:
    """Cut a share into micro-batches of at most `size` samples; None keeps it whole, an empty share has none."""
    if not len(own):
        return []
    return [own[at : at + (size or len(own))] for at in range(0, len(own), size or len(own))]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The steps of one `job.steps()` call."""

    samples: int
    """Samples of the dataset."""
    global_batch: int
    """Samples of a step over all ranks; the last of an epoch may have fewer."""
    epochs: int
    drop_last: bool
    """Whether an epoch ends before a last step with fewer samples."""
    shuffle: bool
    seed: int
    weights: np.ndarray | None = None
    """Relative frequency of each sample, drawn with replacement; None takes each once an epoch."""
    _order: dict[int, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        dataset: Any,
        *,
        global_batch: int,
        epochs: int,
        drop_last: bool,
        shuffle: bool,
        seed: int,
        weights: Any,
    ) -> Plan:
        """Check what the user gave. Raises `InputError` that names the parameter, its value and the fix."""
        try:
            samples = len(dataset)
        except TypeError:
            raise InputError(
                f"dataset={type(dataset).__name__} has no length: give a map-style dataset (__len__, __getitem__)"
            ) from None
        if samples < 1:
            raise InputError("dataset has 0 samples: give at least one")
        for name, value, least in (("global_batch", global_batch, 1), ("epochs", epochs, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{name}={value!r} must be a whole number of at least {least}")
        if drop_last and global_batch > samples:
            raise InputError(
                f"global_batch={global_batch} with drop_last=True leaves no step of {samples} samples: "
                f"give at most {samples}"
            )
        return cls(
            samples=samples,
            global_batch=global_batch,
            epochs=epochs,
            drop_last=drop_last,
            shuffle=shuffle,
            seed=seed,
            weights=None if weights is None else _checked_weights(weights, samples),
        )

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch."""
        return self.samples // self.global_batch if self.drop_last else -(-self.samples // self.global_batch)

    @property
    def total(self) -> int:
        """Steps of all epochs."""
        return self.per_epoch * self.epochs

    def epoch(self, step: int) -> int:
        """Return the epoch of `step`, both from 0."""
        return step // self.per_epoch

    def size(self, step: int) -> int:
        """Return the samples of `step` over all ranks."""
        return min(self.global_batch, self.samples - step % self.per_epoch * self.global_batch)

    def whole(self, step: int) -> np.ndarray:
        """Return the sample numbers of `step` over all ranks, int64."""
        epoch = self.epoch(step)
        if epoch not in self._order:
            # Two: loader workers may be an epoch ahead of the step that runs.
            for old in sorted(self._order)[:-1]:
                del self._order[old]
            self._order[epoch] = order(
                self.samples, seed=self.seed, epoch=epoch, shuffle=self.shuffle, weights=self.weights
            )
        at = step % self.per_epoch * self.global_batch
        return self._order[epoch][at : at + self.global_batch]

    def shares(
        self, start: int, *, rank: int, world: int, micro_batch: int | None
    ) -> Iterator[Sequence[np.ndarray]]:
        """Yield the micro-batches of `rank` for each step from `start` on."""
        for step in range(start, self.total):
            yield micro_batches(share(self.whole(step), rank=rank, world=world), micro_batch)


def _checked_weights(weights: Any, samples: int) -> np.ndarray:
    found = np.asarray(weights, dtype=np.float64)
    if found.shape != (samples,):
        raise InputError(f"weights has shape {found.shape}: give one for each of the {samples} samples")
    if not np.isfinite(found).all() or (found < 0).any() or not found.sum() > 0:
        raise InputError("weights must be finite, none below zero, and not all zero")
    return found
