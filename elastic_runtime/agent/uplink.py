"""The agent's connection to the coordinator, made again whenever it is lost."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from typing import Any

from elastic_runtime.errors import ElasticError
from elastic_runtime.membership.connection import Connection
from elastic_runtime.membership.watched import Watched

__all__ = ["Uplink"]

_SHORTEST, _LONGEST = 0.02, 1.0
"""Seconds between two tries to reach the coordinator; it doubles from one to the other."""
_CONNECT = 5.0
_CONNECT_ANEW = 3.0
"""Seconds for one try where cables may be cut: a packet that was lost is sent again later and later."""
_PAUSE = 1.0
"""Seconds between two calls of `tick` after which this process is taken to have been paused."""


class Uplink:
    """Keeps one connection to the coordinator, in the selector of its owner.

    After `welcome` of a term that is not older than any before, `on_open` is called: whatever happened meanwhile is
    then told anew. A coordinator of an older term is hung up on.
    """

    def __init__(
        self, address: tuple[str, int], secret: bytes, *, node: str, selector: selectors.BaseSelector,
        on_open: Callable[[], None], on_message: Callable[[dict[str, Any]], None],
        on_close: Callable[[], None] = lambda: None, silence: float | None = None,
    ) -> None:  # fmt: skip
        """Prepare; `tick` connects, and must be called every half second.

        `on_close` is called when the coordinator is not there any more. One that says nothing for `silence` seconds is
        taken to be cut off; without it only the end of the connection counts.
        """
        self.term = 0
        """Highest term that was seen."""
        self.is_open = False
        """Whether the coordinator was heard and may be told things."""
        self._address = address
        self._secret = secret
        self._node = node
        self._watched = Watched(selector, self._on_event)
        self._on_open = on_open
        self._on_message = on_message
        self._on_close = on_close
        self._silence = silence
        self.trouble = ""
        """Why the last try failed; empty while the coordinator is there."""
        self._connection: Connection | None = None
        self._aside: Connection | None = None
        """The connection that fell silent. It stays until there is another: its end would say that this agent ended."""
        self._ticked = self._excused_until = time.monotonic()
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
        if now - self._ticked > _PAUSE and self._silence is not None:
            self._excused_until = now + self._silence  # What was said meanwhile has not been read.
        self._ticked = now
        if self._connection is not None:
            self._connection.tick(now)
            self._look()
            self._listen(now)
        elif now >= self._next_try:
            try:
                self._connection = Connection(
                    self._address,
                    self._secret,
                    role="agent",
                    info={"node": self._node},
                    attempt=self._attempt,
                    timeout=_CONNECT if self._silence is None else _CONNECT_ANEW,
                )
            except (ElasticError, OSError) as error:
                self.trouble = str(error)
                self._retry()
                return
            self._attempt += 1
            self._look()

    def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            self._watched.drop()
            self._connection.close()
            self._connection = None
        self._forget_aside()
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
                self.trouble = ""
                self._on_open()
                self._forget_aside()
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
            self._watched.drop()
            self._connection = None
            self.trouble = str(connection.closed)
            self._gone()
            self._retry()
            return
        self._watched.update(connection)

    def _listen(self, now: float) -> None:
        """Put a connection aside that says nothing any more, and make another one."""
        connection = self._connection
        if self._silence is None or not self.is_open or connection is None or connection.last_heard is None:
            return
        if now - connection.last_heard <= self._silence or now <= self._excused_until:
            return
        self._watched.drop()
        self._forget_aside()
        self._aside, self._connection = connection, None
        self.trouble = f"the coordinator said nothing for {self._silence:g} s"
        self._next_try = now
        self._gone()

    def _gone(self) -> None:
        if self.is_open:
            self.is_open = False
            self._on_close()

    def _forget_aside(self) -> None:
        if self._aside is not None:
            self._aside.close()
            self._aside = None

    def _retry(self) -> None:
        self._next_try = time.monotonic() + self._wait
        self._wait = min(2 * self._wait, _LONGEST)
