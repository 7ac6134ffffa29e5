"""A connection's place in somebody's selector."""

from __future__ import annotations

import selectors
from collections.abc import Callable

from elastic_runtime.membership.connection import Connection

__all__ = ["Watched"]


class Watched:
    """Keeps one entry of a selector true to what a connection waits for."""

    def __init__(self, selector: selectors.BaseSelector, on_event: Callable[[], None]) -> None:
        """Have no entry yet. `on_event` is the entry's data, for the selector's owner to call."""
        self._selector = selector
        self._on_event = on_event
        self._registered: int | None = None

    def update(self, connection: Connection) -> None:
        """Watch this open connection for reading, and for writing while it has something to write."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_write else 0)
        if self._registered is None:
            self._registered = connection.fileno()
            self._selector.register(self._registered, events, self._on_event)
        elif self._selector.get_key(self._registered).events != events:
            self._selector.modify(self._registered, events, self._on_event)

    def drop(self) -> None:
        """Watch nothing any more."""
        if self._registered is not None:
            # By number: a socket that was closed has none any more.
            self._selector.unregister(self._registered)
            self._registered = None
