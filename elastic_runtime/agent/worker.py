"""One worker as its agent knows it: the process, its channel, and what a new coordinator must be told of it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_runtime.agent.requests import Program
from elastic_runtime.agent.warm import Worker as Handle
from elastic_runtime.membership.members import Worker

__all__ = ["Slot"]

_PACKET = 64 * 1024
_PACKETS = 64


@dataclass(kw_only=True, eq=False)
class Slot:
    """One place for a worker of this node, and the process in it."""

    known: Worker
    """What the coordinator should know of it."""
    program: Program
    log: Path
    log_start: int
    """Size of the log when the worker was started."""
    handle: Handle | None = None
    channel: socket.socket | None = None
    """Our end; the worker finds its end in ELASTIC_CHANNEL."""
    theirs: socket.socket | None = None
    kill_at: float | None = None
    """When it is killed, by `time.monotonic`."""
    stopped_since: float | None = None
    """Since when it has been stopped by a signal."""
    ended: tuple[int, str] | None = None
    """Exit code and last words, once it has ended."""
    said: str = ""
    """Why we killed it, if we did."""

    @property
    def slot(self) -> int:
        """Number of the place."""
        return self.known.slot

    @property
    def identity(self) -> dict[str, int]:
        """What names the worker in messages to the coordinator."""
        return {"slot": self.known.slot, "spawn": self.known.spawn}

    def tell(self, kind: str, **details: Any) -> None:
        """Send a message to the worker. One that is gone, or never reads, does not matter: its end shows elsewhere."""
        if self.channel is not None:
            with suppress(OSError):
                self.channel.send(json.dumps({"kind": kind, **details}).encode(), socket.MSG_DONTWAIT)

    def hear(self) -> Iterator[dict[str, Any]]:
        """Yield what the worker said. What is no message is passed over: the script may use the channel as it likes."""
        for _ in range(_PACKETS):
            if self.channel is None:
                return
            try:
                packet = self.channel.recv(_PACKET, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                raise EOFError
            with suppress(ValueError):
                message = json.loads(packet)
                if isinstance(message, dict):
                    yield message

    def close(self) -> None:
        """Close the channel and the process's descriptors."""
        for end in (self.channel, self.theirs):
            if end is not None:
                end.close()
        self.channel = self.theirs = None
        if self.handle is not None:
            self.handle.close()
            self.handle = None
