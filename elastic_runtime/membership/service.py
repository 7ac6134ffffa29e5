"""The coordinator without its socket: messages (see `messages`) to the machine, and its actions to messages."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from elastic_runtime.errors import InputError
from elastic_runtime.membership import actions as act
from elastic_runtime.membership.machine import Membership
from elastic_runtime.membership.messages import address, flag, integer, joining, text, to_node
from elastic_runtime.membership.session import Peer
from elastic_runtime.membership.silence import Silence

__all__ = ["Service", "Transport"]

_PAUSE = 1.0
"""Seconds without a look at the clock (see `tick`) after which this process is taken to have been paused."""
_SIGNALS = 1 << 16
_OF_WORKERS = ("started", "hello", "ready", "joined", "finished", "exited")


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
        self._supervised = False
        """Whether the supervisor has said something."""
        self.done: act.Done | None = None
        self._told_state: dict[str, Any] = {}
        self._copy: dict[str, Any] = {}
        self._looked = clock()
        self._pauses = 0.0
        """Seconds for which this process was paused, in all."""
        self._silence = Silence(heartbeat, apart=not machine.managed)
        self._told_deaf = False

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
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            kind = message.get("kind")
            self._event("bad_message", f"a message {kind!r:.100} of {role} makes no sense: {error}")
            assert self._transport is not None
            self._transport.close(connection)

    def on_close(self, connection: int, why: str) -> None:
        """The connection is gone."""
        role = self._roles.pop(connection, None)
        node = self._nodes.pop(connection, None)
        if role == "agent" and node is not None and self._agents.get(node) == connection:
            del self._agents[node]
            if why == "timed out" and not self.machine.managed:
                return  # A cut cable, perhaps our own: see `beat`.
            self._lose(node, f"its agent is gone ({why})" if why != "eof" else "its agent is gone")

    def _lose(self, node: str, how: str) -> None:
        self._silence.forget(node)
        known = self.machine.node(node)
        if known is None:
            return
        if self.machine.phase != "done" and not known.leaving:
            self._event("node_lost", f"node {node} lost: {how}", node=node, **self._concerns(node))
        self._do(self.machine.node_lost(node, self._now()))

    # --- agents ------------------------------------------------------------------------------------------------

    def _on_agent(self, connection: int, message: dict[str, Any]) -> None:
        kind, now = text(message, "kind"), self._now()
        if (known := self._nodes.get(connection)) is not None:
            self._silence.heard(known, self._clock())
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
            self._do(machine.node_store(node, address(message, "store"), now))
        elif kind == "leaving":
            told = f"node {node} leaves: {text(message, 'signal')} received"
            if machine.phase != "done":
                self._event("node_leaving", told, node=node, **self._concerns(node))
            self._do(machine.node_leaving(node, now))
        elif kind == "store_lost":
            how = text(message, "how")
            ends = not machine.in_place and machine.phase == "running" and machine.is_meeting
            told = f"the store host of node {node} {how}"
            self._event("store_lost", told, node=node, round=machine.round, member=ends)
            self._do(machine.store_lost(node, how, now))
        elif kind == "progress":
            machine.progressed(integer(message, "step"), integer(message, "round", -1))
        elif kind not in _OF_WORKERS:
            raise ValueError("an agent says no such thing")
        else:
            slot, spawn = integer(message, "slot"), integer(message, "spawn")
            if kind == "started":
                machine.worker_started(node, slot, spawn, integer(message, "pid"))
            elif kind == "hello":
                self._do(machine.worker_hello(node, slot, spawn, now))
            elif kind == "ready":
                self._do(
                    machine.worker_ready(
                        node, slot, spawn, now, step=integer(message, "step"), torn=flag(message, "torn"),
                        fresh=flag(message, "fresh"), round=integer(message, "round", -1),
                        told=integer(message, "told", -1),
                    )
                )  # fmt: skip
            elif kind == "joined":
                machine.worker_joined(node, slot, spawn, integer(message, "round"))
            elif kind == "finished":
                self._do(machine.worker_finished(node, slot, spawn, integer(message, "step"), now))
            else:
                code, words = integer(message, "code", -_SIGNALS), text(message, "message", "")
                step, round_ = integer(message, "step"), integer(message, "round", -1)
                if round_ >= 0:
                    machine.progressed(step, round_)
                self._do(machine.worker_exited(node, slot, spawn, now, code=code, message=words))

    def _concerns(self, node: str) -> dict[str, Any]:
        """Say in which round the loss of a node falls, and whether it had workers there."""
        machine = self.machine
        member = any(w.node == node and w.rank >= 0 and w.round == machine.round for w in machine.workers())
        return {"round": machine.round, "member": member}

    def _join(self, connection: int, message: dict[str, Any], now: float) -> None:
        if connection in self._nodes:
            raise ValueError(f"this agent has joined as node {self._nodes[connection]}")
        node, running, copy = joining(message, workers=self.machine.nodes.workers)
        old = self._agents.get(node.id)
        self._agents[node.id] = connection
        self._nodes[connection] = node.id
        self._silence.heard(node.id, self._clock())
        if old is not None:
            self._nodes.pop(old, None)
            assert self._transport is not None
            self._transport.close(old)
        fingerprint = message.get("fingerprint")
        again = self.machine.node(node.id) is not None
        self._do(self.machine.node_joined(node, now, fingerprint=fingerprint, workers=running, copy=copy))
        if (
            again and not self.machine.taking_over
        ):  # What was said on the connection before may not have come.
            self._send(connection, {"kind": "copy", "copy": self.machine.copy(now)})

    # --- supervisor and command line -----------------------------------------------------------------------------

    def _on_supervisor(self, connection: int, message: dict[str, Any]) -> None:
        kind = text(message, "kind")
        self._supervised = True  # The first thing that it says is how far the job is.
        if kind == "ping":
            self._send(connection, {"kind": "pong"})
        elif kind == "progress":
            self.machine.progressed(integer(message, "step"), integer(message, "round", -1))
        elif kind == "stop":
            self._do(self.machine.stop(text(message, "reason")))
        elif kind == "copy":
            self._do(self.machine.remember(message["copy"], self._now()))
        else:
            raise ValueError("a supervisor says no such thing")

    def _on_control(self, connection: int, message: dict[str, Any]) -> None:
        kind = text(message, "kind")
        if kind == "status":
            self._send(connection, {"kind": "status", **self.status()})
        elif kind == "scale" and self.machine.taking_over:
            # What the agents tell next would overrule it: the one who asks has to ask again.
            told = "the coordinator is being replaced: try again in a moment"
            self._send(connection, {"kind": "error", "taking_over": True, "text": told})
        elif kind == "scale":
            try:
                self._scale(integer(message, "workers"))
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
        self._do(machine.scale(workers, self._now()))

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
            "taking_over": self._taking_over,
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

    @property
    def _taking_over(self) -> bool:
        """Whether somebody has still to tell what the coordinator before this one knew: agents, or the supervisor."""
        machine = self.machine
        return machine.taking_over or (machine.managed and machine.term > 1 and not self._supervised)

    def _one_word(self) -> str:
        if self.done is not None:
            return self.done.state
        machine = self.machine
        if machine.state == "running" and machine.is_meeting and not all(w.pid for w in machine.workers()):
            return "forming" if machine.round == 0 else "recovering"  # Its workers are still being started.
        return "recovering" if self._taking_over else machine.state

    def _counters(self) -> Mapping[str, int]:
        return {} if self._transport is None else self._transport.counters

    # --- time --------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Time went by; call it about ten times a second. A pause of this process is not held against the others."""
        now = self._now()
        if self.done is None:
            self._do(self.machine.tick(now))

    def _now(self) -> float:
        """Return the machine's time: the clock without the pauses of this process.

        Messages and deadlines that piled up meanwhile would else be judged as if the others had had that time.
        """
        now = self._clock()
        if now - self._looked > _PAUSE:
            self._pauses += now - self._looked
            self._silence.excuse(now)
        self._looked = now
        return now - self._pauses

    def beat(self) -> None:
        """Ask every agent for a word, and give up those that said none for too long.

        Call it every second, or four times a heartbeat if that is more often.
        """
        self._now()
        now = self._clock()
        assert self._transport is not None
        pids = {node.id: node.pid for node in self.machine.connected()}
        for node in self._silence.lost(now):
            self._tell_all({"kind": "silent", "node": node, "pid": pids.get(node, 0)})
            connection = self._agents.pop(node, None)
            if connection is not None:
                self._nodes.pop(connection, None)
                self._transport.close(connection)
            self._lose(node, f"its agent said nothing for {self._heartbeat:g} s")
        for connection in list(self._agents.values()):
            self._send(connection, {"kind": "ping"})
        self._watch_own_cable(self._silence.deaf(now))

    def _watch_own_cable(self, seconds: float) -> None:
        """Say once that nobody has been heard for `seconds`, and give the job up when that lasts too long."""
        if not seconds or self.done is not None:
            self._told_deaf = False
            return
        limit = self.machine.wait_limit
        what = f"no agent has been heard for {seconds:.0f} s: this host is cut off, or all others are"
        if not self._told_deaf:
            self._told_deaf = True
            self._event("cut_off", f"{what}; waiting for at most {limit:.0f} s")
        if seconds > limit:
            self._do(self.machine.fail(what))

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
                    message = to_node(action, self.machine.term)
                    if copy is not None and message["kind"] in ("start", "go", "release"):
                        message["copy"] = copy
                        informed.add(action.node)
                    self._send(connection, message)
        if copy is not None:
            self._tell_all({"kind": "copy", "copy": copy})
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
        if self.machine.taking_over:
            return None  # What they keep is more than what is known here.
        copy = self.machine.copy(self._now())
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
