"""A simulated job around the membership machine: agents, workers and messages, with a clock of its own.

Messages keep their order on one connection and overtake each other between connections. Workers behave as real ones
do: they train in step with their peers, stop at an agreed boundary or at once, fail, tear their state, cannot join, hang
and come back. What a coordinator that dies had sent may still be done, or not.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from elastic_runtime.jobs.nodes import NodeRange
from elastic_runtime.membership import actions as act
from elastic_runtime.membership.machine import Membership
from elastic_runtime.membership.members import Node, Worker

TOTAL_STEPS = 60
BROKEN = "RuntimeError: Connection closed by peer"


@dataclass
class SimWorker:
    """One process."""

    node: str
    slot: int
    spawn: int
    in_place: bool
    state: str = "starting"
    step: int = 0
    fresh: bool = True
    torn: bool = False
    rank: int = -1
    round: int = -1
    world: int = 0
    told: int = -1
    at_once: bool = False
    joined: bool = False
    source: int = -1
    hung: bool = False
    ended: tuple[int, str] | None = None


@dataclass
class SimNode:
    """One agent and its workers."""

    id: str
    workers: dict[int, SimWorker] = field(default_factory=dict)
    to_machine: deque[tuple[str, dict[str, Any]]] = field(default_factory=deque)
    to_node: deque[tuple[act.ToNode | None, dict[str, Any]]] = field(default_factory=deque)
    connected: bool = False
    leaving: bool = False
    copy: dict[str, Any] | None = None
    stores: int = 0
    pid: int = field(default_factory=count(1).__next__)
    """Tells an agent that connects again from another one of its name."""


class Simulation:
    """A job whose coordinator, agents and workers are at the mercy of `chance`."""

    def __init__(
        self, seed: int, *, nodes: NodeRange, in_place: bool = True, max_restarts: int = 1000
    ) -> None:
        self.chance = random.Random(seed)
        self.total = TOTAL_STEPS
        self.range = nodes
        self.in_place = in_place
        self.max_restarts = max_restarts
        self.now = 0.0
        self.term = 1
        self.machine: Membership | None = self._machine()
        self.nodes: dict[str, SimNode] = {}
        self.wanted: tuple[str, ...] = ()
        self.done: act.Done | None = None
        self.events: list[act.Event] = []
        self.rounds: dict[int, dict[int, tuple[str, int, int]]] = {}
        self.highest = 0
        self.plain_saved = 0
        self._take(self.machine.tick(self.now))

    def _machine(self) -> Membership:
        return Membership(self.range, max_restarts=self.max_restarts, now=self.now, term=self.term)

    # --- the coordinator ---------------------------------------------------------------------------------------

    def kill_coordinator(self) -> None:
        """The coordinator dies: connections close, what was under way is lost."""
        self.machine = None
        for node in list(self.nodes.values()):
            if node.connected:
                self._cut(node)

    def _cut(self, node: SimNode) -> None:
        """A connection ends; what is under way to the node may still arrive."""
        node.connected = False
        node.to_machine.clear()
        while node.to_node and self.chance.random() < 0.5:
            self._obey(node)
        node.to_node.clear()

    def new_coordinator(self) -> None:
        """Another one takes over."""
        if self.machine is not None:
            self.kill_coordinator()
        self.term += 1
        self.machine = self._machine()

    def _take(self, actions: list[act.Action]) -> None:
        copy = {} if self.machine is None else self.machine.copy(self.now)
        for action in actions:
            match action:
                case act.Wanted(nodes):
                    self.wanted = nodes
                case act.Event():
                    self.events.append(action)
                case act.Done():
                    self.done = action
                case _:
                    if isinstance(action, act.Go | act.Start):
                        self._check_places(action)
                    node = self.nodes.get(action.node)
                    if node is not None and node.connected:
                        node.to_node.append((action, copy))
        for node in self.nodes.values():
            if node.connected and _kept(node.to_node[-1][1] if node.to_node else node.copy) != _kept(copy):
                node.to_node.append((None, copy))

    def _check_places(self, action: act.Go | act.Start) -> None:
        """No rank is given twice in a round, and the size is allowed."""
        if isinstance(action, act.Start) and self.in_place:
            return  # The place is only provisional.
        given = self.rounds.setdefault(action.round + 1000 * self.term, {})
        for place in action.places:
            assert place.rank not in given or given[place.rank][:2] == (action.node, place.slot), (
                "a rank twice"
            )
            given[place.rank] = (action.node, place.slot, place.spawn)
            assert 0 <= place.rank < place.world_size <= self.range.maximum * self.range.workers
            assert place.world_size >= self.range.minimum * self.range.workers
            if self.range.sizes is not None:
                assert place.world_size // self.range.workers in self.range.sizes

    # --- agents ------------------------------------------------------------------------------------------------

    def spawn_node(self, name: str) -> None:
        """Start an agent."""
        node = SimNode(name)
        self.nodes[name] = node

    def connect(self, node: SimNode) -> None:
        """The agent reaches the coordinator and says what it has."""
        if self.machine is None or node.connected:
            return
        node.connected = True
        node.stores += 1
        known = [
            Worker(
                node=node.id, slot=w.slot, spawn=w.spawn, state=w.state if w.state != "new" else "starting",
                rank=w.rank, round=w.round, in_place=w.in_place and w.state != "new", step=w.step, torn=w.torn,
                log=w.slot, fresh=w.fresh, told=w.told, at_once=w.at_once, joined=w.joined,
            )
            for w in node.workers.values()
        ]  # fmt: skip
        if not self.in_place:
            for worker in known:
                worker.in_place = False
                worker.state = "ending" if worker.state == "ending" else "training"
        record = Node(id=node.id, workers=self.range.workers, store=(node.id, node.stores), pid=node.pid)
        self._take(self.machine.node_joined(record, self.now, workers=known, copy=node.copy))
        if node.leaving:
            node.to_machine.append(("leaving", {}))
        for worker in list(node.workers.values()):
            if worker.ended is not None:
                self._report_end(node, worker)

    def kill_node(self, name: str) -> None:
        """The agent dies with its workers."""
        node = self.nodes.pop(name, None)
        if node is None:
            return
        if node.connected and self.machine is not None:
            while node.to_machine and self.chance.random() < 0.5:  # what was sent may still arrive
                self._deliver(node)
            self._take(self.machine.node_lost(name, self.now))

    def leave_node(self, name: str) -> None:
        """The agent gets SIGTERM."""
        node = self.nodes.get(name)
        if node is not None and not node.leaving:
            node.leaving = True
            node.to_machine.append(("leaving", {}))
            if not self.in_place:
                for worker in list(node.workers.values()):
                    self.end(worker, -15)

    def _report_end(self, node: SimNode, worker: SimWorker) -> None:
        assert worker.ended is not None
        code, message = worker.ended
        node.to_machine.append(
            ("exited", {"slot": worker.slot, "spawn": worker.spawn, "code": code, "message": message})
        )
        del node.workers[worker.slot]

    def end(self, worker: SimWorker, code: int, message: str = "") -> None:
        """A process ends."""
        node = self.nodes[worker.node]
        if worker.ended is None:
            worker.ended = (code, message)
            if node.connected:
                self._report_end(node, worker)

    def _say(self, worker: SimWorker, kind: str, **details: Any) -> None:
        node = self.nodes[worker.node]
        if node.connected:
            node.to_machine.append((kind, {"slot": worker.slot, "spawn": worker.spawn, **details}))

    def _deliver(self, node: SimNode) -> None:
        """One message of a node arrives."""
        kind, details = node.to_machine.popleft()
        machine, now = self.machine, self.now
        assert machine is not None
        if kind == "store":
            self._take(machine.node_store(node.id, details["store"], now))
        elif kind == "leaving":
            self._take(machine.node_leaving(node.id, now))
        elif kind == "joined":
            machine.worker_joined(node.id, details["slot"], details["spawn"], details["round"])
        else:
            handler = getattr(machine, f"worker_{kind}")
            times = 2 if self.chance.random() < 0.1 else 1  # told twice
            for _ in range(times):
                arguments = {k: v for k, v in details.items() if k not in ("slot", "spawn", "step", "node")}
                if kind == "finished":
                    self._take(handler(node.id, details["slot"], details["spawn"], details["step"], now))
                elif kind == "ready":
                    self._take(
                        handler(
                            node.id, details["slot"], details["spawn"], now, step=details["step"], **arguments
                        )
                    )
                else:
                    self._take(handler(node.id, details["slot"], details["spawn"], now, **arguments))

    def _obey(self, node: SimNode) -> None:
        """A node does what one message asks."""
        action, node.copy = node.to_node.popleft()
        workers = node.workers
        match action:
            case act.Start():
                self._new_store(node)
                for place in action.places:
                    worker = SimWorker(node.id, place.slot, place.spawn, self.in_place)
                    if self.in_place:
                        worker.state = "new"
                    else:
                        worker.state, worker.joined = "training", True
                        worker.step = self.plain_saved
                    worker.rank, worker.round, worker.world = place.rank, action.round, place.world_size
                    if self.in_place:
                        worker.rank, worker.round = -1, -1
                    workers[place.slot] = worker
            case act.Change():
                for slot in action.slots:
                    if (w := workers.get(slot)) and w.ended is None:
                        w.told = max(w.told, action.round)
                        w.at_once = w.at_once or not action.planned
            case act.Go():
                self._new_store(node)
                for place in action.places:
                    w = workers.get(place.slot)
                    if w is None or w.spawn != place.spawn or w.ended is not None or w.told > action.round:
                        continue
                    assert w.state == "ready", f"a place for a worker that is {w.state}"
                    if 0 <= w.rank < place.world_size and not w.fresh and w.round == action.round - 1:
                        assert place.rank == w.rank, "a survivor keeps its rank"
                    w.rank, w.round, w.world, w.source = (
                        place.rank,
                        action.round,
                        place.world_size,
                        action.source,
                    )
                    w.state, w.joined, w.at_once = "training", False, False
            case act.Leave() | act.Release():
                for slot in action.slots:
                    if w := workers.get(slot):
                        w.state = "ending" if isinstance(action, act.Leave) else w.state
                        self.end(w, 0)
            case act.Stop():
                for slot in action.slots:
                    if w := workers.get(slot):
                        w.state = "ending"
            case act.Kill():
                for slot in action.slots:
                    if w := workers.get(slot):
                        self.end(w, -9)
            case act.Dismiss():
                node.leaving = True
                for w in list(workers.values()):
                    self.end(w, -15)
                self.kill_node(node.id)

    def _new_store(self, node: SimNode) -> None:
        node.stores += 1
        node.to_machine.append(("store", {"store": (node.id, node.stores)}))

    # --- workers -----------------------------------------------------------------------------------------------

    def live(self) -> list[SimWorker]:
        return [w for n in self.nodes.values() for w in n.workers.values() if w.ended is None]

    def _work(self, worker: SimWorker) -> None:
        """A worker does what it does next."""
        if worker.hung:
            return
        if worker.state == "ending":
            self.end(worker, self.chance.choice([-15, -15, 143, 0, 1, -9]))
            return
        if worker.state == "new":
            worker.state = "starting"
            self._say(worker, "hello")
        elif worker.state == "starting" or (
            worker.state in ("training", "finished") and worker.told > worker.round and worker.at_once
        ):
            if worker.joined and worker.state == "training" and self.chance.random() < 0.1:
                worker.torn = True
            self._ready(worker)
        elif worker.state == "training" and worker.joined and worker.step >= self.total:
            worker.state = "finished"
            if self.in_place:
                self._say(worker, "finished", step=worker.step)
            else:
                self.end(worker, 0)
        elif worker.state == "training":
            peers = [
                w for w in self.live() if w.round == worker.round and w.state in ("training", "finished")
            ]
            if len(peers) < worker.world:
                return  # It waits in a collective for somebody who is not there.
            if not worker.joined:
                self._join(worker, peers)
            elif all(w.joined for w in peers) and not any(w.hung for w in peers):
                self._train(worker, peers)

    def _join(self, worker: SimWorker, peers: list[SimWorker]) -> None:
        if worker.source >= 0:
            source = next(w for w in peers if w.rank == worker.source)
            assert not source.fresh
            assert not source.torn
            assert source.step >= worker.step or worker.torn, "the furthest one gives its state"
            worker.step = source.step
        worker.joined, worker.fresh, worker.torn = True, False, False
        self._say(worker, "joined", round=worker.round)

    def _train(self, worker: SimWorker, peers: list[SimWorker]) -> None:
        """One step of the whole round; the planned change is agreed on in its reduction."""
        if len({w.step for w in peers}) != 1:
            return
        agreed = any(w.told > w.round for w in peers)
        for peer in peers:
            peer.step += 1
            self.highest = max(self.highest, peer.step)
        if not self.in_place and worker.step % 10 == 0:
            self.plain_saved = worker.step
        if self.machine is not None:
            self.machine.progressed(worker.step, worker.round)
        if agreed:
            for peer in peers:
                self._ready(peer)

    def _ready(self, worker: SimWorker) -> None:
        worker.state = "ready"
        self._say(worker, "ready", step=worker.step, torn=worker.torn, fresh=worker.fresh,
                  round=worker.round, told=worker.told)  # fmt: skip

    # --- time --------------------------------------------------------------------------------------------------

    def run(self, turns: int, *, quiet: bool = False) -> None:
        """Let `turns` things happen in a random order; nothing bad if `quiet`."""
        if quiet:
            self.unhang()
        for _ in range(turns):
            if self.done is not None:
                return
            self.turn()
            if not quiet:
                self.trouble()

    def turn(self) -> None:
        """One thing happens."""
        self.now += self.chance.choice([0.001, 0.01, 0.1])
        for name in self.wanted:
            if name not in self.nodes and self.machine is not None and self.chance.random() < 0.2:
                self.spawn_node(name)
        things: list[Any] = [("tick", None)]
        for node in self.nodes.values():
            if not node.connected:
                things.append(("connect", node))
            if node.connected and node.to_machine:
                things.append(("deliver", node))
            if node.to_node:
                things.append(("obey", node))
            elif node.leaving and not node.workers and not node.to_machine:
                things.append(("end", node))
        things += [("work", worker) for worker in self.live()]
        what, subject = self.chance.choice(things)
        if what == "tick" and self.machine is not None:
            self._take(self.machine.tick(self.now))
        elif what == "connect":
            self.connect(subject)
        elif what == "deliver":
            self._deliver(subject)
        elif what == "obey":
            self._obey(subject)
        elif what == "end":
            self.kill_node(subject.id)
        elif what == "work":
            self._work(subject)

    def trouble(self) -> None:
        """Perhaps something bad happens."""
        if self.chance.random() > 0.02:
            return
        live = self.live()
        what = self.chance.choice(
            [
                "worker",
                "worker",
                "node",
                "leave",
                "coordinator",
                "scale",
                "cut",
                "again",
                "broken",
                "unmet",
                "hang",
            ]
        )
        if what == "worker" and live:
            self.end(self.chance.choice(live), -9)
        elif what == "broken" and live and self.highest < self.total:
            # When others have ended well already, a broken connection means that they ended too early.
            self.end(self.chance.choice(live), 1, BROKEN)
        elif what == "unmet" and self.in_place:
            for worker in live:
                if worker.state == "training" and not worker.joined and not worker.hung:
                    self._ready(worker)  # The store is lost, or a peer does not answer.
                    break
        elif what == "hang" and live:
            self.chance.choice(live).hung = True
            if self.chance.random() < 0.7:
                self.end(self.chance.choice(live), -9)
        elif what == "node" and self.nodes:
            self.kill_node(self.chance.choice(list(self.nodes)))
        elif what == "leave" and self.nodes:
            self.leave_node(self.chance.choice(list(self.nodes)))
        elif what == "coordinator":
            self.new_coordinator()
        elif what == "cut" and self.nodes and self.machine is not None:
            node = self.chance.choice(list(self.nodes.values()))
            if node.connected:
                self._cut(node)
                self._take(self.machine.node_lost(node.id, self.now))
        elif what == "again" and self.nodes and self.machine is not None:
            node = self.chance.choice(list(self.nodes.values()))
            if node.connected:  # It connects again before the end of its old connection is seen.
                self._cut(node)
                if node.id in self.nodes:
                    self.connect(node)
        elif what == "scale" and self.machine is not None and not self.machine.taking_over:
            sizes = [size * self.range.workers for size in self.range.sizes or ()]
            desired = self.chance.choice(sizes or range(self.machine.minimum, self.machine.maximum + 1))
            self._take(self.machine.scale(desired, self.now))

    def unhang(self) -> None:
        """Whoever watches for hangs kills those that sit in a collective for ever; the machine does so with others."""
        for worker in self.live():
            if worker.hung and (
                worker.joined or worker.state == "starting" or worker.state == "new" or not self.in_place
            ):
                self.end(worker, -9, "killed by the watch")


def _kept(copy: dict[str, Any] | None) -> dict[str, Any]:
    """What of a copy is told again when it changes: not the steps, and not how long somebody is left out."""
    if not copy:
        return {}
    budget, losses = {**copy["budget"], "step": 0}, sorted(copy["losses"]["excluded"])
    return {**copy, "budget": budget, "losses": losses, "round_of_step": 0}
