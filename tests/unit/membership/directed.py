"""A job around the membership machine whose agents and workers obey at once, so that a test tells a story in order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from elastic_runtime.jobs.nodes import parse_nodes
from elastic_runtime.membership import actions as act
from elastic_runtime.membership.machine import Membership
from elastic_runtime.membership.members import Node, Worker


@dataclass
class Process:
    """One worker."""

    node: str
    slot: int
    spawn: int
    rank: int = -1
    round: int = -1
    told: int = -1
    step: int = 0
    fresh: bool = True
    torn: bool = False
    at_once: bool = False
    joined: bool = False
    state: str = "starting"


@dataclass
class Round:
    """A round as the nodes were told of it."""

    number: int
    source: int | None
    """Rank that gives its state; None if the workers were started anew."""
    ranks: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Node and slot of each rank."""
    world_size: int = 0
    began: float = 0.0
    stores: set[Any] = field(default_factory=set)

    @property
    def nodes(self) -> list[str]:
        """The nodes in the order of the ranks, each once."""
        return list(dict.fromkeys(self.ranks[rank][0] for rank in sorted(self.ranks)))


class Job:
    """The machine and what obeys it. `in_place` workers enter `elastic.run` as soon as they are started."""

    def __init__(
        self,
        nodes: str = "1:2",
        workers: int = 1,
        *,
        in_place: bool = True,
        start: bool = True,
        **options: Any,
    ) -> None:
        self.range = parse_nodes(nodes, workers)
        self.options = {"max_restarts": 10, **options}
        self.in_place = in_place
        self.now = 0.0
        self.term = 1
        self.alive: set[str] = set()
        self.connected: set[str] = set()
        self.procs: dict[tuple[str, int], Process] = {}
        self.rounds: dict[int, Round] = {}
        self.events: list[act.Event] = []
        self.log: list[act.Action] = []
        self.wanted: tuple[str, ...] = ()
        self.done: act.Done | None = None
        self.held: set[str] = set()
        """Nodes that are not started though they are wanted."""
        self.deaf: set[tuple[str, int]] = set()
        """Workers that do nothing that they are told."""
        self.shy: set[tuple[str, int]] = set()
        """Workers that do not say that they joined."""
        self.slow: set[tuple[str, int]] = set()
        """Workers that, once started, do not say anything."""
        self.copies: dict[str, dict[str, Any]] = {}
        self._stores = 0
        self._queue: deque[act.Action] = deque()
        self._busy = False
        self.machine = self._machine()
        if start:
            self.do(self.machine.tick(self.now))

    def _machine(self) -> Membership:
        return Membership(self.range, now=self.now, term=self.term, **self.options)

    # --- obeying -----------------------------------------------------------------------------------------------

    def do(self, actions: list[act.Action]) -> list[act.Action]:
        """Carry out actions, and what follows from them; return them."""
        self.log += actions
        self._queue += actions
        if not self._busy:
            self._busy = True
            try:
                while self._queue:
                    self._obey(self._queue.popleft())
            finally:
                self._busy = False
        for node in self.alive & self.connected:
            self.copies[node] = self.machine.copy(self.now)
        return actions

    def _obey(self, action: act.Action) -> None:
        match action:
            case act.Wanted(nodes):
                self.wanted = nodes
                for name in nodes:
                    if name not in self.alive | self.held:
                        self.join(name)
            case act.Event():
                self.events.append(action)
            case act.Done():
                assert self.done is None, "a job ends once"
                self.done = action
            case act.Start():
                self._start(action)
            case act.Go():
                self._go(action)
            case act.Dismiss(node=node):
                for proc in self.of(node):
                    self.exit(proc, -15)
                if node in self.alive:
                    self.lose(node)
            case _:
                for slot in action.slots:
                    if proc := self.procs.get((action.node, slot)):
                        self._tell(proc, action)

    def _place(self, action: act.Start | act.Go, source: int | None) -> None:
        number = action.round
        known = self.rounds.setdefault(number, Round(number, source, began=self.now))
        known.source = source
        known.stores.add(action.store)
        for place in action.places:
            assert known.ranks.get(place.rank, (action.node, place.slot)) == (action.node, place.slot), (
                "two of a rank"
            )
            known.ranks[place.rank] = (action.node, place.slot)
            known.world_size = place.world_size

    def _start(self, action: act.Start) -> None:
        assert action.node in self.alive
        if not self.in_place:
            self._place(action, None)
        for place in action.places:
            key = (action.node, place.slot)
            assert key not in self.procs, "no worker of an earlier round is left"
            proc = self.procs[key] = Process(action.node, place.slot, place.spawn)
            self.do(self.machine.worker_started(*key, place.spawn, 1000 + place.spawn % 1000) or [])
            if not self.in_place:
                proc.rank, proc.round, proc.state, proc.joined = place.rank, action.round, "training", True
        self.fresh_store(action.node)
        if self.in_place:
            for place in action.places:
                if (action.node, place.slot) not in self.slow:
                    self.enter(self.procs[action.node, place.slot])

    def enter(self, proc: Process) -> None:
        """A worker reaches `elastic.run`."""
        if self.procs.get((proc.node, proc.slot)) is proc:
            self.do(self.machine.worker_hello(proc.node, proc.slot, proc.spawn, self.now))
            self.ready(proc)

    def _go(self, action: act.Go) -> None:
        for place in action.places:
            proc = self.procs[action.node, place.slot]
            assert proc.spawn == place.spawn
            assert proc.state == "ready", "only who waits gets a place"
        self._place(action, action.source)
        for place in action.places:
            proc = self.procs[action.node, place.slot]
            proc.rank, proc.round, proc.state = place.rank, action.round, "training"
            proc.told, proc.at_once, proc.joined = max(proc.told, action.round), False, False
        self.fresh_store(action.node)
        for place in action.places:
            proc = self.procs.get((action.node, place.slot))
            if proc is not None and (action.node, place.slot) not in self.shy:
                self.joined(proc)

    def joined(self, proc: Process) -> None:
        """A worker says that it met the others."""
        proc.joined, proc.fresh, proc.torn = True, False, False
        self.machine.worker_joined(proc.node, proc.slot, proc.spawn, proc.round)

    def fresh_store(self, node: str) -> None:
        """The node offers a store that was not used."""
        self._stores += 1
        self.do(self.machine.node_store(node, (node, self._stores), self.now))

    def _tell(self, proc: Process, action: act.ToNode) -> None:
        if (proc.node, proc.slot) in self.deaf and not isinstance(action, act.Kill):
            if isinstance(action, act.Change):
                proc.told, proc.at_once = action.round, proc.at_once or not action.planned
            return
        match action:
            case act.Change(round=number, planned=planned):
                proc.told, proc.at_once = max(proc.told, number), proc.at_once or not planned
                if not planned:
                    self.ready(proc)
            case act.Leave() | act.Release():
                self.exit(proc, 0)
            case act.Stop():
                self.exit(proc, -15)
            case act.Kill():
                self.exit(proc, -9)

    # --- what happens ------------------------------------------------------------------------------------------

    def join(
        self, name: str, *, running: list[Worker] | None = None, copy: Any = None, **details: Any
    ) -> None:
        """An agent connects."""
        self.alive.add(name)
        self.connected.add(name)
        self._stores += 1
        node = Node(id=name, workers=self.range.workers, store=(name, self._stores))
        self.do(self.machine.node_joined(node, self.now, workers=running or [], copy=copy, **details))

    def ready(self, proc: Process) -> None:
        """A worker wants to join the next round."""
        if self.procs.get((proc.node, proc.slot)) is not proc:
            return
        proc.state = "ready"
        self.do(
            self.machine.worker_ready(
                proc.node, proc.slot, proc.spawn, self.now, step=proc.step, torn=proc.torn, fresh=proc.fresh,
                round=proc.round, told=proc.told,
            )
        )  # fmt: skip

    def exit(self, proc: Process, code: int, message: str = "") -> list[act.Action]:
        """A worker ends."""
        if self.procs.get((proc.node, proc.slot)) is proc:
            del self.procs[proc.node, proc.slot]
        return self.do(
            self.machine.worker_exited(proc.node, proc.slot, proc.spawn, self.now, code=code, message=message)
        )

    def lose(self, name: str) -> list[act.Action]:
        """An agent is gone with its workers; it is started again if it is wanted."""
        self.alive.discard(name)
        self.connected.discard(name)
        for proc in self.of(name):
            del self.procs[proc.node, proc.slot]
        actions = self.do(self.machine.node_lost(name, self.now))
        if self.done is None and name in self.wanted and name not in self.held | self.alive:
            self.join(name)
        return actions

    def leave(self, name: str) -> list[act.Action]:
        """An agent is told to end by SIGTERM; workers that cannot leave at a boundary are stopped by it."""
        actions = self.do(self.machine.node_leaving(name, self.now))
        if not self.in_place:
            for proc in self.of(name):
                self.exit(proc, -15)
        return actions

    def train(self, steps: int = 1) -> None:
        """All workers of the round do steps; a planned change is agreed on in each."""
        for _ in range(steps):
            members = self.members()
            assert members, f"nobody trains in phase {self.machine.phase}"
            agreed = any(proc.told > proc.round for proc in members)
            for proc in members:
                proc.step += 1
            self.machine.progressed(max(proc.step for proc in members), members[0].round)
            if agreed:
                for proc in members:
                    self.ready(proc)
                return

    def finish(self, proc: Process) -> None:
        """A worker has no steps left."""
        proc.state = "finished"
        if self.in_place:
            self.do(self.machine.worker_finished(proc.node, proc.slot, proc.spawn, proc.step, self.now))
        else:
            self.exit(proc, 0)

    def wait(self, seconds: float) -> None:
        """Time goes by."""
        end = self.now + seconds
        while self.now < end - 1e-9 and self.done is None:
            self.now += 0.1
            self.do(self.machine.tick(self.now))

    def take_over(self, *, agents: list[str] | None = None) -> None:
        """The coordinator dies; another one hears from the agents what is there, in the order of `agents`."""
        self.term += 1
        self.machine = self._machine()
        self.connected.clear()
        self.do(self.machine.tick(self.now))
        for name in sorted(self.alive) if agents is None else agents:
            self.rejoin(name)

    def rejoin(self, name: str) -> None:
        """An agent that lives connects again and tells what it has."""
        running = [
            Worker(
                node=p.node, slot=p.slot, spawn=p.spawn, state=p.state, rank=p.rank, round=p.round, step=p.step,
                in_place=self.in_place, fresh=p.fresh, torn=p.torn, told=p.told, at_once=p.at_once,
                joined=p.joined, log=p.slot,
            )
            for p in self.of(name)
        ]  # fmt: skip
        self.join(name, running=running, copy=self.copies.get(name))

    # --- looking -----------------------------------------------------------------------------------------------

    def of(self, node: str) -> list[Process]:
        """The workers of a node."""
        return [proc for proc in self.procs.values() if proc.node == node]

    def members(self) -> list[Process]:
        """The workers that train or are through, by rank."""
        found = [proc for proc in self.procs.values() if proc.state in ("training", "finished")]
        return sorted(found, key=lambda proc: proc.rank)

    def rank(self, number: int) -> Process:
        """The worker of this rank."""
        return next(proc for proc in self.members() if proc.rank == number)

    @property
    def last(self) -> Round:
        """The newest round."""
        return self.rounds[max(self.rounds)]

    def told(self, kind: str) -> list[str]:
        """The texts of all events of a kind."""
        return [event.text for event in self.events if event.kind == kind]
