"""How the next round comes about: in place, or by starting all workers anew."""

from __future__ import annotations

from itertools import count

from elastic_runtime.membership.actions import Action, Change, Event, Go, Leave, Start, Stop
from elastic_runtime.membership.members import Worker, by_node, natural, places, ranks
from elastic_runtime.membership.roster import UNRANKED, Roster, widened

__all__ = ["Forming"]

FORMING_PATIENCE = 5.0
"""Seconds that a round waits for nodes and workers beyond the minimum."""
JOINER_PATIENCE = 1.0
"""Seconds that a worker which wants to join waits for others that are being started."""
RETURN_PATIENCE = 30.0
"""Seconds in which a worker must come back from a round that broke; then it is killed and started anew."""
JOIN_PATIENCE = 60.0
"""Seconds in which the workers of a round must have met; then it is formed again."""


class Forming(Roster):
    """The steps of the machine that form a round."""

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

    def _form(self, now: float) -> list[Action]:
        if self.phase == "running" and self.in_place:
            return self._check_meeting(now)
        if self.phase != "forming":
            return []
        return self._form_in_place(now) if self.in_place else self._start_anew(now)

    # --- anew --------------------------------------------------------------------------------------------------

    def _start_anew(self, now: float) -> list[Action]:
        """Start the workers of a round, on whole nodes."""
        if any(w.state != "ending" for w in self._workers.values()):
            return self._change(now, planned=False)  # Left over from a round that nobody leads any more.
        if now < self._not_before or self._workers:
            return []
        ready = self._available()
        most = self.desired // self.nodes.workers
        wanted = len(self._names(now)) if self._managed else most
        size = self.nodes.largest(min(len(ready), most))
        if not size or not (len(ready) >= wanted or now - self._forming_since >= FORMING_PATIENCE):
            return []
        chosen = self._whole_nodes([node.id for node in ready], size)
        store = self._take_store(chosen[0])
        if store is None:
            return []  # The agent is making one.
        self.round += 1
        self.phase = "running"
        self._round_since = now
        self._started_only = True
        self._ended_well.clear()
        self._failures.clear()
        self._lost.clear()
        assigned: dict[int, Worker] = {}
        for group, node in enumerate(chosen):
            for slot in range(self.nodes.workers):
                worker = self._new_worker(node, slot, now)
                worker.rank, worker.round = group * self.nodes.workers + slot, self.round
                worker.state, worker.log = "training", worker.rank
                self._workers[worker.key] = assigned[worker.rank] = worker
                self._last_rank[worker.key] = worker.rank
        self.world_size = len(assigned)
        starts = [
            Start(node=node, round=self.round, store=store, places=given)
            for node, given in places(assigned).items()
        ]
        return [self._round_event(), *starts, *self._tell_spares(len(ready) - size)]

    def _whole_nodes(self, ready: list[str], size: int) -> list[str]:
        """Return `size` nodes in the order of their ranks: who had a block of ranks keeps it, others fill the holes."""
        per_node = self.nodes.workers
        lowest: dict[str, int] = {}
        for (node, _), rank in self._last_rank.items():
            lowest[node] = min(rank, lowest.get(node, rank))
        before = {node: lowest.get(node, -1) // per_node for node in ready}
        kept: dict[int, str] = {}
        for node in ready:
            if 0 <= before[node] < size:
                kept.setdefault(before[node], node)
        placed = set(kept.values())
        rest = [node for node in ready if node not in placed]
        rest.sort(key=lambda node: (before[node] if before[node] >= 0 else UNRANKED, natural(node)))
        others = iter(rest)
        return [kept[group] if group in kept else next(others) for group in range(size)]

    # --- in place ----------------------------------------------------------------------------------------------

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
        if not held and (starting or len(waiting) < self._expected(now)):
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
        if not self.in_place or self.phase == "finishing":
            return []
        actions = self._start_missing(now)
        if self.phase != "running":
            return actions
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
        keys = self._leavers()
        leaving = [w for w in self._workers.values() if w.state == "ready" and w.key in keys]
        for worker in leaving:
            worker.state = "ending"
        return [Leave(node=node, slots=slots) for node, slots in by_node(leaving).items()]

    # --- both --------------------------------------------------------------------------------------------------

    def _change(self, now: float, *, planned: bool) -> list[Action]:
        """End the round: tell every worker of it to get ready for the next one, or stop them all."""
        if not self._all_in_place():
            self.phase = "stopping"
            self.in_place = self._started_only = False
            self._awaited.clear()
            alive = [w for w in self._workers.values() if w.state != "ending"]
            for worker in alive:
                worker.state = "ending"
            return [Stop(node=node, slots=slots) for node, slots in by_node(alive).items()]
        if not planned:
            if self.phase != "changing" or not any(w.at_once for w in self._workers.values()):
                self._changing_since = now
            self.phase = "changing"
        active = [w for w in self._workers.values() if w.state in ("training", "finished")]
        return self._tell(active, planned=planned)

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
            text=f"round {self.round}: {_counted(self.world_size, 'worker')} on {_counted(nodes, 'node')}",
            details={"round": self.round, "world_size": self.world_size, "in_place": self.in_place},
        )

    def _tell_spares(self, spares: int) -> list[Action]:
        """Say once that workers or nodes are left over, for the allowed sizes have no place for them."""
        before, self._spares_told = self._spares_told, spares
        if spares <= 0 or spares == before:
            return []
        allowed = f" (allowed sizes of nodes: {self.nodes})" if self.nodes.sizes is not None else ""
        text = f"training on {_counted(self.world_size, 'worker')}, {spares} spare{allowed}"
        return [Event(kind="spare", text=text, details={"spares": spares})]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
