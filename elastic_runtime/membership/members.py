"""The nodes and workers that the machine knows of, and which rank each worker gets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from elastic_runtime.membership.actions import Place

__all__ = ["Node", "Worker", "by_node", "natural", "places", "ranks"]


@dataclass(kw_only=True)
class Node:
    """A node whose agent is connected."""

    id: str
    workers: int
    """Workers that it has room for."""
    store: tuple[str, int] | None = None
    """Address of an unused store that the node holds for the next round."""
    leaving: bool = False
    """Whether it was told to end."""
    pid: int = 0
    """Process id of its agent."""
    host: str = ""
    since: float = 0.0
    """When it connected."""


@dataclass(kw_only=True)
class Worker:
    """One process of the user's program."""

    node: str
    slot: int
    spawn: int
    state: str = "starting"
    """`starting`, `ready` (waits to join a round), `training`, `finished` (waits for the others) or `ending`."""
    rank: int = -1
    """Its rank in the newest round that it was given; -1 before the first."""
    round: int = -1
    """Number of that round."""
    in_place: bool = False
    """Whether it can go on in another round without being started anew."""
    step: int = 0
    """Steps that it had committed when it last said so."""
    torn: bool = False
    """Whether it failed between a reduction and the commit: its state is never a source."""
    fresh: bool = True
    """Whether it holds no state of this job."""
    told: int = -1
    """Number of the newest round that it was told to get ready for."""
    at_once: bool = False
    """Whether it was told to do so at once."""
    joined: bool = False
    """Whether it has met the others of its round."""
    pid: int = 0
    since: float = 0.0
    """When it was started."""
    ready_since: float = 0.0
    log: int = -1
    """Number of its log file."""

    @property
    def key(self) -> tuple[str, int]:
        """Node and slot."""
        return self.node, self.slot

    def as_dict(self) -> dict[str, Any]:
        """Return what an agent tells a new coordinator of it."""
        names = ("slot", "spawn", "state", "rank", "round", "in_place", "step", "torn", "fresh", "told", "at_once",
                 "joined", "pid", "log")  # fmt: skip
        return {name: getattr(self, name) for name in names}


@cache
def natural(text: str) -> tuple[Any, ...]:
    """Return a key that sorts numbers in names by their value: gpu-2 before gpu-10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text))


def ranks(chosen: Iterable[Worker], size: int) -> dict[int, Worker]:
    """Return `size` workers by rank: who had a rank below `size` keeps it, the others fill the holes in order.

    `chosen` must hold at least `size` workers, the preferred ones first.
    """
    picked = list(chosen)[:size]
    assert len(picked) == size, f"{len(picked)} workers for {size} ranks"
    kept: dict[int, Worker] = {}
    rest: list[Worker] = []
    for worker in sorted(picked, key=lambda w: -w.round):
        if 0 <= worker.rank < size and worker.rank not in kept:
            kept[worker.rank] = worker
        else:
            rest.append(worker)
    rest.sort(key=lambda w: (w.rank if w.rank >= 0 else size, natural(w.node), w.slot))
    holes = iter(rank for rank in range(size) if rank not in kept)
    kept.update(zip(holes, rest, strict=True))
    return dict(sorted(kept.items()))


def places(assigned: Mapping[int, Worker]) -> dict[str, tuple[Place, ...]]:
    """Return the places of a round by node; a node's group rank follows from its lowest rank."""
    nodes: dict[str, list[tuple[int, Worker]]] = {}
    for rank, worker in assigned.items():
        nodes.setdefault(worker.node, []).append((rank, worker))
    return {
        node: tuple(
            Place(
                slot=worker.slot, spawn=worker.spawn, rank=rank, world_size=len(assigned), group_rank=group,
                group_world_size=len(nodes), local_world_size=len(members), log=worker.log,
            )
            for rank, worker in members
        )
        for group, (node, members) in enumerate(nodes.items())
    }  # fmt: skip


def by_node(workers: Iterable[Worker]) -> dict[str, tuple[int, ...]]:
    """Return the slots of these workers by node."""
    found: dict[str, list[int]] = {}
    for worker in workers:
        found.setdefault(worker.node, []).append(worker.slot)
    return {node: tuple(sorted(slots)) for node, slots in found.items()}
