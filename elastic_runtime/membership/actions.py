"""What the membership machine asks for. Agents and the supervisor do it; see `messages` for how it is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Action", "Change", "Dismiss", "Done", "Event", "Go", "Kill", "Leave", "Place", "Release", "Start", "Stop",
    "ToNode", "Wanted",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one worker stands in a round: torchrun's numbers."""

    slot: int
    """Which of its node's workers, from 0: its LOCAL_RANK."""
    spawn: int
    """Number of the start of this process: tells it from one that was in the same slot before."""
    rank: int
    world_size: int
    group_rank: int
    """Number of its node among the nodes of the round."""
    group_world_size: int
    local_world_size: int
    """Workers of the round on its node."""
    log: int
    """Number of the log file that it writes, as long as it lives: its rank at the start, or another that is free."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Start these workers. `round` is the one that they are expected to join."""

    node: str
    round: int
    store: tuple[str, int] | None
    """Address of the round's store."""
    places: tuple[Place, ...]


@dataclass(frozen=True, kw_only=True)
class Change:
    """Tell these workers that their round ends: at a step boundary that all agree on if `planned`, else at once."""

    node: str
    round: int
    """Number of the round that comes next."""
    planned: bool
    slots: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Go:
    """These workers, which wait, join the round."""

    node: str
    round: int
    store: tuple[str, int]
    source: int
    """Rank that gives its state to the others; -1 if nobody has any."""
    places: tuple[Place, ...]


@dataclass(frozen=True, kw_only=True)
class Leave:
    """These workers, which wait at a boundary, are not in the next round and end politely."""

    node: str
    slots: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Release:
    """All workers of the round are through: these may return from `elastic.run`."""

    node: str
    slots: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Stop these workers: SIGTERM, then SIGKILL after the job's grace."""

    node: str
    slots: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Kill these workers: they did not come back in time, or hold a state that nobody can use."""

    node: str
    slots: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Dismiss:
    """This node's agent is to end, with its workers: the job is over, or the node is not wanted."""

    node: str
    reason: str


@dataclass(frozen=True)
class Wanted:
    """The nodes that should have an agent now; whoever starts agents makes it so."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something to tell and to keep."""

    kind: str
    text: str
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """The job is over: `succeeded`, `failed` or `stopped`, and why."""

    state: str
    reason: str


ToNode = Start | Change | Go | Leave | Release | Stop | Kill | Dismiss
Action = ToNode | Wanted | Event | Done
