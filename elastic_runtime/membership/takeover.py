"""A new coordinator, or a node that was out of reach: what the agents tell is made sense of."""

from __future__ import annotations

from typing import Any

from elastic_runtime.jobs.nodes import NodeRange
from elastic_runtime.membership.actions import Action, Dismiss, Release
from elastic_runtime.membership.members import Node, Worker, by_node
from elastic_runtime.membership.settling import Settling

__all__ = ["Takeover"]

_TAKEOVER_PATIENCE = 3.0
"""Seconds in which a new coordinator waits for the agents of the round that it takes over."""


class Takeover(Settling):
    """The steps of the machine that go on from what an earlier coordinator knew."""

    def __init__(self, nodes: NodeRange, *, max_restarts: int, now: float, term: int = 1, managed: bool = True,
                 wait_limit: float = 600.0) -> None:  # fmt: skip
        """Prepare a job; see `Roster`."""
        super().__init__(
            nodes, max_restarts=max_restarts, now=now, term=term, managed=managed, wait_limit=wait_limit
        )
        self._taking_over = term > 1
        self._finishing = False
        """Whether the coordinator before this one had released the workers at their end."""
        self._takeover_until = now + _TAKEOVER_PATIENCE

    @property
    def taking_over(self) -> bool:
        """Whether the agents have not told yet what the coordinator before this one knew."""
        return self._taking_over

    def _take_over(self, copy: dict[str, Any], now: float) -> None:
        """Go on from an agent's copy of what an earlier coordinator knew."""
        self.budget.resume(copy["budget"])
        self.losses.resume(copy["losses"], now)
        self._round_of_step = max(self._round_of_step, copy["round_of_step"])
        self.fingerprint = self.fingerprint or copy["fingerprint"]
        if copy["round"] >= self.round:
            self.round, self.world_size = copy["round"], copy["world_size"]
            self.in_place, self.desired = copy["in_place"], copy["desired"]
            self._finishing = copy["finishing"]

    def _end_takeover(self, now: float) -> list[Action]:
        # Once every node has told what runs there, what is missing has ended.
        missing = len(self._nodes) < -(-self.desired // self.nodes.workers)
        if now < self._takeover_until and (missing or not self._managed):
            if self.round < 0 or len(self._workers) < self.world_size:
                return []
            known = sum(w.round == self.round or w.state == "ready" for w in self._workers.values())
            if known < self.world_size:
                return []
        self._taking_over = False
        if self._finishing:
            self.phase = "finishing"
            return [Release(node=n, slots=slots) for n, slots in by_node(self._members()).items()]
        out = [n for n in self.connected() if self.losses.is_excluded(n.id) and not self._of(n.id)]
        dismissed: list[Action] = []
        for node in out:  # It connected before somebody told that it is left out.
            node.leaving = True
            dismissed.append(Dismiss(node=node.id, reason=f"node {node.id} failed too often and is left out"))
        if self.round < 0:
            return dismissed
        actions = dismissed + self._adopt(now)
        if self.phase == "forming":
            self.round += (
                1  # Nodes that are still away may have been let into the next round: ours is another one.
            )
        return actions

    def _adopt(self, now: float) -> list[Action]:
        """Make sense of workers that run already: of this round, or of one that has ended meanwhile."""
        if self.phase == "stopping":
            return self._stop_all()  # The node was cut off before it could do as it was told.
        stale = [
            w for w in self._workers.values()
            if w.state in ("training", "finished") and w.round != self.round and not w.in_place
        ]  # fmt: skip
        actions = self._kill(stale)
        active = [w for w in self._workers.values() if w.state in ("training", "finished")]
        self._awaited |= {w.key for w in active if w.told > self.round}
        members = self._members()
        waiting = [w for w in self._workers.values() if w.state == "ready" and w.rank >= 0]
        if self.phase == "forming" and members:
            self.phase, self._round_since, self._started_only = "running", now, False
            if len(members) != self.world_size or waiting:
                return actions + self._change(now, planned=False)
        if self.phase == "changing":
            return actions + self._change(now, planned=False)
        return actions + self._tell([w for w in active if w not in members], planned=False)

    def _is_unchanged(self, node: Node, workers: list[Worker]) -> bool:
        """Whether a known agent only has another connection, and nothing that was said on the old one is missing."""
        known = self._nodes.get(node.id)
        if known is None or known.leaving or self._taking_over or not node.pid:
            return False
        ours, theirs = {w.key: w for w in self._of(node.id)}, {w.key: w for w in workers}
        return (
            (known.pid, known.host) == (node.pid, node.host)
            and ours.keys() == theirs.keys()
            and all(_is_as_known(ours[key], theirs[key]) for key in ours)
        )


def _is_as_known(ours: Worker, theirs: Worker) -> bool:
    """Whether a worker is where the machine left it; it may have finished meanwhile."""
    if (ours.spawn, ours.told, ours.at_once) != (theirs.spawn, theirs.told, theirs.at_once):
        return False
    if ours.state == "training" and theirs.state in ("training", "finished"):
        return (ours.rank, ours.round) == (theirs.rank, theirs.round)
    return ours.state == theirs.state
