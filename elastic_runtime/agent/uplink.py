"""The agent's connection to the coordinator, made again whenever it is lost."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from typing import Any

from elastic_runtime.errors import ElasticError
from elastic_runtime.membership.connection import Connection

__all__ = ["Uplink"]

_SHORTEST, _LONGEST = 0.02, 1.0
"""Seconds between two tries to reach the coordinator; it doubles from one to the other."""


class Uplink:
    """Keeps one connection to the coordinator, in the selector of its owner.

    After `welcome` of a term that is not older than any before, `on_open` is called: whatever happened meanwhile is
    then told anew. A coordinator of an older term is hung up on.
    """

    def __init__(
        self, address: tuple[str, int], secret: bytes, *, node: str, selector: selectors.BaseSelector,
        on_open: Callable[[], None], on_message: Callable[[dict[str, Any]], None],
    ) -> None:  # fmt: skip
        """Prepare; `tick` connects."""
        self.term = 0
        """Highest term that was seen."""
        self.is_open = False
        """Whether the coordinator was heard and may be told things."""
        self._address = address
        self._secret = secret
        self._node = node
        self._selector = selector
        self._on_open = on_open
        self._on_message = on_message
        self._connection: Connection | None = None
        self._registered = -1
        self._attempt = 0
        self._wait = _SHORTEST
        self._next_try = 0.0

    @property
    def next_event(self) -> float | None:
        """When `tick` has something to do, by `time.monotonic`; None if a message comes first."""
        if self._connection is None:
            return self._next_try
        return self._connection.deadline

    def send(self, kind: str, **details: Any) -> None:
        """Send a message; while there is no coordinator it is dropped, for a new one is told everything."""
        if self.is_open and self._connection is not None:
            self._connection.send({"kind": kind, **details})
            self._look()

    def tick(self) -> None:
        """Connect if it is time."""
        now = time.monotonic()
        if self._connection is not None:
            self._connection.tick(now)
            self._look()
        elif now >= self._next_try:
            try:
                self._connection = Connection(
                    self._address,
                    self._secret,
                    role="agent",
                    info={"node": self._node},
                    attempt=self._attempt,
                )
            except (ElasticError, OSError):
                self._retry()
                return
            self._attempt += 1
            self._look()

    def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            self._unregister()
            self._connection.close()
            self._connection = None
        self.is_open = False

    def flush(self, seconds: float) -> None:
        """Try for at most `seconds` to get everything out that was sent."""
        end = time.monotonic() + seconds
        while self._connection is not None and self._connection.wants_write and time.monotonic() < end:
            self._connection.on_writable()
            time.sleep(0.001)

    def _on_event(self) -> None:
        connection = self._connection
        if connection is None:
            return
        if connection.wants_write:
            connection.on_writable()
        connection.on_readable()
        for message in connection.messages():
            if message["kind"] == "welcome":
                if message["term"] < self.term:
                    connection.close()  # It does not know yet that another one leads.
                    break
                self.term, self.is_open, self._wait = message["term"], True, _SHORTEST
                self._on_open()
            elif self.is_open:
                self._on_message(message)
            if self._connection is not connection:
                return
        self._look()

    def _look(self) -> None:
        """Keep the selector's entry true, and drop a connection that has ended."""
        connection = self._connection
        if connection is None:
            return
        if connection.closed is not None:
            self._unregister()
            self._connection = None
            self.is_open = False
            self._retry()
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_write else 0)
        if self._registered < 0:
            self._selector.register(connection.fileno(), events, self._on_event)
            self._registered = connection.fileno()
        elif self._selector.get_key(self._registered).events != events:
            self._selector.modify(self._registered, events, self._on_event)

    def _unregister(self) -> None:
        if self._registered >= 0:
            # By number: a socket that was closed has none any more.
            self._selector.unregister(self._registered)
            self._registered = -1

    def _retry(self) -> None:
        self._next_try = time.monotonic() + self._wait
        self._wait = min(2 * self._wait, _LONGEST)
