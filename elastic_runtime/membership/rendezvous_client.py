"""A torchrun agent's connection to the coordinator, in a thread of its own: the agent only looks now and then."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
import uuid
from collections import deque
from typing import Any

from elastic_runtime.errors import ElasticError, InputError
from elastic_runtime.membership.channel_errors import ChannelError, WrongSecretError
from elastic_runtime.membership.connection import Connection
from elastic_runtime.membership.rendezvous import RendezvousConfig
from elastic_runtime.membership.rendezvous_host import Host
from elastic_runtime.membership.rendezvous_rounds import Again, Begin, Proceed, Reply
from elastic_runtime.membership.secret import read_secret

__all__ = ["RendezvousClient"]

log = logging.getLogger(__name__)

_SHORTEST, _LONGEST = 0.05, 1.0
"""Seconds between two tries to reach the coordinator; it doubles from one to the other."""
_LOOK = 0.25
_WRONG_SECRETS = 3
"""Refusals in a row after which the secret is taken to be wrong: a loaded coordinator may drop a client as well."""


class RendezvousClient:
    """Keeps the connection, and what the coordinator last said. Every method may be called from any thread."""

    def __init__(self, config: RendezvousConfig) -> None:
        """Read the secret and begin to connect. Raises what `read_secret` raises."""
        self.node = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._config = config
        self._secret = read_secret(config.secret_file)
        self._host = Host(config)
        self._changed = threading.Condition()
        self._replies: deque[Reply] = deque()
        self._store: tuple[str, int] | None = None
        """What this node offers, while it waits for a round."""
        self._place: Proceed | None = None
        self._pending = self._member = self._stopping = False
        self._closed = self._closing = self._acknowledged = self._spare = False
        self._waiting = 0
        self._failed: ElasticError | None = None
        self._unreachable: ChannelError | None = None
        self._outbox: deque[dict[str, Any]] = deque()
        self._local_host = ""
        self._connection: Connection | None = None
        self._opened = self._ever_opened = False
        self._refusals = 0
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="elastic-rendezvous", daemon=True)
        self._thread.start()

    # --- for the handler ---------------------------------------------------------------------------------------

    def join(self, store: tuple[str, int]) -> None:
        """Ask for a place in the next round, and offer a store for it."""
        with self._changed:
            self._replies.clear()
            self._store, self._pending, self._member, self._waiting = store, False, False, 0
            # Under one lock, so that a connection which opens now does not say it as well.
            self._say("join", store=list(store))

    def met(self, number: int) -> None:
        """Say that this node has reached the store of round `number`."""
        self._say("met", round=number)

    def reply(self, timeout: float) -> Reply | None:
        """Return what the coordinator answers; None if it says nothing within `timeout` seconds, or the job is over.

        Raises `WrongSecretError` or `InputError` if the coordinator does not want this node.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._replies or self._closed or self._failed, timeout)
            if self._failed is not None:
                raise self._failed
            return self._replies.popleft() if self._replies else None

    def local_host(self, timeout: float) -> str:
        """Return the address from which this machine reaches the coordinator; empty if it is not reached in time.

        Raises what `reply` raises.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._local_host or self._closed or self._failed, timeout)
            if self._failed is not None:
                raise self._failed
            return self._local_host

    @property
    def waiting(self) -> int:
        """Nodes that wait for this one, as the coordinator last said."""
        with self._changed:
            return self._waiting

    @property
    def closed(self) -> bool:
        """Whether the job is over."""
        with self._changed:
            return self._closed

    @property
    def spare(self) -> bool:
        """Whether the job ended while this node waited for a place, and had none."""
        with self._changed:
            return self._spare

    @property
    def problem(self) -> str:
        """Why the coordinator cannot be reached just now; empty if it can."""
        with self._changed:
            return "" if self._opened or self._unreachable is None else str(self._unreachable)

    def close_job(self) -> None:
        """Say that the job is over, for all nodes."""
        with self._changed:
            self._closing = self._closed = True
            self._changed.notify_all()
        self._say("close")

    def stop(self, timeout: float = 2.0) -> bool:
        """Send what waits, hang up and end the thread; return whether all was sent within `timeout` seconds."""
        with self._changed:
            self._stopping = True
        self._wake()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _say(self, kind: str, **details: Any) -> None:
        with self._changed:
            self._outbox.append({"kind": kind, **details})
        self._wake()

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"!")
        except OSError:
            return  # It is full, so the thread wakes anyway; or it has ended.

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            # Nobody may wait for a thread that is gone.
            self._fail(ChannelError(f"the connection to the coordinator failed here: {error!r}"))
            raise

    def _serve(self) -> None:
        wait, next_try, attempt = _SHORTEST, 0.0, 0
        end: float | None = None
        while True:
            now = time.monotonic()
            with self._changed:
                if self._stopping and end is None:
                    end = now + 1.0
                # Hanging up with words unread could take back our own; so its answer to `close` is waited for.
                sent = not self._outbox and (not self._closing or self._acknowledged)
                if self._failed is not None or (end is not None and (sent or now >= end or not self._opened)):
                    break
            self._host.look()
            if self._connection is None and now >= next_try:
                self._connect(attempt)
                attempt += 1
            for key, events in self._selector.select(_LOOK if self._connection else min(_LOOK, wait)):
                if key.fileobj is self._wake_out:
                    self._wake_out.recv(4096)
                else:
                    self._on_socket(events)
            self._flush()
            opened, tried = self._opened, self._connection is not None or now >= next_try
            self._look()
            if self._connection is None and tried:
                wait = _SHORTEST if opened else min(2 * wait, _LONGEST)
                next_try = time.monotonic() + wait
        self._drop()
        self._host.close()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _connect(self, attempt: int) -> None:
        config = self._config
        try:
            connection = Connection(
                (config.host, config.port), self._secret, role="rendezvous", info={"node": self.node},
                attempt=attempt,
            )  # fmt: skip
        except InputError as error:
            self._fail(error)
            return
        except ChannelError as error:
            self._unreachable = error
            return
        self._connection = connection
        if connection.closed is None:
            self._selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
            connection.before_close = lambda: self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        self._selector.unregister(connection)

    def _on_socket(self, events: int) -> None:
        connection = self._connection
        if connection is None:
            return
        if events & selectors.EVENT_WRITE:
            connection.on_writable()
        if events & selectors.EVENT_READ:
            connection.on_readable()
        if connection.is_open and not self._opened:
            self._on_open(connection)
        for message in connection.messages():
            if message["kind"] == "ping":
                connection.send({"kind": "pong"})
            else:
                with self._changed:
                    self._on_message(message)
                    self._changed.notify_all()

    def _on_open(self, connection: Connection) -> None:
        """Say who this is, and whatever else a coordinator that was just started does not know."""
        config = self._config
        with self._changed:
            place = self._place
            where = {"round": -1, "rank": -1, "world": 0}
            if place is not None:
                where = {"round": place.round, "rank": place.rank, "world": place.world}
            connection.send({
                "kind": "hello", "node": self.node, "run_id": config.run_id, "minimum": config.minimum,
                "maximum": config.maximum, **where, "member": self._member,
            })  # fmt: skip
            self._outbox.clear()
            if self._closed:
                connection.send({"kind": "close"})
            elif self._store is not None:
                connection.send({"kind": "join", "store": list(self._store)})
            self._opened = self._ever_opened = True
            self._refusals = 0
            self._local_host = _own_address(connection)
            self._changed.notify_all()

    def _on_message(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "proceed" and self._store is not None:
            host, port = message["store"]
            self._place = Proceed(
                node=self.node, round=message["round"], rank=message["rank"], world=message["world"],
                store=(host, port),
            )  # fmt: skip
            self._store, self._pending = None, True
            self._replies.append(self._place)
        elif kind in ("begin", "again") and self._pending and self._place is not None:
            if message["round"] != self._place.round:
                return
            self._pending, self._member, self._waiting = False, kind == "begin", 0
            reply = Begin if kind == "begin" else Again
            self._replies.append(reply(node=self.node, round=message["round"]))
        elif kind == "state":
            self._closed = self._closed or message["closed"]
            self._acknowledged = message["closed"]
            self._spare = self._spare or message["spare"]
            self._waiting = message["waiting"] if self._member and not self._closed else 0
        elif kind == "refused":
            self._fail(InputError(f"{self._config.host}:{self._config.port}: {message['reason']}"))

    def _fail(self, error: ElasticError) -> None:
        with self._changed:
            self._failed = error
            self._changed.notify_all()

    def _flush(self) -> None:
        connection = self._connection
        if connection is None or not self._opened:
            return
        with self._changed:
            while self._outbox:
                connection.send(self._outbox.popleft())

    def _look(self) -> None:
        """Keep the selector's entry true, and clear away a connection that has ended."""
        connection = self._connection
        if connection is None:
            return
        connection.tick()
        if connection.closed is None:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_write else 0)
            self._selector.modify(connection, events)
        if connection.closed is None:
            return
        error, self._connection = connection.closed, None
        with self._changed:
            self._opened = False
            self._unreachable = error
            if self._pending and self._place is not None:
                # What became of the round is not known: its place is asked for anew.
                self._pending = False
                self._replies.append(Again(node=self.node, round=self._place.round))
                self._changed.notify_all()
        if isinstance(error, WrongSecretError):
            self._refusals += 1
            if self._refusals >= _WRONG_SECRETS and not self._ever_opened:
                self._fail(error)
        elif not self._stopping:
            self._host.claim()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _own_address(connection: Connection) -> str:
    """Return the address of this end."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        return str(same.getsockname()[0])
