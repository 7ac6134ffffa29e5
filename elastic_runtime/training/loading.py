"""Samples to batches, in this process or in loader workers that serve many rounds.

Loader workers belong to the `steps()` call, not to a round: after a change the same processes are aimed at the new
rank's share. That needs the same dataset object in every `train()` call; another one gets workers of its own, and the
old ones end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from elastic_runtime.processes.tree import die_with_parent
from elastic_runtime.training.sockets import close_in_child

__all__ = ["InlineLoader", "Loader", "WorkerLoader", "to_device"]

Collate = Callable[[list[Any]], Any]


class Loader(Protocol):
    """Turns a stream of sample numbers into a stream of batches."""

    def aim(self, batches: Iterator[np.ndarray]) -> None:
        """From now on give the batches of this stream; what was prepared for another one is dropped."""

    def next(self) -> Any:
        """Return the next batch of the stream."""

    def close(self) -> None:
        """End helper processes."""


class InlineLoader:
    """Loads in the training process."""

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self._dataset = dataset
        self._collate = collate or default_collate
        # A TensorDataset is one indexing operation a tensor, instead of one a sample and a stack.
        plain = type(dataset) is TensorDataset and collate is None
        self._tensors = dataset.tensors if plain else None
        self._stream: Iterator[np.ndarray] = iter(())

    def aim(self, batches: Iterator[np.ndarray]) -> None:
        """Give the batches of this stream from now on."""
        self._stream = batches

    def next(self) -> Any:
        """Load the next batch."""
        indices = next(self._stream)
        if self._tensors is not None:
            chosen = torch.from_numpy(indices)
            return [tensor[chosen] for tensor in self._tensors]
        numbers = indices.tolist()
        if hasattr(self._dataset, "__getitems__"):
            return self._collate(self._dataset.__getitems__(numbers))
        return self._collate([self._dataset[number] for number in numbers])

    def close(self) -> None:
        """Nothing to end."""


class WorkerLoader:
    """Loads in helper processes of this worker, which end with it."""

    def __init__(
        self,
        dataset: Any,
        collate: Collate | None,
        *,
        workers: int,
        pin_memory: bool,
        private: frozenset[int],
        key: Hashable,
    ) -> None:
        """`private` are inodes of sockets that the helpers must not keep open; `key` says what this loader is for."""
        self.key = key
        self._stream: Iterator[np.ndarray] = iter(())
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=_Sampler(self),
            num_workers=workers,
            collate_fn=collate,
            pin_memory=pin_memory,
            persistent_workers=True,
            worker_init_fn=partial(_start, os.getpid(), private),
        )
        self._batches: Iterator[Any] | None = None

    def aim(self, batches: Iterator[np.ndarray]) -> None:
        """Give the batches of this stream from now on, by the same processes."""
        self._stream = batches
        # For persistent workers this drops what they have prepared and starts them on the new stream.
        self._batches = iter(self._loader)

    def next(self) -> Any:
        """Return the next batch."""
        assert self._batches is not None
        return next(self._batches)

    def close(self) -> None:
        """End the processes."""
        iterator = self._loader._iterator
        self._batches = None
        self._loader._iterator = None
        if iterator is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined]


class _Sampler:
    def __init__(self, owner: WorkerLoader) -> None:
        self._owner = owner

    def __iter__(self) -> Iterator[list[int]]:
        for indices in self._owner._stream:
            yield indices.tolist()


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with every tensor in it on `device`; containers keep their type."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch.to(device) if callable(getattr(batch, "to", None)) else batch


def _start(parent: int, private: frozenset[int], _worker: int) -> None:
    die_with_parent(parent)
    close_in_child(private)
