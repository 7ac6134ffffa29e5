"""Gradients, loss, weights, small buffers and the stop flag of a step, summed over the ranks of a round.

Gradients are packed into flat buckets in reverse order of the parameters, as DDP does (Li et al., "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020): a bucket is summed while the backward
pass still computes the next one. Buckets start strictly in their order, so that all ranks issue one sequence. All the
rest travels in a segment at the end of the last bucket: a step costs no collective more than DDP's.

The sum is of gradients that are weighted already (`weight / nominal`), so there is nothing to divide unless the
weights of a step do not add up to its nominal global batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from elastic_runtime.errors import InputError
from elastic_runtime.training.buffers import Buffers
from elastic_runtime.training.group import RoundGroup, Stuck

__all__ = ["Reducer", "Totals"]

_logger = logging.getLogger(__name__)
_FIRST_BYTES = 1 << 20
_BUCKET_BYTES = 25 << 20
_FIXED = 5
"""Numbers at the start of the segment: loss sum, weight, stop, gradients after the launch, large buffers written."""


@dataclass(frozen=True)
class Totals:
    """What a step adds up to over all ranks."""

    loss_sum: float
    weight: float
    stop: bool
    """Whether a rank asks to end the round after this step."""


class _Bucket:
    """Parameters of one dtype and device, and the flat tensor that their gradients are summed in."""

    def __init__(
        self, indices: list[int], parameters: Sequence[nn.Parameter], extra: int, device: torch.device
    ) -> None:
        self.indices = indices
        self.parameters = [parameters[index] for index in indices]
        size = sum(parameter.numel() for parameter in self.parameters)
        dtype = self.parameters[0].dtype if self.parameters else torch.float32
        place = self.parameters[0].device if self.parameters else device
        self.flat = torch.zeros(size + extra, dtype=dtype, device=place)
        self.segment = self.flat[size:]
        self.views: list[torch.Tensor] = []
        at = 0
        for parameter in self.parameters:
            part = self.flat[at : at + parameter.numel()]
            # Optimizers take their fast path only for gradients that lie in memory as their parameters do.
            dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
            self.views.append(
                part.as_strided(parameter.size(), parameter.stride()) if dense else part.view(parameter.shape)
            )
            at += parameter.numel()
        self.missing = len(indices)
        self.work: dist.Work | None = None

    def fill(self) -> None:
        """Move the gradients into the flat tensor; zeros where there is none."""
        targets, sources = [], []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient is not view:
                targets.append(view)
                sources.append(gradient)
            # What comes after the launch must not be added to a tensor that is being summed.
            parameter.grad = None
        if targets:
            torch._foreach_copy_(targets, sources)

    def launch(self) -> None:
        """Start the sum."""
        self.work = dist.all_reduce(self.flat, async_op=True)


class Reducer:
    """Sums the gradients of `parameters` (name, parameter; those that require one) over the ranks of a round.

    One object serves many rounds as long as the parameters stay the same. With one rank it registers no hook, holds no
    memory and changes nothing.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        buffers: Buffers,
        *,
        world: int,
        group: RoundGroup,
    ) -> None:
        self._all = [parameter for _, parameter in parameters]
        self._requires = tuple(parameter.requires_grad for parameter in self._all)
        chosen = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        self._names = [name for name, _ in chosen]
        self._parameters = [parameter for _, parameter in chosen]
        self._buffers = buffers
        self._world = world
        self._group = group
        self._buckets: list[_Bucket] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._used = [False] * len(chosen)
        self._seen = [False] * len(chosen)
        self._armed = False
        self._next = 0
        if world > 1:
            self._make_buckets()

    def fits(self, parameters: Sequence[tuple[str, nn.Parameter]], world: int) -> bool:
        """Whether this object can serve these parameters, unfrozen as they are now, in a world of that size."""
        return (
            (world > 1) == (self._world > 1)
            and len(parameters) == len(self._all)
            and all(own is given for own, (_, given) in zip(self._all, parameters, strict=True))
            and self._requires == tuple(parameter.requires_grad for parameter in self._all)
        )

    def begin(self, *, world: int) -> None:
        """A step starts: drop gradients that lie about, and expect new ones."""
        self._world = world
        self._armed = False
        for parameter in self._all:
            parameter.grad = None
        if world == 1:
            return
        self._next = 0
        count = len(self._parameters)
        self._used, self._seen = [False] * count, [False] * count
        for bucket in self._buckets:
            bucket.missing, bucket.work = len(bucket.indices), None

    def arm(self) -> None:
        """The backward passes that follow are the last of this rank's share: their gradients may go."""
        self._armed = self._world > 1

    def has_gradients(self) -> bool:
        """Whether a backward pass of this step left a gradient."""
        return any(self._seen) or any(parameter.grad is not None for parameter in self._parameters)

    def finish(
        self, *, rank: int, loss_sum: torch.Tensor | float, weight: float, nominal: float, stop: bool
    ) -> Totals:
        """Complete the sums, and set the gradients and buffers of all ranks.

        Collective. Raises what torch raises when a peer is lost, after every started sum has ended.
        """
        self._armed = False
        if self._world == 1:  # noqa: SIM108  two ways, not two values
            totals = Totals(float(loss_sum), weight, stop)
        else:
            totals = self._sum(rank, loss_sum, weight, stop)
        if totals.weight not in (0.0, nominal):
            gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, nominal / totals.weight)
        return totals

    def abandon(self) -> bool:
        """Forget the step: wait until nobody writes into the buckets (the group is interrupted), drop gradients.

        False if a sum is stuck: then the buckets cannot be used again, and this object must be replaced.
        """
        self._armed = False
        clean = True
        for bucket in self._buckets:
            if bucket.work is not None:
                try:
                    self._group.wait(bucket.work)
                except Stuck:
                    clean = False
                except RuntimeError as error:
                    _logger.debug("sum of an abandoned step: %s", error)
            bucket.work = None
        for parameter in self._all:
            parameter.grad = None
        return clean

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._buckets.clear()

    def _make_buckets(self) -> None:
        extra = _FIXED + len(self._parameters) + self._buffers.size
        groups: list[list[int]] = []
        open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
        for index in reversed(range(len(self._parameters))):
            parameter = self._parameters[index]
            key = (parameter.dtype, parameter.device)
            size = parameter.numel() * parameter.element_size()
            group, room = open_groups.get(key, ([], _FIRST_BYTES if not groups else _BUCKET_BYTES))
            if not group:
                groups.append(group)
            group.append(index)
            open_groups[key] = (group, room - size) if room > size else ([], _BUCKET_BYTES)
        if not groups or self._parameters[groups[-1][0]].dtype != torch.float32:
            groups.append([])  # for the segment alone
        device = self._all[0].device if self._all else torch.device("cpu")
        last = len(groups) - 1
        self._buckets = [
            _Bucket(group, self._parameters, extra if place == last else 0, device)
            for place, group in enumerate(groups)
        ]
        for bucket in self._buckets:
            for index in bucket.indices:
                hook = partial(self._ready, bucket, index)
                self._hooks.append(
                    self._parameters[index].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                )

    def _ready(self, bucket: _Bucket, index: int, parameter: torch.Tensor) -> None:
        if not self._armed or self._seen[index]:
            return
        self._seen[index] = True
        bucket.missing -= 1
        if not bucket.missing:
            self._launch_complete()

    def _launch_complete(self) -> None:
        # The last bucket carries the segment, which is complete only when the share is.
        while self._next < len(self._buckets) - 1 and not self._buckets[self._next].missing:
            self._collect(self._buckets[self._next])
            self._buckets[self._next].launch()
            self._next += 1

    def _collect(self, bucket: _Bucket) -> None:
        for index, parameter in zip(bucket.indices, bucket.parameters, strict=True):
            gradient = parameter.grad
            self._used[index] = gradient is not None
            if gradient is not None and gradient.layout != torch.strided:
                raise InputError(
                    f"gradient of {self._names[index]!r} is sparse: only dense gradients are summed over workers; "
                    "make the embedding with sparse=False"
                )
        bucket.fill()

    def _sum(self, rank: int, loss_sum: torch.Tensor | float, weight: float, stop: bool) -> Totals:
        late = any(
            parameter.grad is not None
            for bucket in self._buckets[: self._next]
            for parameter in bucket.parameters
        )
        for bucket in self._buckets[self._next :]:
            self._collect(bucket)
            if bucket is self._buckets[-1]:
                self._write_segment(bucket.segment, rank, loss_sum, weight, stop, late)
            bucket.launch()
        self._next = len(self._buckets)
        self._wait()
        segment = self._buckets[-1].segment
        loss, total, stops, lates, large = segment[:_FIXED].tolist()
        if lates:
            self._sum_late()
        used = self._used
        if not all(used):
            # Only a rank that missed some needs to look: no other can have a gradient that nobody has.
            used = [bool(value) for value in segment[_FIXED : _FIXED + len(used)].tolist()]
        for bucket in self._buckets:
            for index, parameter, view in zip(bucket.indices, bucket.parameters, bucket.views, strict=True):
                parameter.grad = view if used[index] else None
        if rank and self._buffers.size:
            self._buffers.read(segment[_FIXED + len(used) :])
        if large:
            for buffer in self._buffers.large():
                dist.broadcast(buffer, 0)
            self._buffers.large_written()
        return Totals(loss, total, bool(stops))

    def _write_segment(
        self,
        segment: torch.Tensor,
        rank: int,
        loss_sum: torch.Tensor | float,
        weight: float,
        stop: bool,
        late: bool,
    ) -> None:
        count = len(self._used)
        large = rank == 0 and bool(self._buffers.large()) and self._buffers.large_written()
        segment[:_FIXED] = torch.tensor([0.0, weight, float(stop), float(late), float(large)])
        segment[0] = loss_sum
        if all(self._used):
            segment[_FIXED : _FIXED + count] = 1.0
        else:
            segment[_FIXED : _FIXED + count] = torch.tensor([float(used) for used in self._used])
        rest = segment[_FIXED + count :]
        if rank == 0:
            self._buffers.write(rest)
        else:
            rest.zero_()

    def _sum_late(self) -> None:
        # A second backward pass over the last micro-batch, on some rank: its gradients follow in a sum of their own.
        for bucket in self._buckets:
            sums = torch.zeros_like(bucket.flat)
            size = bucket.flat.numel() - bucket.segment.numel()
            at = 0
            for index, parameter, view in zip(bucket.indices, bucket.parameters, bucket.views, strict=True):
                if parameter.grad is not None:
                    part = sums[at : at + view.numel()].as_strided(view.size(), view.stride(), at)
                    part.copy_(parameter.grad)
                    parameter.grad = None
                    self._used[index] = True
                at += view.numel()
            if size:
                dist.all_reduce(sums[:size])
                bucket.flat[:size].add_(sums[:size])

    def _wait(self) -> None:
        for bucket in self._buckets:
            if bucket.work is not None:
                # Kept if it raises: `abandon` waits for it again. And never kept beside its error, which would make a
                # cycle that holds the group, its thread and its sockets until the garbage collector comes by.
                self._group.wait(bucket.work)
                bucket.work = None
