"""A coordinator of agents that come from other hosts: cables that are cut, its own among them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from elastic_runtime.jobs.nodes import parse_nodes
from elastic_runtime.membership.machine import Membership
from elastic_runtime.membership.members import Node, Worker
from elastic_runtime.membership.service import Service
from elastic_runtime.membership.session import Peer

NAMES = ("amber", "birch-2", "cedar")


class Hosts:
    """A service whose agents obey at once, and answer as long as their cable is whole."""

    def __init__(self, *, wait_limit: float = 600.0) -> None:
        self.now = 100.0
        self.counters: Mapping[str, int] = {}
        self.machine = Membership(
            parse_nodes("2:3", 1), max_restarts=3, now=self.now, managed=False, wait_limit=wait_limit
        )
        self.service = Service(self.machine, name="job", heartbeat=1.0, clock=lambda: self.now)
        self.service.attach(self)
        self.events: list[str] = []
        self.cut: set[str] = set()
        self.workers: dict[str, Worker] = {}
        self.connections: dict[str, int] = {}
        self.sent: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
        self._numbers: dict[int, str] = {}
        self._next = 1
        self.service.on_open(1, Peer(role="supervisor"))
        for name in NAMES:
            self.connect(name)
        self.turns(2)
        assert (self.machine.phase, self.machine.world_size) == ("running", 3)

    # What the service sees of its server.

    def send(self, connection: int, message: Mapping[str, Any]) -> bool:
        found = json.loads(json.dumps(message))
        if connection == 1 and found["kind"] == "event":
            self.events.append(found["event"])
        name = self._numbers.get(connection)
        if name is not None and name not in self.cut and self.connections.get(name) == connection:
            self.sent[name].append(found)
        return True

    def close(self, connection: int) -> None:
        name = self._numbers.pop(connection, None)
        assert name is None or self.connections[name] != connection or name in self.cut, (
            "a message made no sense"
        )

    def last_heard(self, connection: int) -> float | None:
        return None

    # The agents.

    def connect(self, name: str) -> None:
        """Join, or join again, and tell what runs."""
        self._next += 1
        self.connections[name], self._numbers[self._next] = self._next, name
        self.service.on_open(self._next, Peer(role="agent"))
        running = [self.workers[name].as_dict()] if name in self.workers else []
        self._say(name, "join", node=name, pid=7, host=name, workers=1, fingerprint=None, running=running,
                  store=[name, self._next], copy=None)  # fmt: skip

    def _say(self, name: str, kind: str, **fields: Any) -> None:
        self.service.on_message(self.connections[name], {"kind": kind, **fields})

    def obey(self, name: str) -> None:
        """Do what came."""
        while self.sent[name]:
            message = self.sent[name].pop(0)
            worker = self.workers.get(name)
            who = {} if worker is None else {"slot": 0, "spawn": worker.spawn}
            match message["kind"]:
                case "ping":
                    self._say(name, "pong")
                case "start":
                    (place,) = message["places"]
                    self.workers[name] = Worker(node=name, slot=0, spawn=place["spawn"], in_place=True)
                    who = {"slot": 0, "spawn": place["spawn"]}
                    self._say(name, "store", store=[name, int(self.now * 4)])
                    self._say(name, "hello", **who)
                    self._ready(name)
                case "change":
                    assert worker is not None
                    worker.told = message["round"]
                    worker.at_once = not message["planned"]
                    self._ready(name)
                case "go":
                    assert worker is not None
                    (place,) = message["places"]
                    worker.state, worker.rank, worker.round = "training", place["rank"], message["round"]
                    worker.told, worker.at_once, worker.fresh, worker.joined = (
                        worker.round,
                        False,
                        False,
                        True,
                    )
                    self._say(name, "store", store=[name, int(self.now * 4)])
                    self._say(name, "joined", **who, round=worker.round)

    def _ready(self, name: str) -> None:
        worker = self.workers[name]
        worker.state = "ready"
        self._say(name, "ready", slot=0, spawn=worker.spawn, step=worker.step, torn=False, fresh=worker.fresh,
                  round=worker.round, told=worker.told)  # fmt: skip

    def turns(self, seconds: float) -> None:
        """Let time go by: the agents whose cable is whole answer."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += 0.25
            self.service.tick()
            self.service.beat()
            for name in NAMES:
                if name not in self.cut:
                    self.obey(name)


@pytest.fixture
def hosts() -> Hosts:
    """Three hosts that train."""
    return Hosts()


def test_one_cut_host_is_lost_and_comes_back(hosts: Hosts) -> None:
    hosts.cut = {"birch-2"}
    hosts.turns(2)
    assert (hosts.machine.phase, hosts.machine.world_size, hosts.machine.round) == ("running", 2, 1)
    assert hosts.events.count("node_lost") == 1
    hosts.cut = set()
    hosts.connect("birch-2")
    hosts.turns(3)
    assert (hosts.machine.phase, hosts.machine.world_size) == ("running", 3)
    assert sorted(worker.rank for worker in hosts.machine.workers()) == [0, 1, 2]


@pytest.mark.parametrize(
    "how", ["the old connections", "new connections", "new ones after the old ones timed out"]
)
def test_a_coordinator_that_is_cut_off_changes_nothing(hosts: Hosts, how: str) -> None:
    before = hosts.machine.copy(hosts.now)
    hosts.cut = set(NAMES)
    hosts.turns(20)
    assert hosts.events.count("cut_off") == 1
    if how.startswith("new ones"):
        for connection in hosts.connections.values():
            hosts.service.on_close(connection, "timed out")
    hosts.turns(2)
    for name in NAMES:
        hosts.cut -= {name}
        if how != "the old connections":
            hosts.connect(name)
        hosts.turns(1.5)
    hosts.turns(10)
    assert hosts.events.count("node_lost") == 0
    assert hosts.machine.copy(hosts.now) == before
    assert (hosts.machine.phase, len(hosts.machine.workers())) == ("running", 3)


def test_a_worker_that_ended_while_the_coordinator_was_cut_off_ends_the_round(hosts: Hosts) -> None:
    hosts.cut = set(NAMES)
    hosts.turns(5)
    del hosts.workers["cedar"]
    hosts.cut = set()
    for name in NAMES:
        hosts.connect(name)
        hosts.turns(0.5)
    hosts.turns(8)
    assert hosts.machine.round > 0
    assert (hosts.machine.phase, hosts.machine.world_size) == ("running", 3)


def test_the_release_that_did_not_come_is_said_again(hosts: Hosts) -> None:
    for name in NAMES:
        hosts.workers[name].state = "finished"
    hosts.cut = {"cedar"}
    for name in NAMES:
        hosts._say(name, "finished", slot=0, spawn=hosts.workers[name].spawn, step=9)
    assert hosts.machine.phase == "finishing"
    hosts.sent["cedar"].clear()
    hosts.cut = set()
    hosts.connect("cedar")
    assert [message["slots"] for message in hosts.sent["cedar"] if message["kind"] == "release"] == [[0]]


def test_a_job_whose_hosts_are_all_gone_ends() -> None:
    hosts = Hosts(wait_limit=30.0)
    hosts.cut = set(NAMES)
    hosts.turns(29)
    assert hosts.service.done is None
    hosts.turns(5)
    assert hosts.service.done is not None
    assert hosts.service.done.state == "failed"
    assert hosts.service.done.reason.startswith("no agent has been heard for 30 s: this host is cut off")


def test_another_agent_of_the_same_name_is_not_taken_for_the_one_before(hosts: Hosts) -> None:
    worker = hosts.workers["cedar"]
    told = Worker(node="cedar", **worker.as_dict())
    node = Node(id="cedar", workers=1, pid=8, host="cedar", store=("cedar", 5))
    hosts.machine.node_joined(node, hosts.now, workers=[told])
    assert hosts.machine.phase == "changing"
