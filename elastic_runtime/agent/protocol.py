"""What supervisor and agent say to each other: one JSON object a line over a socket pair.

Supervisor to agent
    leave   grace: stop everything and end
    ping    answer with pong
Agent to supervisor
    ready
    started rank, round, pid, log (number of its log file), keepers: processes that see to a worker's end
    placed  log, rank: the worker that writes this log file has this rank now
    pong    the agent is there
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

__all__ = ["Channel"]


class Channel:
    """A socket that carries JSON lines."""

    def __init__(self, connection: socket.socket) -> None:
        """Take over `connection`, a connected stream socket."""
        self.socket = connection
        self._rest = b""

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self.socket.fileno()

    def send(self, kind: str, **details: Any) -> None:
        """Send one message. Raises `OSError` if the other side is gone."""
        self.socket.sendall(json.dumps({"kind": kind, **details}).encode() + b"\n")

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that one read brings. Raises `EOFError` once the other side is gone."""
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield json.loads(line)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
