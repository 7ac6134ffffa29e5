"""How the next round comes about in place, and how workers are let in and out at a step boundary."""

from __future__ import annotations

from itertools import count

from elastic_runtime.membership.actions import Action, Event, Go, Leave, Start
from elastic_runtime.membership.anew import Anew
from elastic_runtime.membership.members import Worker, by_node, natural, places, ranks
from elastic_runtime.membership.roster import FORMING_PATIENCE, UNRANKED, widened

__all__ = ["Forming"]

JOINER_PATIENCE = 1.0
"""Seconds that a worker which wants to join waits for others that are being started."""
JOIN_PATIENCE = 60.0
"""Seconds in which the workers of a round must have met; then it is formed again."""


class Forming(Anew):
    """The steps of the machine that form a round of workers which go on in place."""

    def _form(self, now: float) -> list[Action]:
        if self.phase == "running" and self.in_place:
            return self._check_meeting(now)
        if self.phase != "forming":
            return []
        return self._form_in_place(now) if self.in_place else self._start_anew(now)

    def _form_in_place(self, now: float) -> list[Action]:
        """Form a round of the workers that wait."""
        actions = self._see_off()
        waiting = [w for w in self._workers.values() if w.state == "ready"]
        held = [w for w in waiting if not w.fresh]
        sources = [w for w in held if not w.torn]
        if held and not sources:
            text = "no worker has a whole state: going on from the newest checkpoint"
            return [*actions, Event(kind="state_lost", text=text), *self._kill(held)]
        size = self._largest(len(waiting))
        if not size:
            return actions
        starting = any(w.state == "starting" for w in self._workers.values())
        # What was started has waited for the others already.
        expected = self.world_size if self._started_only else self._expected(now)
        if not held and (starting or len(waiting) < expected):
            newest = max(self._forming_since, *(w.ready_since for w in waiting))
            if now - newest < FORMING_PATIENCE:
                return actions
        source = min(sources, key=lambda w: (-w.step, w.rank)) if sources else None
        order = sorted(
            waiting,
            key=lambda w: (
                w is not source, w.fresh, w.rank if w.rank >= 0 else UNRANKED, natural(w.node), w.slot,
            ),
        )  # fmt: skip
        return actions + self._go(ranks(order, size), source, now)

    def _go(self, assigned: dict[int, Worker], source: Worker | None, now: float) -> list[Action]:
        store = next((found for w in assigned.values() if (found := self._take_store(w.node))), None)
        if store is None:
            return []  # The agents are making one.
        told = self._started_only and self.world_size == len(assigned)
        if not self._started_only:
            self.round += 1
        self._started_only = False
        self.phase = "running"
        self.world_size = len(assigned)
        self._round_since = now
        self._lost.clear()
        for rank, worker in assigned.items():
            worker.rank, worker.round, worker.state, worker.joined = rank, self.round, "training", False
            worker.at_once = False
            worker.told = self.round
            self._last_rank[worker.key] = rank
        spares = [w for w in self._workers.values() if w.state == "ready"]
        for worker in spares:
            worker.rank = -1
        gone: list[Action] = [
            Go(
                node=node, round=self.round, store=store, source=-1 if source is None else source.rank,
                places=given,
            )
            for node, given in places(assigned).items()
        ]  # fmt: skip
        event = [] if told else [self._round_event()]
        return [*gone, *event, *self._tell_spares(len(spares))]

    def _check_meeting(self, now: float) -> list[Action]:
        """Form the round again if its workers do not meet."""
        if now - self._round_since < JOIN_PATIENCE or all(w.joined for w in self._members()):
            return []
        text = (
            f"the workers of round {self.round} did not meet within {JOIN_PATIENCE:.0f} s: forming it again"
        )
        self._round_since = now
        return [Event(kind="meeting_failed", text=text), *self._change(now, planned=False)]

    def _invite(self, now: float) -> list[Action]:
        """Start workers that are missing, and let in those that are ready, at a step boundary."""
        if not self.in_place:
            return self._resize(now)
        if self.phase == "finishing":
            return []
        actions = self._start_missing(now)
        if self.phase != "running":
            return actions
        actions += self._see_off()
        members = self._members()
        if all(w.told > self.round for w in members) or any(w.state == "finished" for w in members):
            return actions
        leavers = self._leavers()
        if any(w.key in leavers for w in members):
            return actions + self._change(now, planned=True)
        joiners = [w for w in self._workers.values() if w.state == "ready" and w.key not in leavers]
        if not joiners or self._largest(len(members) + len(joiners)) <= len(members):
            return actions
        starting = any(w.state == "starting" for w in self._workers.values())
        if starting and now - min(w.ready_since for w in joiners) < JOINER_PATIENCE:
            return actions
        return actions + self._change(now, planned=True)

    def _start_missing(self, now: float) -> list[Action]:
        if now < self._not_before or self.phase in ("changing", "stopping"):
            return []
        alive = sum(w.state != "ending" for w in self._workers.values())
        free = [
            (node.id, slot)
            for node in self._available()
            for slot in range(node.workers)
            if (node.id, slot) not in self._workers
        ]
        room = min(self.desired - alive, len(free))
        if room <= 0 or self._largest(alive + room) <= self._largest(alive):
            return []
        free.sort(key=lambda key: (self._last_rank.get(key, UNRANKED), natural(key[0]), key[1]))
        new = [self._new_worker(node, slot, now) for node, slot in free[:room]]
        taken = {w.rank for w in self._members()}
        holes = iter(rank for rank in range(self.maximum + len(new)) if rank not in taken)
        expected = {next(holes): worker for worker in new}
        logs = {w.log for w in self._workers.values()}
        free_logs = count()
        for rank, worker in expected.items():
            worker.log = rank if rank not in logs else next(n for n in free_logs if n not in logs)
            logs.add(worker.log)
            self._workers[worker.key] = worker
        world = max(self.world_size, *(rank + 1 for rank in expected))
        return [
            Start(
                node=node, round=self.round + 1, store=self._nodes[node].store,
                places=tuple(widened(place, world) for place in given),
            )
            for node, given in places(expected).items()
        ]  # fmt: skip

    def _see_off(self) -> list[Action]:
        """Let those that wait, and should not be in the next round, end."""
        waiting = [w for w in self._workers.values() if w.state == "ready"]
        keys = self._leavers() if waiting else ()
        leaving = [w for w in waiting if w.key in keys]
        for worker in leaving:
            worker.state = "ending"
        return [Leave(node=node, slots=slots) for node, slots in by_node(leaving).items()]
