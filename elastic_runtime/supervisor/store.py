"""The supervisor's end of the store host: a fresh TCP store, on a port of its own, for each round."""

from __future__ import annotations

import os
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

from elastic_runtime.supervisor.node import internal_command

__all__ = ["StoreHost"]

_START_PATIENCE = 180.0
_PATIENCE = 15.0


class StoreHost:
    """A child process that serves stores; started again when it has died."""

    def __init__(self, log: Path) -> None:
        """Prepare; the process starts with the first store. What it prints goes to `log`."""
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._silence = 0.0

    def new_store(self) -> tuple[str, int]:
        """Return address and port of a new, empty store on the loopback interface.

        The port takes connections at once; they are answered when the host has started. Raises `OSError` if this
        machine has no loopback address.
        """
        listener = _listen()
        host, port = listener.getsockname()[:2]
        with listener:
            for _ in range(2):
                self._ensure()
                assert self._control is not None
                with suppress(BrokenPipeError, ConnectionResetError):
                    socket.send_fds(self._control, [f"{host} {port}".encode()], [listener.fileno()])
                    break
        return host, port

    @property
    def pid(self) -> int | None:
        """Process id of the host, if it was started."""
        return self._process.pid if self._process is not None else None

    def lost(self, seconds: float) -> str:
        """Return how a started host was lost, once; empty while it serves or was never needed.

        Call it often, with the `seconds` that went by. One that answers nothing for 15 seconds (180 at its start,
        for it loads torch) is killed.
        """
        if self._process is None or self._control is None:
            return ""
        if not self.alive():
            how = f"ended with code {self._process.returncode}"
        else:
            with suppress(OSError):
                while self._control.recv(16, socket.MSG_DONTWAIT):
                    self._silence = 0.0
            before, self._silence = self._silence, self._silence + seconds
            if self._silence < _PATIENCE:
                if int(before) != int(self._silence):
                    with suppress(OSError):
                        self._control.send(b"ping", socket.MSG_DONTWAIT)
                return ""
            how = "no longer answered"
        self.close()
        return how

    def alive(self) -> bool:
        """Return whether the host runs."""
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """Stop the host."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _ensure(self) -> None:
        if self.alive():
            return
        self.close()
        self._silence = -(_START_PATIENCE - _PATIENCE)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._log.open("ab") as file:
            self._process = subprocess.Popen(
                internal_command("elastic_runtime.supervisor.store_host", str(theirs.fileno())),
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )


def _listen() -> socket.socket:
    """Return a listening socket on a free loopback port: IPv4, or IPv6 where there is no IPv4."""
    last: OSError | None = None
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            last = error
            continue
        try:
            listener.bind((host, 0))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            last = error
            continue
        return listener
    assert last is not None
    raise last
