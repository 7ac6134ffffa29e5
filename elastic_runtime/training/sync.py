"""State in step at the start of a round: who lacks it, and the broadcast that gives it.

One small all_gather tells every rank whether anything must be sent at all; after the loss of a peer that was in step
with the others nothing is, so that recovery does not depend on the size of the model. What is received lies beside the
present state until it is complete: a rank whose source dies in the middle is what it was before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from elastic_runtime.errors import JobFailed
from elastic_runtime.training.codec import pack, unpack

__all__ = ["Standing", "agree", "broadcast_state"]

_CHUNK_BYTES = 64 << 20
"""Small tensors are sent together in pieces of this size, large ones alone in such pieces."""
_DIRECT_BYTES = 8 << 20
_ALIGN = 16


@dataclass(frozen=True)
class Standing:
    """What a rank brings into a round."""

    step: int
    """Committed steps."""
    digest: int
    """Of its whole position."""
    fresh: bool
    """It holds no state of this job's rounds."""
    torn: bool
    """Its state is part of one step and part of the next."""
    lineage: int = -1
    """Round in which the last step was committed; -1 if none was. Two rounds may both have done the same step, one of
    them on a host that was cut off: equal steps of the same round are equal state, those of two rounds are not."""


def agree(own: Standing, *, source: int, world: int) -> int | None:
    """Return the rank that all others receive from; None if all are in step already. Collective.

    `source` is the coordinator's choice, -1 if it knows of no state: then rank 0 gives what it has or finds in a
    checkpoint. Raises `JobFailed` if no rank has whole state.
    """
    mine = torch.tensor([own.step, own.digest, own.fresh, own.torn, own.lineage], dtype=torch.int64)
    if world == 1:
        rows = [mine.tolist()]
    else:
        gathered = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(gathered, mine)
        rows = [row.tolist() for row in gathered]
    if source >= 0:
        if source >= world or rows[source][2] or rows[source][3]:
            raise JobFailed(f"source={source} of the round has no whole state to give: {rows}")
        step, digest, _, _, lineage = rows[source]
        in_step = all(row == [step, digest, 0, 0, lineage] for row in rows)
        return None if in_step else source
    return 0


def broadcast_state(state: Any, *, source: int, rank: int, device: torch.device) -> Any:
    """Return the `state` of rank `source` on every rank. Collective; on others `state` is ignored.

    Memory beyond the received state: one piece of 64 MiB on either side. Tensors that lie on a GPU arrive on `device`.
    Raises `InputError` for state that cannot be sent, and what torch raises when a peer is lost.
    """
    sending = rank == source
    text, tensors = pack(state) if sending else ("", [])
    specs = [[str(one.dtype).removeprefix("torch."), list(one.shape), one.is_cuda] for one in tensors]
    header = json.dumps([text, specs]).encode() if sending else b""
    size = torch.tensor([len(header)], dtype=torch.int64)
    dist.broadcast(size, source)
    content = (
        torch.frombuffer(bytearray(header), dtype=torch.uint8)
        if sending
        else torch.empty(int(size), dtype=torch.uint8)
    )
    dist.broadcast(content, source)
    if not sending:
        text, specs = json.loads(content.numpy().tobytes())
        tensors = [
            torch.empty(shape, dtype=getattr(torch, dtype), device=device if cuda else "cpu")
            for dtype, shape, cuda in specs
        ]
    for place in ("cpu", "cuda"):
        _send([one for one in tensors if one.is_cuda == (place == "cuda")], source, sending)
    return state if sending else unpack(text, tensors)


@torch.no_grad()
def _send(tensors: list[torch.Tensor], source: int, sending: bool) -> None:
    small = []
    for tensor in tensors:
        if not tensor.numel():
            continue
        if tensor.numel() * tensor.element_size() < _DIRECT_BYTES:
            small.append(tensor)
            continue
        flat = _bytes(tensor)
        for at in range(0, flat.numel(), _CHUNK_BYTES):
            dist.broadcast(flat[at : at + _CHUNK_BYTES], source)
    if not small:
        return
    buffer = torch.empty(0, dtype=torch.uint8, device=small[0].device)
    for group, size in _groups(small):
        if buffer.numel() < size:
            buffer = torch.empty(size, dtype=torch.uint8, device=small[0].device)
        parts = []
        at = 0
        for tensor in group:
            count = tensor.numel() * tensor.element_size()
            part = buffer[at : at + count].view(tensor.dtype).view(tensor.shape)
            parts.append(part)
            at += _aligned(count)
        if sending:
            torch._foreach_copy_(parts, group)
        dist.broadcast(buffer[:size], source)
        if not sending:
            torch._foreach_copy_(group, parts)


def _groups(tensors: list[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], int]]:
    group: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        count = _aligned(tensor.numel() * tensor.element_size())
        if group and size + count > _CHUNK_BYTES:
            yield group, size
            group, size = [], 0
        group.append(tensor)
        size += count
    yield group, size


def _aligned(count: int) -> int:
    return math.ceil(count / _ALIGN) * _ALIGN


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A tensor that is not contiguous is copied to be sent; the receiver's own are always contiguous.
    return tensor.contiguous().view(-1).view(torch.uint8)
