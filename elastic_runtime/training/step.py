"""One optimizer step: from its first micro-batch, through the reduction, to the commit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.errors import InputError

if TYPE_CHECKING:
    from elastic_runtime.training.reduction import Totals
    from elastic_runtime.training.session import Session

__all__ = ["Step"]


class Step:
    """One step of `job.steps()`. Iterating over it gives this worker's micro-batches, on `job.device`.

    The inner loop must run to its end: that is where the reduction completes, also for an empty share. The step commits
    when its body ends normally or by `continue`, or by `commit()`.
    """

    def __init__(
        self, session: Session, *, index: int, epoch: int, samples: int, sizes: list[int], fetch: Any
    ) -> None:
        """Made by `job.steps()`. `sizes` are those of this rank's micro-batches; `fetch()` gives the next one."""
        self._session = session
        self._sizes = sizes
        self._fetch = fetch
        self._size = 0
        self._started = False
        self._running = False
        self._totals: Totals | None = None
        self._loss_sum: torch.Tensor | float = 0.0
        self._weight = 0.0
        self.index = index
        """Number of this step among all of the job, from 0: `job.global_step` at its start."""
        self.epoch = epoch
        """Number of the epoch of this `steps()` call, from 0."""
        self.samples = samples
        """Samples of the global batch."""
        self.committed = False
        """Whether the step counts."""
        self.figures: dict[str, float] = {}
        """What `job.log` was given in this step."""

    @property
    def reduced(self) -> bool:
        """Whether gradients and loss are complete."""
        return self._totals is not None

    @property
    def loss(self) -> float:
        """Mean loss over the global batch: Σ loss · weight / Σ weight over all workers. NaN if nothing was weighed.

        It came with the gradients: reading it costs nothing. Raises `InputError` before the inner loop has ended.
        """
        if self._totals is None:
            raise InputError(
                "step.loss is complete when the inner loop has ended: read it after `for batch in step`"
            )
        return self._totals.loss_sum / self._totals.weight if self._totals.weight else float("nan")

    @property
    def stop(self) -> bool:
        """Whether all ranks agreed to end the round after this step."""
        return self._totals is not None and self._totals.stop

    def __iter__(self) -> Iterator[Any]:
        """Give the micro-batches, and complete the reduction after the last one."""
        if self._started:
            raise InputError(
                "a step can be iterated over once: its gradients are summed when the loop has ended"
            )
        self._started = self._running = True
        last = len(self._sizes) - 1
        for place, size in enumerate(self._sizes):
            self._session.check()
            batch = self._fetch()
            self._size = size
            if place == last:
                self._session.reducer.arm()
            yield batch
        self._complete()

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Run the backward pass of this micro-batch's mean `loss`, so that gradients become those of the global mean.

        `weight` is what the loss is a mean over; default: the samples of the micro-batch. Give the count of tokens, for
        instance, where the loss is a mean over tokens. With a GradScaler attached the loss is scaled here: give the
        plain one, and call `scaler.step` and `scaler.update` as usual.

        Raises `InputError` outside the inner loop, or for a loss that is no single number.
        """
        if not self._running:
            raise InputError(
                "step.backward belongs inside `for batch in step`: the step's gradients are complete"
            )
        if loss.numel() != 1:
            raise InputError(
                f"loss has shape {tuple(loss.shape)}: give its mean over the samples, a single number"
            )
        self._session.check()
        weight = float(self._size if weight is None else weight)
        if not 0 <= weight < float("inf"):
            raise InputError(f"weight={weight!r} must be a finite number of at least 0")
        value = loss.detach().reshape(()).float()
        self._loss_sum = self._loss_sum + value * weight
        self._weight += weight
        scaler = self._session.scaler
        scaled = loss if scaler is None else scaler.scale(loss)
        factor = weight / self.samples
        scaled.backward(None if factor == 1.0 else torch.full_like(scaled, factor))  # type: ignore[no-untyped-call]

    def commit(self) -> None:
        """Let the step count now, before its body ends: for a `break` or `return` after the optimizer's step.

        Raises `InputError` if the inner loop was left before its end.
        """
        if self.committed:
            return
        if self._totals is None:
            if self._started:
                raise InputError(
                    "the loop over the step was left before its end, so that its gradients are not summed over the "
                    "workers: let `for batch in step` run out (skip a micro-batch by `continue`)"
                )
            self._started = True
            self._complete()
        self.committed = True
        self._session.committed(self)

    def _complete(self) -> None:
        self._session.check()
        self._running = False
        reducer = self._session.reducer
        if self._sizes and not self._weight and reducer.has_gradients():
            raise InputError(
                "gradients came from loss.backward(): call step.backward(loss), which weighs them by the share of "
                "this worker in the global batch"
            )
        self._totals = reducer.finish(
            rank=self._session.place.rank,
            loss_sum=self._loss_sum,
            weight=self._weight,
            nominal=float(self.samples),
            stop=self._session.change_pending(),
        )
