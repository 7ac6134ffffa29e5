"""The coordinator without its socket: messages of agents, the supervisor and the command line to the machine and back.

Agent to coordinator
    join        node, pid, host, workers, fingerprint, store, running: what already runs, copy: see `Roster.copy`
    store       store: [host, port] of an unused store
    leaving     the agent was told to end
    started     slot, spawn, pid
    hello, ready, joined, finished, exited    slot, spawn and what the methods of `Membership` want; exited has
                the step that was finished last and its round as well
    store_lost  how
    pong        the agent is there
Coordinator to agent
    welcome     term: the first message of every connection
    start       round, store, places; change  round, planned, slots; go  round, term, store, source, places
    leave, release, stop, kill                slots
    dismiss     reason: the agent ends
    copy        what the agent is to keep for a later coordinator; start and go carry it too
    ping
Supervisor to coordinator
    progress    step, round; stop  reason; ping, answered by pong
Coordinator to supervisor
    wanted      nodes: those that should have an agent; event  kind_, text, details; done  state, reason
    state       round, restarts, phase, after each change; silent  node, pid: an agent that no longer answers
Command line to coordinator
    status      answered by a status document; scale  workers, answered by scaled or error
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from elastic_runtime.errors import InputError
from elastic_runtime.membership import actions as act
from elastic_runtime.membership.machine import Membership
from elastic_runtime.membership.members import Node, Worker
from elastic_runtime.membership.session import Peer

__all__ = ["Service", "Transport"]


class Transport(Protocol):
    """What carries the messages; `server.Server` is one."""

    def send(self, connection: int, message: Mapping[str, Any]) -> bool:
        """Send a message; return whether the connection is still there."""

    def close(self, connection: int) -> None:
        """End a connection after what was sent to it."""

    def last_heard(self, connection: int) -> float | None:
        """Return when the last message came."""

    @property
    def counters(self) -> Mapping[str, int]:
        """What happened to connections, by reason."""


class Service:
    """Handler of the server's connections (see `server.Handler`)."""

    def __init__(
        self, machine: Membership, *, name: str, heartbeat: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Lead the job `name`. An agent that says nothing for `heartbeat` seconds is taken for lost."""
        self.machine = machine
        self._name = name
        self._heartbeat = heartbeat
        self._clock = clock
        self._transport: Transport | None = None
        self._roles: dict[int, str] = {}
        self._agents: dict[str, int] = {}
        """Connection of each node."""
        self._nodes: dict[int, str] = {}
        self._wanted: tuple[str, ...] | None = None
        self.done: act.Done | None = None
        self._told_state: dict[str, Any] = {}
        self._copy: dict[str, Any] = {}
        self._last_tick = clock()
        self._paused = 0.0
        """Until when silence is this process's own fault."""

    def attach(self, transport: Transport) -> None:
        """Use `transport` from now on."""
        self._transport = transport

    # --- connections -------------------------------------------------------------------------------------------

    def on_open(self, connection: int, peer: Peer) -> None:
        """A client has proved itself."""
        self._roles[connection] = peer.role
        self._send(connection, {"kind": "welcome", "term": self.machine.term})
        if peer.role == "supervisor":
            if self._wanted is not None:
                self._send(connection, {"kind": "wanted", "nodes": list(self._wanted)})
            self._send(connection, {"kind": "state", **self._state()})
            if self.done is not None:
                self._send(connection, {"kind": "done", "state": self.done.state, "reason": self.done.reason})

    def on_message(self, connection: int, message: dict[str, Any]) -> None:
        """An authentic message came; one that makes no sense ends the connection."""
        role = self._roles.get(connection)
        try:
            if role == "agent":
                self._on_agent(connection, message)
            elif role == "supervisor":
                self._on_supervisor(connection, message)
            else:
                self._on_control(connection, message)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            kind = message.get("kind")
            self._tell_all({"kind": "event", "event": "bad_message", "details": {},
                            "text": f"a message {kind!r} of {role} makes no sense: {error!r}"})  # fmt: skip
            assert self._transport is not None
            self._transport.close(connection)

    def on_close(self, connection: int, why: str) -> None:
        """The connection is gone."""
        role = self._roles.pop(connection, None)
        node = self._nodes.pop(connection, None)
        if role == "agent" and node is not None and self._agents.get(node) == connection:
            del self._agents[node]
            self._lose(node, f"its agent is gone ({why})" if why != "eof" else "its agent is gone")

    def _lose(self, node: str, how: str) -> None:
        known = self.machine.node(node)
        if known is None:
            return
        if self.machine.phase != "done" and not known.leaving:
            self._event("node_lost", f"node {node} lost: {how}", node=node, **self._concerns(node))
        self._do(self.machine.node_lost(node, self._clock()))

    # --- agents ------------------------------------------------------------------------------------------------

    def _on_agent(self, connection: int, message: dict[str, Any]) -> None:
        kind, now = message["kind"], self._clock()
        if kind == "pong":
            return
        if kind == "join":
            self._join(connection, message, now)
            return
        node = self._nodes.get(connection)
        if node is None:
            raise ValueError("an agent has to join first")
        machine = self.machine
        if kind == "store":
            self._do(machine.node_store(node, _address(message["store"]), now))
        elif kind == "leaving":
            if machine.phase != "done":
                text = f"node {node} leaves: {message['signal']} received"
                self._event("node_leaving", text, node=node, **self._concerns(node))
            self._do(machine.node_leaving(node, now))
        elif kind == "store_lost":
            text = f"the store host of node {node} {message['how']}"
            ends = not machine.in_place and machine.phase == "running" and machine.is_meeting
            self._event("store_lost", text, node=node, round=machine.round, member=ends)
            self._do(machine.store_lost(node, str(message["how"]), now))
        else:
            slot, spawn = int(message["slot"]), int(message["spawn"])
            if kind == "started":
                machine.worker_started(node, slot, spawn, int(message["pid"]))
            elif kind == "hello":
                self._do(machine.worker_hello(node, slot, spawn, now))
            elif kind == "ready":
                self._do(
                    machine.worker_ready(
                        node, slot, spawn, now, step=int(message["step"]), torn=bool(message["torn"]),
                        fresh=bool(message["fresh"]), round=int(message["round"]), told=int(message["told"]),
                    )
                )  # fmt: skip
            elif kind == "joined":
                machine.worker_joined(node, slot, spawn, int(message["round"]))
            elif kind == "finished":
                self._do(machine.worker_finished(node, slot, spawn, int(message["step"]), now))
            elif kind == "exited":
                code, text = int(message["code"]), str(message.get("message", ""))
                if int(message["round"]) >= 0:
                    machine.progressed(int(message["step"]), int(message["round"]))
                self._do(machine.worker_exited(node, slot, spawn, now, code=code, message=text))
            else:
                raise ValueError("an agent says no such thing")

    def _concerns(self, node: str) -> dict[str, Any]:
        """Say in which round the loss of a node falls, and whether it had workers there."""
        machine = self.machine
        member = any(w.node == node and w.rank >= 0 and w.round == machine.round for w in machine.workers())
        return {"round": machine.round, "member": member}

    def _join(self, connection: int, message: dict[str, Any], now: float) -> None:
        node = Node(
            id=str(message["node"]), workers=int(message["workers"]), pid=int(message["pid"]),
            host=str(message["host"]), store=_address(message["store"]),
        )  # fmt: skip
        if node.workers != self.machine.nodes.workers:
            raise ValueError(
                f"node {node.id} has room for {node.workers} workers, not {self.machine.nodes.workers}"
            )
        running = [Worker(node=node.id, **worker) for worker in message["running"]]
        old = self._agents.get(node.id)
        self._agents[node.id] = connection
        self._nodes[connection] = node.id
        if old is not None:
            self._nodes.pop(old, None)
            assert self._transport is not None
            self._transport.close(old)
        copy = message["copy"]
        self._do(
            self.machine.node_joined(
                node, now, fingerprint=message["fingerprint"], workers=running, copy=copy
            )
        )

    # --- supervisor and command line -----------------------------------------------------------------------------

    def _on_supervisor(self, connection: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "ping":
            self._send(connection, {"kind": "pong"})
        elif kind == "progress":
            self.machine.progressed(int(message["step"]), int(message["round"]))
        elif kind == "stop":
            self._do(self.machine.stop(str(message["reason"])))
        else:
            raise ValueError("a supervisor says no such thing")

    def _on_control(self, connection: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "status":
            self._send(connection, {"kind": "status", **self.status()})
        elif kind == "scale":
            try:
                self._scale(int(message["workers"]))
            except InputError as error:
                self._send(connection, {"kind": "error", "text": str(error)})
            else:
                self._send(connection, {"kind": "scaled", "desired": self.machine.desired})
        else:
            raise ValueError("the command line says no such thing")

    def _scale(self, workers: int) -> None:
        machine = self.machine
        per_node = machine.nodes.workers
        low, high = machine.minimum, machine.maximum
        if machine.nodes.sizes is not None:
            allowed = [size * per_node for size in machine.nodes.sizes]
            if workers not in allowed:
                listed = ", ".join(map(str, allowed))
                raise InputError(f"{workers} workers: this job may have {listed} workers")
        elif not low <= workers <= high:
            raise InputError(f"{workers} workers: this job may have from {low} to {high} workers")
        if not machine.in_place and workers % per_node and machine.round >= 0:
            raise InputError(
                f"{workers} workers: this program is started anew on whole nodes of {per_node} workers: "
                f"choose a multiple of {per_node}"
            )
        self._do(machine.scale(workers, self._clock()))

    def status(self) -> dict[str, Any]:
        """Return the document of `kfp-elastic status`, but for the events."""
        machine = self.machine
        workers: dict[str, list[dict[str, Any]]] = {}
        for worker in machine.workers():
            workers.setdefault(worker.node, []).append(
                {
                    "rank": worker.rank if worker.rank >= 0 else None,
                    "pid": worker.pid or None,
                    "state": worker.state,
                    "step": worker.step,
                }
            )
        return {
            "name": self._name,
            "state": self._one_word(),
            "taking_over": machine.taking_over,
            "global_step": machine.budget.step,
            "world_size": machine.world_size if machine.state == "running" else len(machine.workers()),
            "min": machine.minimum,
            "max": machine.maximum,
            "desired": machine.desired,
            "restarts": machine.budget.used,
            "max_restarts": machine.budget.maximum,
            "term": machine.term,
            "round": machine.round,
            "in_place": machine.in_place,
            "coordinator": {"host": socket.gethostname(), "pid": os.getpid()},
            "refused": {
                reason: count
                for reason, count in self._counters().items()
                if reason not in ("accepted", "opened", "eof", "closed")
            },
            "nodes": [
                {"id": node.id, "host": node.host, "agent_pid": node.pid, "workers": workers.get(node.id, [])}
                for node in machine.connected()
            ],
        }

    def _one_word(self) -> str:
        if self.done is not None:
            return self.done.state
        return "recovering" if self.machine.taking_over else self.machine.state

    def _counters(self) -> Mapping[str, int]:
        return {} if self._transport is None else self._transport.counters

    # --- time --------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Time went by; call it about ten times a second. A pause of this process is not held against the others."""
        now = self._clock()
        if now - self._last_tick > 1.0:
            self._paused = now + self._heartbeat
        self._last_tick = now
        if self.done is None:
            self._do(self.machine.tick(now))

    def beat(self) -> None:
        """Ask every agent for a word, and give up those that said none for too long. Call it every second or so."""
        now = self._clock()
        assert self._transport is not None
        pids = {node.id: node.pid for node in self.machine.connected()}
        for node, connection in list(self._agents.items()):
            heard = self._transport.last_heard(connection)
            if heard is not None and now - heard > self._heartbeat and now > self._paused:
                self._tell_all({"kind": "silent", "node": node, "pid": pids.get(node, 0)})
                del self._agents[node]
                self._nodes.pop(connection, None)
                self._transport.close(connection)
                self._lose(node, f"its agent said nothing for {self._heartbeat:g} s")
            else:
                self._send(connection, {"kind": "ping"})

    # --- what the machine wants ----------------------------------------------------------------------------------

    def _do(self, actions: list[act.Action]) -> None:
        copy = self._changed_copy()
        informed: set[str] = set()
        for action in actions:
            match action:
                case act.Event():
                    self._event(action.kind, action.text, **action.details)
                case act.Wanted(nodes):
                    self._wanted = nodes
                    self._tell_all({"kind": "wanted", "nodes": list(nodes)})
                case act.Done():
                    self.done = action
                    self._tell_all({"kind": "done", "state": action.state, "reason": action.reason})
                case _:
                    connection = self._agents.get(action.node)
                    if connection is None:
                        continue
                    message = _message(action, self.machine.term)
                    if copy is not None and message["kind"] in ("start", "go"):
                        message["copy"] = copy
                        informed.add(action.node)
                    self._send(connection, message)
        if copy is not None:
            for node, connection in list(self._agents.items()):
                if node not in informed:
                    self._send(connection, {"kind": "copy", "copy": copy})
        if actions:
            state = self._state()
            if state != self._told_state:
                self._told_state = state
                self._tell_all({"kind": "state", **state})

    def _changed_copy(self) -> dict[str, Any] | None:
        """Return what agents should keep, if it has changed but for the steps, which they know themselves."""
        copy = self.machine.copy(self._clock())
        budget = {key: value for key, value in copy["budget"].items() if key != "step"}
        compared = {**copy, "budget": budget, "round_of_step": 0,
                    "losses": {"excluded": sorted(copy["losses"]["excluded"])}}  # fmt: skip
        if compared == self._copy:
            return None
        self._copy = compared
        return copy

    def _state(self) -> dict[str, Any]:
        machine = self.machine
        return {
            "round": machine.round,
            "restarts": machine.budget.used,
            "phase": machine.phase,
            "world_size": machine.world_size,
            "term": machine.term,
        }

    def _event(self, kind: str, text: str, **details: Any) -> None:
        self._tell_all({"kind": "event", "event": kind, "text": text, "details": details})

    def _tell_all(self, message: dict[str, Any]) -> None:
        """Tell the supervisors."""
        for connection, role in list(self._roles.items()):
            if role == "supervisor":
                self._send(connection, message)

    def _send(self, connection: int, message: dict[str, Any]) -> None:
        assert self._transport is not None
        self._transport.send(connection, message)


def _address(value: Any) -> tuple[str, int] | None:
    return None if value is None else (str(value[0]), int(value[1]))


def _message(action: act.ToNode, term: int) -> dict[str, Any]:
    """Return an action as the message to its node."""
    match action:
        case act.Start(round=number, store=store, places=places):
            assert store is not None
            return {
                "kind": "start",
                "round": number,
                "store": list(store),
                "places": [dict(vars(place)) for place in places],
            }
        case act.Go(round=number, store=store, source=source, places=places):
            given = [dict(vars(place)) for place in places]
            return {
                "kind": "go",
                "round": number,
                "term": term,
                "store": list(store),
                "source": source,
                "places": given,
            }
        case act.Change(round=number, planned=planned, slots=slots):
            return {"kind": "change", "round": number, "planned": planned, "slots": list(slots)}
        case act.Dismiss(reason=reason):
            return {"kind": "dismiss", "reason": reason}
        case _:
            return {"kind": type(action).__name__.lower(), "slots": list(action.slots)}
