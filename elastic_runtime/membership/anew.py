"""How a round comes about by starting all workers anew, and when a running one is ended to have another size."""

from __future__ import annotations

from elastic_runtime.membership.actions import Action, Event, Start
from elastic_runtime.membership.changing import Changing
from elastic_runtime.membership.members import Worker, natural, places
from elastic_runtime.membership.roster import FORMING_PATIENCE, GROWTH_PAUSE, UNRANKED
from elastic_runtime.wording import counted

__all__ = ["Anew"]

LONGEST_PAUSE = 320.0
"""To this `GROWTH_PAUSE` doubles with each such end, for each costs the steps since the last checkpoint; a round of the
full size that lasts as long starts it over."""


class Anew(Changing):
    """The steps of the machine for programs that cannot go on in place: whole nodes, all started anew."""

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
        full = self.nodes.largest(most) * self.nodes.workers
        if self.world_size >= full and now - self._round_since >= LONGEST_PAUSE:
            self._grow_pause = GROWTH_PAUSE  # The round before was whole, and lasted.
        self.round += 1
        self.phase = "running"
        self._round_since = now
        self._started_only = True
        self._ended_well.clear()
        self._failures.clear()
        self._lost.clear()
        self._grow_from, self._growth_asked = now + self._grow_pause, False
        self._last_rank.clear()  # A node that comes back must not take the rank that another has had since.
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
        kept = (
            min(len(ready), most) if self._managed else len(ready)
        )  # Managed ones that are too many are sent away.
        return [self._round_event(), *starts, *self._tell_spares(kept - size)]

    def _resize(self, now: float) -> list[Action]:
        """End a running round that should have another size: a smaller one at once, a larger one when it can be had.

        A node that comes and goes must not eat the steps of the others: see `GROWTH_PAUSE`.
        """
        if self.phase != "running" or not self._workers or self._ended_well:
            return []  # With some of them through, the job is about to end.
        per_node = self.nodes.workers
        present, most = self.world_size // per_node, self.desired // per_node
        aim = self.nodes.largest(most)
        if aim == present or not aim:
            return []
        if aim < present:
            return [self._resized(present, aim), *self._change(now, planned=True)]
        ready = self._available()
        size = self.nodes.largest(min(len(ready), most))
        if size <= present or now < self._grow_from:
            return []
        coming = len(self._names(now)) if self._managed else len(ready)
        if (
            size < self.nodes.largest(min(coming, most))
            and now - max(n.since for n in ready) < FORMING_PATIENCE
        ):
            return []  # One more start for all that come at about the same time.
        if not self._growth_asked:
            self._grow_pause = min(2 * self._grow_pause, LONGEST_PAUSE)
        return [self._resized(present, size), *self._change(now, planned=True)]

    def _resized(self, before: int, after: int) -> Event:
        text = f"starting all workers anew on {counted(after, 'node')} (was {before})"
        return Event(kind="resize", text=text, details={"before": before, "after": after})

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
