"""What the machine knows: nodes, workers, budget; and the questions about them that need no decision."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from elastic_runtime.jobs.nodes import NodeRange
from elastic_runtime.membership.actions import Action, Event, Kill, Place
from elastic_runtime.membership.failures import Budget, Failure, Losses
from elastic_runtime.membership.members import Node, Worker, by_node, natural

__all__ = ["Roster", "difference"]

NODE_LOSSES = 5
"""Losses in a row, without a finished step between them, after which a node is left out for a time."""
FORMING_PATIENCE = 5.0
"""Seconds that a round waits for nodes and workers beyond the minimum."""
GROWTH_PAUSE = 10.0
"""Seconds that a round lasts at least before it is ended to have more nodes, unless somebody asked for them."""
UNRANKED = 1 << 30


class Roster:
    """The data of the machine."""

    def __init__(
        self, nodes: NodeRange, *, max_restarts: int, now: float, term: int = 1, managed: bool = True,
        wait_limit: float = 600.0,
    ) -> None:  # fmt: skip
        """Prepare a job.

        `term` says which coordinator decides; one above 1 first waits for what the agents know. `managed` nodes are
        called 0, 1, 2 … and are started and stopped as `Wanted` says; others come by themselves, and what is beyond
        the desired size stays as a spare. `wait_limit`: seconds below the minimum after which the job fails.
        """
        self.nodes = nodes
        self.term = term
        self.desired = nodes.maximum * nodes.workers
        """Workers that the job should have, as long as they can be had."""
        self.budget = Budget(max_restarts)
        self.losses = Losses(NODE_LOSSES)
        self.phase = "forming"
        self.round = -1
        self.in_place = False
        self.world_size = 0
        """Workers of the current round."""
        self.fingerprint: dict[str, Any] | None = None
        """What all nodes must have alike: script and versions."""
        self._managed = managed
        self._wait_limit = wait_limit
        self._nodes: dict[str, Node] = {}
        self._workers: dict[tuple[str, int], Worker] = {}
        self._awaited: set[tuple[str, int]] = set()
        """Workers that were told of a change and are not ready yet."""
        self._last_rank: dict[tuple[str, int], int] = {}
        self._spawned = term << 20
        self._told_wanted: tuple[str, ...] | None = None
        self._failures: list[Failure] = []
        self._lost: set[str] = set()
        """Nodes that were lost, or left, since the round was formed."""
        self._ended_well: set[int] = set()
        self._started_only = False
        """Whether the round was started, but its in-place workers have not been let go yet."""
        self._round_of_step = -1
        self._store_losses = 0
        self._forming_since = self._changing_since = self._round_since = now
        self._grow_pause = GROWTH_PAUSE
        self._grow_from = now + GROWTH_PAUSE
        """Before this, no round is ended only to have more nodes."""
        self._growth_asked = False
        """Whether somebody asked for more workers since the round was started."""
        self._planned_stop = False
        """Whether the workers that are being stopped are so because of a plan, not of a failure."""
        self._waiting_since: float | None = None
        self._waiting_told = False
        self._not_before = now
        self._last_charge = ("", float("-inf"))
        self._suspected = ("", 0)
        self._spares_told = 0
        self._seen: tuple[str, int] = ("", -1)
        """The worker that `_any_in` found last."""

    @property
    def minimum(self) -> int:
        """Workers below which the job waits."""
        return self.nodes.minimum * self.nodes.workers

    @property
    def maximum(self) -> int:
        """Workers that the job never exceeds."""
        return self.nodes.maximum * self.nodes.workers

    @property
    def managed(self) -> bool:
        """Whether nodes are started and stopped as `Wanted` says."""
        return self._managed

    @property
    def wait_limit(self) -> float:
        """Seconds below the minimum after which the job fails."""
        return self._wait_limit

    @property
    def state(self) -> str:
        """One word for `status`."""
        if self.phase in ("changing", "stopping"):
            return "recovering"
        if self.phase == "forming" and self.round < 0:
            return "pending" if not self._nodes else "forming"
        return {"finishing": "running"}.get(self.phase, self.phase)

    @property
    def is_meeting(self) -> bool:
        """Whether the current round has not finished a step yet, as far as is known."""
        return self._round_of_step < self.round

    def workers(self) -> list[Worker]:
        """Return every worker that is known, by rank and then by node."""
        return sorted(self._workers.values(), key=lambda w: (_rank(w), natural(w.node), w.slot))

    def connected(self) -> list[Node]:
        """Return the nodes whose agents are connected."""
        return sorted(self._nodes.values(), key=lambda node: natural(node.id))

    def node(self, name: str) -> Node | None:
        """Return the node of this name, if its agent is connected."""
        return self._nodes.get(name)

    def copy(self, now: float) -> dict[str, Any]:
        """Return what agents keep for a later coordinator, as JSON; its size does not grow with the job."""
        return {
            "term": self.term,
            "round": self.round,
            "world_size": self.world_size,
            "in_place": self.in_place,
            "finishing": self.phase == "finishing",
            "desired": self.desired,
            "fingerprint": self.fingerprint,
            "budget": self.budget.copy(),
            "losses": self.losses.copy(now),
            "round_of_step": self._round_of_step,
        }

    # --- questions ---------------------------------------------------------------------------------------------

    def _members(self) -> list[Worker]:
        """Return the workers of the current round that train or are through."""
        return [
            w for w in self._workers.values()
            if w.round == self.round and w.rank >= 0 and w.state in ("training", "finished")
        ]  # fmt: skip

    def _all_in_place(self) -> bool:
        return (
            self.in_place
            and self.phase != "finishing"
            and all(w.in_place or w.state in ("starting", "ending") for w in self._workers.values())
        )

    def _of(self, node: str) -> list[Worker]:
        return [w for w in self._workers.values() if w.node == node]

    def _any_in(self, *states: str) -> bool:
        """Whether some worker is in one of these states.

        Cheap while many workers leave a state one after the other: it asks the one that it found last first, so that
        a thousand workers which report the same thing do not cost a thousand looks at all of them.
        """
        seen = self._workers.get(self._seen)
        if seen is None or seen.state not in states:
            seen = next((w for w in reversed(self._workers.values()) if w.state in states), None)
            self._seen = ("", -1) if seen is None else seen.key
        return seen is not None

    def _find(self, node: str, slot: int, spawn: int) -> Worker | None:
        worker = self._workers.get((node, slot))
        return worker if worker is not None and worker.spawn == spawn else None

    def _available(self) -> list[Node]:
        """Return the nodes that may have workers, those with low ranks first."""
        lowest: dict[str, int] = {}
        for worker in self._workers.values():
            if worker.rank >= 0:
                lowest[worker.node] = min(lowest.get(worker.node, UNRANKED), worker.rank)
        ready = [n for n in self._nodes.values() if not n.leaving and not self.losses.is_excluded(n.id)]
        return sorted(ready, key=lambda n: (lowest.get(n.id, UNRANKED), natural(n.id)))

    def _leavers(self) -> set[tuple[str, int]]:
        """Return the workers that should not be in the next round: their node leaves, or the job is to be smaller."""
        staying: list[Worker] = []
        leaving: set[tuple[str, int]] = set()
        alive = [w for w in self._workers.values() if w.state != "ending"]
        for worker in alive:
            node = self._nodes.get(worker.node)
            if node is None or node.leaving or self.losses.is_excluded(worker.node):
                leaving.add(worker.key)
            else:
                staying.append(worker)
        if len(staying) > self.desired:
            staying.sort(key=lambda w: (_rank(w), natural(w.node), w.slot))
            leaving.update(worker.key for worker in staying[self.desired :])
        return leaving

    def _largest(self, live: int) -> int:
        """Return the largest allowed world that `live` workers can make; 0 if there is none."""
        live = min(live, self.desired)
        if self.nodes.sizes is not None:
            worlds = (size * self.nodes.workers for size in self.nodes.sizes)
            return max((world for world in worlds if world <= live), default=0)
        return live if live >= self.minimum else 0

    def _names(self, now: float) -> list[str]:
        """Return the managed nodes that should have an agent now."""
        return [name for name in self._keep(now) if name in self._nodes or self.losses.usable(name, now)]

    def _keep(self, now: float) -> list[str]:
        """Return the managed nodes that belong to the job at its desired size, those with low ranks first."""
        count = -(-self.desired // self.nodes.workers)
        if self.phase == "running" or self.in_place:
            lowest = {w.node: w.rank for w in reversed(self.workers()) if w.rank >= 0}
        else:  # Workers are being stopped, one after the other: what counts is who was in the round.
            lowest = {}
            for (node, _), rank in self._last_rank.items():
                if node in self._nodes:
                    lowest[node] = min(rank, lowest.get(node, rank))
        names = [str(n) for n in range(self.nodes.maximum)]
        names = [n for n in names if not self.losses.is_excluded(n) or self.losses.usable(n, now)]
        names.sort(key=lambda n: (lowest.get(n, UNRANKED), n not in self._nodes, natural(n)))
        return names[:count]

    def _expected(self, now: float) -> int:
        """Return how many workers a first round waits for."""
        nodes = len(self._names(now)) if self._managed else len(self._available())
        return self._largest(nodes * self.nodes.workers) or nodes * self.nodes.workers

    # --- small changes -----------------------------------------------------------------------------------------

    def _take_store(self, node: str) -> tuple[str, int] | None:
        known = self._nodes.get(node)
        if known is None:
            return None
        store, known.store = known.store, None
        return store

    def _new_worker(self, node: str, slot: int, now: float) -> Worker:
        self._spawned += 1
        return Worker(node=node, slot=slot, spawn=self._spawned, since=now)

    def _kill(self, workers: Iterable[Worker]) -> list[Action]:
        workers = list(workers)
        for worker in workers:
            worker.state = "ending"
            self._awaited.discard(worker.key)
        return [Kill(node=node, slots=slots) for node, slots in by_node(workers).items()]

    def _told(self, failure: Failure, *, member: bool) -> Event:
        return Event(
            kind="worker_failed",
            text=f"rank {failure.rank} on node {failure.node}: {failure.cause} after step {failure.step}",
            details={
                "node": failure.node, "rank": failure.rank, "code": failure.code, "cause": failure.cause,
                "step": failure.step, "round": self.round, "consequence": failure.is_consequence, "member": member,
            },
        )  # fmt: skip


def _rank(worker: Worker) -> int:
    return worker.rank if worker.rank >= 0 else UNRANKED


def widened(place: Place, world: int) -> Place:
    """Return the place in a world of `world` workers."""
    return replace(place, world_size=world)


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Say what a node has that differs from the job's; empty if nothing does."""
    parts = [
        f"{name} {theirs.get(name)!s} there, {ours.get(name)!s} in this job"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    return "; ".join(parts)
