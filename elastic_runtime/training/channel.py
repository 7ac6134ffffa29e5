"""The worker's end of the channel to its agent: one JSON object a packet, and one thread that listens.

The thread notes what the agent says and, when a peer died, interrupts what the main thread is blocked in. It decides
nothing else: the main thread asks at the points where a step may be left.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_runtime.errors import InputError

__all__ = ["CHANNEL", "AgentLink", "Go", "RoundChanged"]

CHANNEL = "ELASTIC_CHANNEL"
"""Environment variable with the number of the worker's end of the channel."""

_logger = logging.getLogger(__name__)
_PACKET = 64 * 1024
_AGAIN = 0.05
"""Seconds between two interruptions of a main thread that has not come free (a socket made meanwhile)."""


class RoundChanged(BaseException):
    """The membership changes: leaves `train`, and `elastic.run` calls it again in the new round.

    Not an `Exception`, so that a script's `except Exception` does not swallow it. Do not catch it; `finally` and
    `with` blocks run as usual.
    """


@dataclass(frozen=True, kw_only=True)
class Go:
    """The agent's answer to `ready`: the place of this worker in the round that forms."""

    round: int
    """Number of the round."""
    term: int
    """Term of the coordinator that decided it."""
    rank: int
    local_rank: int
    world_size: int
    group_rank: int
    """Number of this worker's node."""
    group_world_size: int
    """Nodes of the round."""
    local_world_size: int
    """Workers of this node."""
    store: tuple[str, int]
    """Host and port of the round's TCP store."""
    source: int
    """Rank that gives its state to all others; -1 if nobody has state."""

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Go:
        """Read a `go` message. Raises `KeyError`, `TypeError` or `ValueError` if it is not one."""
        host, port = message["store"]
        numbers = {name: int(message[name]) for name in cls.__dataclass_fields__ if name not in ("store",)}
        return cls(store=(str(host), int(port)), **numbers)


class AgentLink:
    """What this worker knows from its agent. All methods may be called from any thread.

    `interrupt` is called in the listening thread, again and again until the main thread has settled, when the present
    round ends because somebody died. The end of the channel means that the agent is gone: the process ends at once.
    """

    def __init__(self, connection: socket.socket, interrupt: Callable[[], None]) -> None:
        self._socket = connection
        self._interrupt = interrupt
        self._changed = threading.Condition()
        self._round = -1
        self._engaged = False
        self._newest = -1
        self._urgent = -1
        self._go: Go | None = None
        self._leaving = False
        self._released = False
        self._led = True
        self._watcher = threading.Thread(target=self._watch, name="elastic-channel", daemon=True)

    @classmethod
    def from_environment(cls, interrupt: Callable[[], None]) -> AgentLink | None:
        """Return the link that `ELASTIC_CHANNEL` names, listening; None without one.

        The variable is taken out of the environment, so that no child mistakes the channel for its own.
        Raises `InputError` if it is no socket of this process.
        """
        value = os.environ.pop(CHANNEL, None)
        if value is None:
            return None
        try:
            connection = socket.socket(fileno=int(value))
            connection.getpeername()
        except (ValueError, OSError) as error:
            raise InputError(
                f"{CHANNEL}={value!r} is not an open socket of this process ({error}): it is set by the agent, and "
                "elastic.run may be called once a process; unset it to run the script plainly"
            ) from None
        connection.set_inheritable(False)
        connection.setblocking(True)
        link = cls(connection, interrupt)
        link.send({"kind": "hello"})
        link._watcher.start()
        return link

    def fileno(self) -> int:
        """Return the descriptor of the channel."""
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message. If the agent is gone, the process ends."""
        try:
            self._socket.send(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionError):
            _agent_is_gone()

    def pending(self) -> bool:
        """Whether the present round is to end, at once or at a step boundary."""
        with self._changed:
            return self._leaving or self._newest > self._round

    def urgent(self) -> bool:
        """Whether the present round is over: somebody died, or this worker must go."""
        # Read without the lock: it is asked before every micro-batch, and a moment's delay does no harm.
        return self._urgent > self._round or self._leaving

    def wait_for_change(self, seconds: float) -> bool:
        """Wait until the agent says that the round ends; False if it does not within `seconds`.

        Those in which the agent has no coordinator do not count: nobody can know then why a peer is gone.
        """
        with self._changed:
            while True:
                led = self._led
                limit = seconds if led else None
                self._changed.wait_for(lambda: self._is_over() or self._led is not led, limit)  # noqa: B023 - at once
                if self._is_over():
                    return True
                if led and self._led:
                    return False

    def _is_over(self) -> bool:
        return self._leaving or self._newest > self._round

    def settled(self) -> None:
        """Tell the listening thread that the main thread is out of the round: nothing to interrupt any more."""
        with self._changed:
            self._engaged = False

    def ask(self, *, step: int, round_: int, torn: bool, fresh: bool) -> Go:
        """Say `ready` and wait for the place in the next round, however long that takes.

        Waiting is right while the job is below its minimum; it ends when the agent does. Says `ready` again when the
        membership changed once more. Raises `SystemExit(0)` if this worker is to leave.
        """
        ready = {"kind": "ready", "step": step, "round": round_, "torn": torn, "fresh": fresh}
        while True:
            with self._changed:
                known = self._newest
            self.send({**ready, "told": known})
            with self._changed:
                while not (self._leaving or self._answer() or self._newest > known):
                    self._changed.wait()
                if self._leaving:
                    raise SystemExit(0)
                go = self._answer()
                if go is not None:
                    self._go = None
                    self._round = go.round
                    self._engaged = True
                    return go

    def finish(self, step: int) -> None:
        """Say `finished` and wait for the release, however long the other ranks take.

        Raises `RoundChanged` if the membership changes first, `SystemExit(0)` if this worker is to leave.
        """
        if not self.pending():
            self.send({"kind": "finished", "step": step})
        with self._changed:
            self._changed.wait_for(lambda: self._leaving or self._released or self._newest > self._round)
            if self._released:
                self._engaged = False
                return
            if self._leaving:
                raise SystemExit(0)
        raise RoundChanged(f"round {self._round} ends after the last step")

    def _answer(self) -> Go | None:
        go = self._go
        return go if go is not None and go.round > self._round and go.round >= self._newest else None

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        interrupted = 0.0
        while True:
            with self._changed:
                due = self._engaged and (self._urgent > self._round or self._leaving)
            if due and time.monotonic() - interrupted >= _AGAIN:
                self._interrupt()
                interrupted = time.monotonic()
            if not poller.poll(_AGAIN * 1000 if due else None):
                continue
            try:
                packet = self._socket.recv(_PACKET)
            except ConnectionError:
                packet = b""
            if not packet:
                _agent_is_gone()
            try:
                self._take(json.loads(packet))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                _logger.warning("message of the agent ignored: message=%.200r reason=%r", packet, error)
            interrupted = 0.0

    def _take(self, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        with self._changed:
            if kind == "change":
                number = int(message["round"])
                self._newest = max(self._newest, number)
                if not message["planned"]:
                    self._urgent = max(self._urgent, number)
            elif kind == "go":
                self._go = Go.of(message)
            elif kind == "leave":
                self._leaving = True
            elif kind == "release":
                self._released = True
            elif kind == "coordinator":
                self._led = bool(message["here"])
            else:
                raise ValueError(f"unknown kind {kind!r}")
            self._changed.notify_all()


def _agent_is_gone() -> None:
    # Nobody supervises this worker any more, and its peers have been told: it must not go on alone.
    os._exit(1)
