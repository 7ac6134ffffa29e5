"""The supervisor's end of the coordinator: started first, watched, started again; and what it says."""

from __future__ import annotations

import selectors
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from elastic_runtime.errors import ElasticError
from elastic_runtime.membership.connection import Connection
from elastic_runtime.membership.watched import Watched
from elastic_runtime.processes.command import internal_command
from elastic_runtime.wording import killed_by

__all__ = ["CoordinatorHandle"]

_PATIENCE = 5.0
"""Seconds without a word after which the coordinator is killed (longer while it starts)."""
_START_PATIENCE = 60.0
_ASK = 1.0
_RETRY = 0.02
_PAUSE = 2.0
"""A turn that comes later than this was a pause of this process, not of the coordinator."""


class CoordinatorHandle:
    """A child process and the connection to it. Its listening socket is ours, so that its successor has the same."""

    def __init__(
        self, config: Path, log: Path, secret: bytes, selector: selectors.BaseSelector,
        on_message: Callable[[dict[str, Any]], None],
    ) -> None:  # fmt: skip
        """Bind the socket; `start` starts the process. Raises `OSError` if no port can be had."""
        self._listener = _listen()
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._config = config
        self._log = log
        self._secret = secret
        self._on_message = on_message
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._watched = Watched(selector, self._on_event)
        self._heard = self._turn = self._asked = self._next_try = time.monotonic()
        self._welcomed = False

    @property
    def pid(self) -> int | None:
        """Process id, while there is one."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process. Raises `OSError`."""
        with self._log.open("ab") as file:
            self._process = subprocess.Popen(
                internal_command(
                    "elastic_runtime.membership.coordinator",
                    f"--config={self._config}",
                    f"--listen={self._listener.fileno()}",
                ),
                pass_fds=[self._listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._welcomed = False
        self._heard = time.monotonic() + _START_PATIENCE - _PATIENCE

    def send(self, kind: str, **details: Any) -> None:
        """Say something, if the coordinator is there."""
        if self._connection is not None and self._welcomed:
            self._connection.send({"kind": kind, **details})
            self._look()

    def watch(self) -> str:
        """Connect, ask, and start another one if need be; return what the job's log is to say of it."""
        now = time.monotonic()
        if now - self._turn > _PAUSE:
            self._heard = now
        self._turn = now
        said = ""
        if self._process is not None and self._process.poll() is not None:
            code = self._process.returncode
            said = self._replace(f"ended with code {code}" if code >= 0 else f"was {killed_by(-code)}")
        elif self._process is not None and now - self._heard > _PATIENCE:
            self._process.kill()
            self._process.wait()
            said = self._replace("no longer answered")
        if self._connection is None and now >= self._next_try:
            self._connect()
        elif self._connection is not None:
            self._connection.tick(now)
            if self._welcomed and now - self._asked >= _ASK:
                self._asked = now
                self._connection.send({"kind": "ping"})
            self._look()
        return said

    def close(self) -> None:
        """End the process."""
        self._drop()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._listener.close()

    def _replace(self, how: str) -> str:
        self._drop()
        self.start()
        return f"the coordinator {how}; another one takes over"

    def _connect(self) -> None:
        self._next_try = time.monotonic() + _RETRY
        with suppress(ElasticError, OSError):
            self._connection = Connection(
                self.address, self._secret, role="supervisor", timeout=_START_PATIENCE
            )
            self._look()

    def _on_event(self) -> None:
        connection = self._connection
        if connection is None:
            return
        if connection.wants_write:
            connection.on_writable()
        connection.on_readable()
        for message in connection.messages():
            self._heard = time.monotonic()
            self._welcomed = self._welcomed or message["kind"] == "welcome"
            self._on_message(message)
        self._look()

    def _look(self) -> None:
        """Keep the selector's entry true, and drop a connection that has ended."""
        connection = self._connection
        if connection is None:
            return
        if connection.closed is not None:
            self._drop()
            return
        self._watched.update(connection)

    def _drop(self) -> None:
        self._watched.drop()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._welcomed = False
        self._next_try = time.monotonic() + _RETRY


def _listen() -> socket.socket:
    """Return a listening socket on a free loopback port, IPv4 or else IPv6."""
    try:
        return socket.create_server(("127.0.0.1", 0), backlog=4096)
    except OSError:
        return socket.create_server(("::1", 0), family=socket.AF_INET6, backlog=4096)
