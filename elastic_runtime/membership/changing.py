"""How a round ends: its workers are told of the change, or stopped; those that do not come back are killed."""

from __future__ import annotations

from elastic_runtime.membership.actions import Action, Change, Event, Stop
from elastic_runtime.membership.members import Worker, by_node
from elastic_runtime.membership.roster import Roster
from elastic_runtime.wording import counted

__all__ = ["RETURN_PATIENCE", "Changing"]

RETURN_PATIENCE = 30.0
"""Seconds in which a worker must come back from a round that broke; then it is killed and started anew."""


class Changing(Roster):
    """The steps of the machine that end a round."""

    def _collect(self, now: float) -> list[Action]:
        """A change goes on when everybody who has to is ready; who does not come back in time is killed."""
        if self.phase == "stopping" and not self._workers:
            self.phase = "forming"
            self._forming_since = now
        if self.phase != "changing":
            return []
        if not self._awaited:
            self.phase = "forming"
            self._forming_since = now
            return []
        if now - self._changing_since <= RETURN_PATIENCE:
            return []
        awaited = [self._workers[key] for key in self._awaited]
        if not any(w.at_once for w in awaited):
            return self._change(
                now, planned=False
            )  # The boundary that some have reached is not reached by all.
        late = [w for w in awaited if w.at_once]
        told: list[Action] = [
            Event(
                kind="worker_late",
                text=f"rank {w.rank} on node {w.node} did not come back within {RETURN_PATIENCE:.0f} s: killing it",
                details={"node": w.node, "rank": w.rank},
            )
            for w in late
        ]
        return told + self._kill(late)

    def _change(self, now: float, *, planned: bool) -> list[Action]:
        """End the round: tell every worker of it to get ready for the next one, or stop them all."""
        if not self._all_in_place():
            if self.phase != "stopping":
                self._planned_stop = planned
            self.phase = "stopping"
            self.in_place = self._started_only = False
            self._awaited.clear()
            return self._stop_all()
        if not planned:
            if self.phase != "changing" or not any(w.at_once for w in self._workers.values()):
                self._changing_since = now
            self.phase = "changing"
        active = [w for w in self._workers.values() if w.state in ("training", "finished")]
        return self._tell(active, planned=planned)

    def _stop_all(self) -> list[Action]:
        """Stop all workers that were not told to end."""
        alive = [w for w in self._workers.values() if w.state != "ending"]
        for worker in alive:
            worker.state = "ending"
        return [Stop(node=node, slots=slots) for node, slots in by_node(alive).items()]

    def _tell(self, workers: list[Worker], *, planned: bool) -> list[Action]:
        """Tell these workers to get ready for the next round, if they do not know yet."""
        number = self.round + 1
        tell = [w for w in workers if w.told < number or (not planned and not w.at_once)]
        for worker in tell:
            worker.told, worker.at_once = number, not planned
            self._awaited.add(worker.key)
        return [
            Change(node=node, round=number, planned=planned, slots=slots)
            for node, slots in by_node(tell).items()
        ]

    def _round_event(self) -> Event:
        nodes = len({w.node for w in self._members()})
        return Event(
            kind="round",
            text=f"round {self.round}: {counted(self.world_size, 'worker')} on {counted(nodes, 'node')}",
            details={"round": self.round, "world_size": self.world_size, "in_place": self.in_place},
        )

    def _tell_spares(self, spares: int) -> list[Action]:
        """Say once that workers or nodes are left over, for the allowed sizes have no place for them."""
        before, self._spares_told = self._spares_told, spares
        if spares <= 0 or spares == before:
            return []
        allowed = f" (allowed sizes of nodes: {self.nodes})" if self.nodes.sizes is not None else ""
        text = f"training on {counted(self.world_size, 'worker')}, {spares} spare{allowed}"
        return [Event(kind="spare", text=text, details={"spares": spares})]
