"""The coordinator without its socket: real messages in, real messages out, over a transport in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from elastic_runtime.jobs.nodes import parse_nodes
from elastic_runtime.membership.machine import Membership
from elastic_runtime.membership.service import Service
from elastic_runtime.membership.session import Peer


class Wire:
    """Connections that keep what was sent, as JSON would give it back."""

    def __init__(self) -> None:
        self.sent: dict[int, list[dict[str, Any]]] = {}
        self.heard: dict[int, float] = {}
        self.closing: list[int] = []
        self.counters: Mapping[str, int] = {
            "accepted": 3,
            "opened": 2,
            "wrong secret": 1,
            "eof": 4,
            "closed": 1,
        }

    def send(self, connection: int, message: Mapping[str, Any]) -> bool:
        if connection not in self.sent or connection in self.closing:
            return False
        self.sent[connection].append(json.loads(json.dumps(message, allow_nan=False)))
        return True

    def close(self, connection: int) -> None:
        self.closing.append(connection)

    def last_heard(self, connection: int) -> float | None:
        return self.heard.get(connection)


class Office:
    """A service with its clients."""

    def __init__(self, nodes: str = "1:2", workers: int = 1, *, term: int = 1, **options: Any) -> None:
        self.now = 100.0
        self.wire = Wire()
        machine = Membership(parse_nodes(nodes, workers), max_restarts=3, now=self.now, term=term)
        self.service = Service(machine, name="job", clock=lambda: self.now, **options)
        self.service.attach(self.wire)
        self._next = 0
        self.supervisor = self.open("supervisor")
        self.service.tick()

    @property
    def machine(self) -> Membership:
        return self.service.machine

    def open(self, role: str) -> int:
        self._next += 1
        self.wire.sent[self._next] = []
        self.wire.heard[self._next] = self.now
        self.service.on_open(self._next, Peer(role=role, info={}))
        return self._next

    def say(self, connection: int, kind: str, **fields: Any) -> list[dict[str, Any]]:
        """Send a message; return what came back on the same connection."""
        before = len(self.wire.sent[connection])
        self.wire.heard[connection] = self.now
        self.service.on_message(connection, {"kind": kind, **fields})
        self.drop_closed()
        return self.wire.sent[connection][before:]

    def drop_closed(self) -> None:
        while self.wire.closing:
            closed = self.wire.closing[0]
            self.service.on_close(closed, "closed")
            self.wire.closing.pop(0)

    def agent(self, node: str, **fields: Any) -> int:
        connection = self.open("agent")
        self.say(connection, "join", **self.join(node, **fields))
        return connection

    def join(self, node: str, **fields: Any) -> dict[str, Any]:
        workers = self.machine.nodes.workers
        return {"node": node, "pid": 7, "host": "here", "workers": workers, "fingerprint": {"torch": "2"},
                "store": ["127.0.0.1", 1000 + len(self.wire.sent)], "running": [], "copy": None, **fields}  # fmt: skip

    def of(self, connection: int, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.wire.sent[connection] if message["kind"] == kind]

    def told(self, event: str) -> list[str]:
        return [m["text"] for m in self.of(self.supervisor, "event") if m["event"] == event]

    def pass_time(self, seconds: float, *, beats: bool = True) -> None:
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += 0.5
            self.service.tick()
            if beats:
                self.service.beat()
            self.drop_closed()


def running(nodes: str = "1:2", workers: int = 1, **options: Any) -> tuple[Office, list[int]]:
    """A job that trains in place on all its nodes."""
    office = Office(nodes, workers, **options)
    agents = [office.agent(str(number)) for number in range(office.machine.nodes.maximum)]
    for agent in agents:
        (start,) = office.of(agent, "start")
        for place in start["places"]:
            who = {"slot": place["slot"], "spawn": place["spawn"]}
            office.say(agent, "started", **who, pid=1000 + place["rank"])
            office.say(agent, "hello", **who)
            office.say(agent, "store", store=["127.0.0.1", 2000 + agent])
            office.say(agent, "ready", **who, step=0, torn=False, fresh=True, round=-1, told=-1)
    for agent in agents:
        (go,) = office.of(agent, "go")
        for place in go["places"]:
            office.say(agent, "joined", slot=place["slot"], spawn=place["spawn"], round=go["round"])
        office.say(agent, "store", store=["127.0.0.1", 3000 + agent])
    assert office.machine.phase == "running"
    assert office.machine.in_place
    return office, agents


def who(office: Office, agent: int) -> dict[str, int]:
    place = office.of(agent, "start")[-1]["places"][0]
    return {"slot": place["slot"], "spawn": place["spawn"]}


def come_back(office: Office, agent: int, told: int) -> None:
    """The worker of a survivor is ready for the next round."""
    office.say(
        agent, "ready", **who(office, agent), step=3, torn=False, fresh=False, round=told - 1, told=told
    )


def snapshot(office: Office) -> Any:
    machine = office.machine
    return (
        machine.copy(office.now - 1), machine.phase, [vars(w) | {} for w in machine.workers()],
        [vars(n) | {} for n in machine.connected()], machine.state,
    )  # fmt: skip


# --- the way of a job ------------------------------------------------------------------------------------------------


def test_a_job_from_its_first_word_to_the_last() -> None:
    office, agents = running()
    supervisor = office.wire.sent[office.supervisor]
    assert supervisor[0] == {"kind": "welcome", "term": 1}
    assert office.of(office.supervisor, "wanted") == [{"kind": "wanted", "nodes": ["0", "1"]}]
    assert office.told("round") == ["round 0: 2 workers on 2 nodes"]
    for agent in agents:
        assert office.wire.sent[agent][0] == {"kind": "welcome", "term": 1}
        (go,) = office.of(agent, "go")
        assert (go["round"], go["term"], go["source"]) == (0, 1, -1)
        assert go["store"] == office.of(agents[0], "go")[0]["store"], "one store for all"
    for agent in agents:
        office.say(agent, "finished", **who(office, agent), step=9)
    for agent in agents:
        (release,) = office.of(agent, "release")
        assert release["slots"] == [0]
        assert release["copy"]["finishing"], (
            "who is released knows that it was, also when the coordinator dies now"
        )
    for agent in agents:
        office.say(agent, "exited", **who(office, agent), code=0, message="", step=0, round=-1)
    assert office.of(office.supervisor, "done") == [
        {"kind": "done", "state": "succeeded", "reason": "every worker ended with exit code 0"}
    ]
    assert office.service.done is not None
    late = office.open("supervisor")
    assert [m["kind"] for m in office.wire.sent[late]] == ["welcome", "wanted", "state", "done"]
    again = office.agent("0")
    assert office.of(again, "dismiss") == [{"kind": "dismiss", "reason": "the job is over"}]


def test_a_supervisor_that_connects_later_hears_what_is_wanted() -> None:
    office, _ = running()
    later = office.open("supervisor")
    assert office.wire.sent[later] == [
        {"kind": "welcome", "term": 1}, {"kind": "wanted", "nodes": ["0", "1"]},
        {"kind": "state", "round": 0, "restarts": 0, "phase": "running", "world_size": 2, "term": 1},
    ]  # fmt: skip
    assert office.say(later, "ping") == [{"kind": "pong"}]


def test_progress_and_the_end_of_a_worker_carry_the_step() -> None:
    office, agents = running()
    office.say(office.supervisor, "progress", step=5, round=0)
    assert office.service.status()["global_step"] == 5
    office.say(
        agents[0], "exited", **who(office, agents[0]), code=1, message="ValueError: x", step=8, round=0
    )
    assert office.told("worker_failed") == ["rank 0 on node 0: ValueError: x after step 8"]
    come_back(office, agents[1], 1)
    assert office.service.status()["restarts"] == 1


def test_stop_ends_the_job() -> None:
    office, agents = running()
    office.say(office.supervisor, "stop", reason="Ctrl-C")
    assert office.of(office.supervisor, "done") == [{"kind": "done", "state": "stopped", "reason": "Ctrl-C"}]
    for agent in agents:
        assert office.of(agent, "dismiss") == [{"kind": "dismiss", "reason": "job stopped"}]


def test_a_lost_agent_is_told_with_its_round_and_why() -> None:
    office, agents = running("1:3")
    office.service.on_close(agents[1], "eof")
    office.service.on_close(agents[2], "slow reader")
    assert office.told("node_lost") == [
        "node 1 lost: its agent is gone", "node 2 lost: its agent is gone (slow reader)"
    ]  # fmt: skip
    events = [m["details"] for m in office.of(office.supervisor, "event") if m["event"] == "node_lost"]
    assert events[0] == {"node": "1", "round": 0, "member": True}
    assert office.of(agents[0], "change")[0] == {"kind": "change", "round": 1, "planned": False, "slots": [0]}


def test_a_leaving_agent_is_told_once_and_its_loss_is_no_news() -> None:
    office, agents = running()
    office.say(agents[0], "leaving", signal="SIGTERM")
    assert office.told("node_leaving") == ["node 0 leaves: SIGTERM received"]
    office.service.on_close(agents[0], "eof")
    assert office.told("node_lost") == []


def test_a_newer_connection_of_a_node_replaces_the_older_one() -> None:
    office, agents = running()
    again = office.open("agent")
    office.say(again, "join", **office.join("1"))
    office.service.on_close(agents[1], "eof")  # Its end is seen late, and is no loss of the node.
    assert {node.id for node in office.machine.connected()} == {"0", "1"}
    assert office.say(agents[1], "pong") == []
    come_back(office, agents[0], 1)
    (start,) = office.of(again, "start")
    assert start["places"][0]["slot"] == 0


# --- nonsense --------------------------------------------------------------------------------------------------------

READY = {"slot": 0, "step": 3, "torn": False, "fresh": False, "round": 0, "told": 0}
NONSENSE: list[tuple[str, dict[str, Any], str]] = [
    ("dance", {}, "an agent says no such thing"),
    ("", {}, "an agent says no such thing"),
    ("ready", {}, "slot None: takes a whole number from 0"),
    ("ready", {**READY, "slot": "0"}, "slot '0': takes a whole number from 0"),
    ("ready", {**READY, "slot": True}, "slot True: takes a whole number from 0"),
    ("ready", {**READY, "slot": 0.0}, "slot 0.0: takes a whole number from 0"),
    ("ready", {**READY, "step": -1}, "step -1: takes a whole number from 0"),
    ("ready", {**READY, "step": 1e300}, "step 1e+300: takes a whole number from 0"),
    ("ready", {**READY, "step": 1 << 70}, f"step {1 << 70}: takes a whole number from 0"),
    ("ready", {**READY, "torn": 1}, "torn 1: takes true or false"),
    ("ready", {**READY, "fresh": None}, "fresh None: takes true or false"),
    ("ready", {**READY, "told": []}, "told []: takes a whole number from -1"),
    ("joined", {"slot": 0, "round": -5}, "round -5: takes a whole number from 0"),
    ("finished", {"slot": 0, "step": None}, "step None: takes a whole number from 0"),
    ("started", {"slot": 0, "pid": "7"}, "pid '7': takes a whole number from 0"),
    ("exited", {"slot": 0, "code": "1", "step": 9, "round": 0}, "code '1': takes a whole number from -65536"),
    ("exited", {"slot": 0, "code": 1, "step": "9", "round": 0}, "step '9': takes a whole number from 0"),
    ("exited", {"slot": 0, "code": 1, "step": 99, "round": 0, "message": 5}, "message 5: takes a text"),
    ("store", {"store": "here"}, "store 'here': takes host and port, or null"),
    ("store", {"store": ["here"]}, "store ['here']: takes host and port, or null"),
    ("store", {"store": ["here", 70000]}, "store ['here', 70000]: takes host and port, or null"),
    ("store", {"store": ["here", "1"]}, "store ['here', '1']: takes host and port, or null"),
    ("leaving", {}, "signal None: takes a text"),
    ("store_lost", {"how": 3}, "how 3: takes a text"),
    ("join", {}, "this agent has joined as node 0"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields", "why"), NONSENSE)
def test_nonsense_of_an_agent_ends_its_connection_and_changes_nothing_else(
    kind: str, fields: dict[str, Any], why: str
) -> None:
    office, agents = running()
    spawn = who(office, agents[0])["spawn"]
    before = snapshot(office)
    office.service.on_message(agents[0], {"kind": kind, "spawn": spawn, **fields})
    assert snapshot(office) == before, "nothing was half done"
    assert office.wire.closing == [agents[0]]
    assert office.told("bad_message") == [f"a message {kind!r} of agent makes no sense: {why}"]
    office.drop_closed()
    assert office.told("node_lost") == ["node 0 lost: its agent is gone (closed)"]
    assert office.service.status()["restarts"] == 0


@pytest.mark.parametrize("message", [{}, {"kind": None}, {"kind": 7}, {"kind": ["ready"]}])
def test_a_message_without_a_kind_is_nonsense_of_everybody(message: dict[str, Any]) -> None:
    for role in ("agent", "supervisor", "control"):
        office = Office()
        client = office.open(role)
        office.service.on_message(client, message)
        assert office.wire.closing == [client]


@pytest.mark.parametrize("kind", ["store", "ready", "exited", "leaving", "started", "dance"])
def test_an_agent_has_to_join_first(kind: str) -> None:
    office = Office()
    agent = office.open("agent")
    office.say(agent, kind, slot=0, spawn=1, store=None, signal="SIGTERM")
    assert office.told("bad_message") == [
        f"a message {kind!r} of agent makes no sense: an agent has to join first"
    ]
    assert office.told("node_lost") == []


WORKER = {"slot": 0, "spawn": 9, "state": "training", "rank": 0, "round": 0, "in_place": True, "step": 3, "torn": False,
          "fresh": False, "told": 0, "at_once": False, "joined": True, "pid": 5, "log": 0}  # fmt: skip
COPY = {"term": 0, "round": 0, "world_size": 1, "in_place": True, "finishing": False, "desired": 2, "fingerprint": None,
        "budget": {"used": 0, "step": 0, "last": None, "repeats": 0, "step_at_failure": -1},
        "losses": {"excluded": {}, "exclusions": {}}, "round_of_step": 0}  # fmt: skip
JOINS: list[tuple[dict[str, Any], str]] = [
    ({"node": 3}, "node 3: takes a text"),
    ({"node": ""}, "node '': takes a name"),
    ({"workers": 2}, "node 0 has room for 2 workers, not 1"),
    ({"workers": None}, "workers None: takes a whole number from 0"),
    ({"host": None}, "host None: takes a text"),
    ({"store": [1, 2]}, "store [1, 2]: takes host and port, or null"),
    ({"fingerprint": [1]}, "fingerprint [1]: takes an object, or null"),
    ({"running": None}, "running None: takes a list of workers"),
    ({"running": [7]}, "running: 7 is no worker"),
    ({"running": [{**WORKER, "slot": 1}]}, "slot 1: a node has 1 workers"),
    ({"running": [{**WORKER, "state": "asleep"}]},
     "state 'asleep': takes starting, ready, training, finished, ending"),
    ({"running": [{**WORKER, "rank": None}]}, "rank None: takes a whole number from -1"),
    ({"running": [{key: WORKER[key] for key in WORKER if key != "told"}]}, "told None: takes a whole number from -1"),
    ({"running": [WORKER, WORKER]}, "running: two workers in one slot"),
    ({"copy": []}, "copy []: takes an object"),
    ({"copy": {}}, "term None of copy: is no such value"),
    ({"copy": {**COPY, "desired": "2"}}, "desired '2' of copy: is no such value"),
    ({"copy": {**COPY, "extra": 1}}, "'extra' of copy: no such field"),
    ({"copy": {**COPY, "budget": None}}, "budget None: takes an object"),
    ({"copy": {**COPY, "budget": {**COPY["budget"], "used": True}}}, "used True of budget: is no such value"),  # type: ignore[dict-item]
    ({"copy": {**COPY, "budget": {**COPY["budget"], "last": {"node": "0"}}}}, "rank None of last: is no such value"),  # type: ignore[dict-item]
    ({"copy": {**COPY, "losses": {"excluded": {"1": "x"}, "exclusions": {}}}},
     "losses {'excluded': {'1': 'x'}, 'exclusions': {}}: takes excluded and exclusions, numbers by node"),
    ({"copy": {**COPY, "losses": 3}}, "losses 3: takes excluded and exclusions, numbers by node"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "why"), JOINS)
def test_a_join_that_makes_no_sense_is_refused_as_a_whole(fields: dict[str, Any], why: str) -> None:
    office = Office(term=2)
    before = snapshot(office)
    agent = office.open("agent")
    office.say(agent, "join", **{**office.join("0"), **fields})
    assert office.told("bad_message") == [f"a message 'join' of agent makes no sense: {why}"]
    assert snapshot(office) == before
    assert agent in office.wire.sent
    assert office.machine.connected() == []
    office.agent("0", running=[WORKER], copy={**COPY, "term": 1})
    assert [node.id for node in office.machine.connected()] == ["0"], "one that makes sense is taken"
    assert [worker.spawn for worker in office.machine.workers()] == [9]


@pytest.mark.parametrize(
    ("role", "kind", "fields", "why"),
    [
        ("supervisor", "dance", {}, "a supervisor says no such thing"),
        ("supervisor", "progress", {"step": "x", "round": 0}, "step 'x': takes a whole number from 0"),
        ("supervisor", "stop", {}, "reason None: takes a text"),
        ("control", "dance", {}, "the command line says no such thing"),
        ("control", "scale", {}, "workers None: takes a whole number from 0"),
        ("control", "scale", {"workers": "2"}, "workers '2': takes a whole number from 0"),
    ],
)
def test_nonsense_of_the_others_ends_their_connection(
    role: str, kind: str, fields: dict[str, Any], why: str
) -> None:
    office, _ = running()
    client = office.open(role)
    before = snapshot(office)
    office.service.on_message(client, {"kind": kind, **fields})
    assert office.wire.closing == [client]
    assert office.told("bad_message") == [f"a message {kind!r} of {role} makes no sense: {why}"]
    assert snapshot(office) == before


def test_late_words_about_a_worker_that_is_gone_are_no_nonsense() -> None:
    office, agents = running()
    old = who(office, agents[0])
    office.say(agents[0], "exited", **old, code=-9, message="", step=0, round=-1)
    come_back(office, agents[1], 1)
    assert who(office, agents[0])["spawn"] != old["spawn"]
    for kind, fields in [("ready", READY), ("joined", {"round": 0}), ("finished", {"step": 3}), ("hello", {}),
                         ("exited", {"code": 1, "step": 0, "round": -1}), ("started", {"pid": 3})]:  # fmt: skip
        office.say(agents[0], kind, **{**fields, **old})
    assert office.told("bad_message") == []
    assert office.service.status()["restarts"] == 1


# --- control ---------------------------------------------------------------------------------------------------------


def test_scale_answers_and_is_told() -> None:
    office, agents = running("1:3")
    control = office.open("control")
    assert office.say(control, "scale", workers=2) == [{"kind": "scaled", "desired": 2}]
    assert office.told("scale") == ["desired size 2 workers (was 3)"]
    assert all(office.of(agent, "change")[-1]["planned"] for agent in agents)
    assert office.say(control, "scale", workers=2) == [{"kind": "scaled", "desired": 2}]
    assert len(office.told("scale")) == 1


@pytest.mark.parametrize(
    ("nodes", "per_node", "workers", "text"),
    [
        ("1:3", 1, 4, "4 workers: this job may have from 1 to 3 workers"),
        ("2:3", 1, 1, "1 workers: this job may have from 2 to 3 workers"),
        ("1:3", 1, 0, "0 workers: this job may have from 1 to 3 workers"),
        ("1,2,4", 1, 3, "3 workers: this job may have 1, 2, 4 workers"),
        ("1,2", 2, 3, "3 workers: this job may have 2, 4 workers"),
    ],
)
def test_a_size_that_the_job_cannot_have_is_one_clear_error(
    nodes: str, per_node: int, workers: int, text: str
) -> None:
    office = Office(nodes, per_node)
    control = office.open("control")
    assert office.say(control, "scale", workers=workers) == [{"kind": "error", "text": text}]
    assert office.machine.desired == office.machine.maximum
    assert office.wire.closing == []


def test_a_part_of_a_node_is_refused_to_a_program_that_is_started_anew() -> None:
    office = Office("1:2", 2)
    for node in "01":
        office.agent(node)
    assert office.machine.round == 0
    control = office.open("control")
    assert office.say(control, "scale", workers=3) == [
        {"kind": "error", "text": "3 workers: this program is started anew on whole nodes of 2 workers: "
                                  "choose a multiple of 2"}
    ]  # fmt: skip
    assert office.say(control, "scale", workers=2) == [{"kind": "scaled", "desired": 2}]
    in_place, _ = running("1:2", 2)
    assert in_place.say(in_place.open("control"), "scale", workers=3) == [{"kind": "scaled", "desired": 3}]


def test_a_coordinator_that_is_taking_over_asks_to_be_asked_again() -> None:
    office = Office("1:3", term=2)
    control = office.open("control")
    (answer,) = office.say(control, "scale", workers=2)
    assert (answer["kind"], answer["taking_over"]) == ("error", True)
    assert office.say(control, "status")[0]["taking_over"] is True
    office.agent("0", copy={**COPY, "term": 1, "desired": 3, "world_size": 1}, running=[WORKER])
    assert office.say(control, "scale", workers=2) == [{"kind": "scaled", "desired": 2}]


def test_the_status_document() -> None:
    office, agents = running("1:3")
    office.say(office.supervisor, "progress", step=12, round=0)
    control = office.open("control")
    (status,) = office.say(control, "status")
    coordinator = status.pop("coordinator")
    assert set(coordinator) == {"host", "pid"}
    nodes = status.pop("nodes")
    assert status == {
        "kind": "status", "name": "job", "state": "running", "taking_over": False, "global_step": 12, "world_size": 3,
        "min": 1, "max": 3, "desired": 3, "restarts": 0, "max_restarts": 3, "term": 1, "round": 0, "in_place": True,
        "refused": {"wrong secret": 1},
    }  # fmt: skip
    assert nodes[1] == {
        "id": "1", "host": "here", "agent_pid": 7,
        "workers": [{"rank": 1, "pid": 1001, "state": "training", "step": 0}],
    }  # fmt: skip
    office.service.on_close(agents[2], "eof")
    (status,) = office.say(control, "status")
    assert (status["state"], [node["id"] for node in status["nodes"]]) == ("recovering", ["0", "1"])


@pytest.mark.parametrize(("term", "state"), [(1, "pending"), (2, "recovering")])
def test_the_state_before_anybody_is_there(term: int, state: str) -> None:
    office = Office(term=term)
    assert office.service.status()["state"] == state
    assert office.service.status()["nodes"] == []


# --- time ------------------------------------------------------------------------------------------------------------


def test_an_agent_that_says_nothing_is_given_up_and_told_apart_from_one_that_ended() -> None:
    office, agents = running(heartbeat=5.0)
    office.pass_time(4.5)
    assert office.of(office.supervisor, "silent") == []
    for _ in range(4):
        office.say(agents[0], "pong")
        office.pass_time(0.5)
    assert office.of(office.supervisor, "silent") == [{"kind": "silent", "node": "1", "pid": 7}]
    assert office.told("node_lost") == ["node 1 lost: its agent said nothing for 5 s"]
    assert [node.id for node in office.machine.connected()] == ["0"]
    assert office.say(agents[1], "pong") == []
    assert office.of(agents[0], "ping")


def test_who_answers_is_never_given_up() -> None:
    office, agents = running(heartbeat=5.0)
    for _ in range(60):
        for agent in agents:
            office.say(agent, "pong")
        office.pass_time(1.0)
    assert office.of(office.supervisor, "silent") == []
    assert len(office.machine.connected()) == 2


@pytest.mark.parametrize("first", ["tick", "beat", "message"])
def test_a_pause_of_the_coordinator_is_not_held_against_the_others(first: str) -> None:
    office, agents = running("1:3", heartbeat=5.0)
    office.service.on_close(agents[2], "eof")
    assert office.machine.phase == "changing"
    office.now += 1000.0  # Far longer than anybody may be silent, or take to come back.
    if first == "tick":
        office.service.tick()
    elif first == "message":
        office.say(agents[0], "pong")
    office.service.beat()
    office.service.tick()
    assert office.of(office.supervisor, "silent") == []
    assert office.told("worker_late") == []
    for agent in agents[:2]:
        office.say(agent, "ready", **who(office, agent), step=3, torn=False, fresh=False, round=0, told=1)
    assert office.machine.phase == "running"
    for agent in agents[:2]:
        office.say(agent, "pong")
    office.pass_time(7)
    assert {m["node"] for m in office.of(office.supervisor, "silent")} == {"0", "1"}, "now it is their own"


# --- what agents keep ------------------------------------------------------------------------------------------------


def copies(office: Office, agent: int) -> list[dict[str, Any]]:
    return [message for message in office.wire.sent[agent] if "copy" in message]


def test_copies_are_told_when_something_changed_and_go_along_with_what_is_told_anyway() -> None:
    office, agents = running()
    assert office.of(agents[1], "start")[0]["copy"]["round"] == 0
    for agent in agents:
        kept = copies(office, agent)
        assert [message["kind"] for message in kept][-2:] == ["start", "copy"], (
            "the last one: it can go on in place"
        )
        assert kept[-1]["copy"] == json.loads(json.dumps(office.machine.copy(office.now)))
    before = [len(copies(office, agent)) for agent in agents]
    for step in range(1, 50):
        office.say(office.supervisor, "progress", step=step, round=0)
        office.pass_time(0.5, beats=False)
    assert [len(copies(office, agent)) for agent in agents] == before, "agents know the steps themselves"
    office.say(office.open("control"), "scale", workers=1)
    for agent, count in zip(agents, before, strict=True):
        (told,) = copies(office, agent)[count:]
        assert (told["kind"], told["copy"]["desired"], told["copy"]["budget"]["step"]) == ("copy", 1, 49)
    for agent in agents:
        come_back(office, agent, 1)
    assert office.of(agents[0], "go")[-1]["copy"]["round"] == 1
    assert copies(office, agents[1])[-1]["kind"] == "copy", (
        "it has no place in that round, and keeps what it is"
    )
    assert copies(office, agents[1])[-1]["copy"]["round"] == 1


def test_a_copy_is_enough_for_another_coordinator() -> None:
    office, agents = running()
    office.say(
        agents[1], "exited", **who(office, agents[1]), code=1, message="ValueError: x", step=8, round=0
    )
    come_back(office, agents[0], 1)
    kept = copies(office, agents[0])[-1]["copy"]
    assert kept["budget"]["used"] == 1
    worker = next(w for w in office.machine.workers() if w.node == "0")
    other = Office(term=2)
    other.agent("0", running=[worker.as_dict()], copy=kept)
    other.pass_time(4)
    assert other.service.status()["restarts"] == 1
    assert other.machine.budget.step == 8
    assert other.service.status()["state"] in ("running", "recovering")
