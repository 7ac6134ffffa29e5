"""The stores of a node: a fresh TCP store, on a port of its own, for each round that this node leads."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

from elastic_runtime.agent.requests import Program
from elastic_runtime.agent.spawned import SpawnedWorker
from elastic_runtime.agent.warm import Ended, Failed, Lost, Refused, Started, WarmWorker, Worker
from elastic_runtime.processes import tree

__all__ = ["Stores"]

_START_PATIENCE = 180.0
_PATIENCE = 15.0
_STOPPED_PATIENCE = 1.0
"""Seconds that the process may be stopped (SIGSTOP) before it is killed: a round that forms waits for it."""


class Stores:
    """One listening socket for the next round, and a process that serves the stores of the last ones.

    The port is known and takes connections before the process runs: it is forked from the zygote when the first
    store is used, and started again when it has died.
    """

    def __init__(self, log: Path, *, address: str, requests: socket.socket | None = None) -> None:
        """Prepare. What the process prints goes to `log`; the stores listen at `address`.

        `requests` is where the zygote is asked; without it the process imports torch itself.
        """
        self._log = log
        self._address = address
        self._requests = requests
        self._next: socket.socket | None = None
        self._worker: Worker | None = None
        self._control: socket.socket | None = None
        self._theirs: socket.socket | None = None
        self._ended = ""
        self._silence = 0.0
        self._stopped = 0.0

    @property
    def next(self) -> tuple[str, int]:
        """Host and port of the store of the next round. Raises `OSError` if no port can be had."""
        if self._next is None:
            self._next = _listen(self._address)
        host, port = self._next.getsockname()[:2]
        return host, port

    def use(self, store: tuple[str, int]) -> bool:
        """Serve the store at this address, if it is the next one here; return whether it was."""
        if self._next is None or self._next.getsockname()[:2] != store:
            return False
        listener, self._next = self._next, None
        with listener:
            for _ in range(2):
                self._ensure()
                assert self._control is not None
                with suppress(BrokenPipeError, ConnectionResetError):
                    body = f"{store[0]} {store[1]}".encode()
                    socket.send_fds(self._control, [body], [listener.fileno()])
                    break
        return True

    @property
    def processes(self) -> set[int]:
        """Process ids of the process and of its keeper, as far as there are any."""
        worker = self._worker
        found = (worker.pid, worker.keeper) if worker is not None else ()
        return {pid for pid in found if pid is not None}

    def lost(self, seconds: float) -> str:
        """Return how a started process was lost, once; empty while it serves or was never needed.

        Call it often, with the `seconds` that went by. One that answers nothing for 15 seconds (180 at its start)
        is killed.
        """
        if self._worker is None or self._control is None:
            return ""
        if (pid := self._worker.keeper) is not None and tree.is_stopped(pid):
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)  # It alone says when the process ends.
        stopped = self._worker.pid is not None and tree.is_stopped(self._worker.pid)
        self._stopped = self._stopped + seconds if stopped else 0.0
        if not self._alive():
            how = self._ended
        elif self._stopped >= _STOPPED_PATIENCE:
            how = "was stopped by a signal"
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

    def close(self) -> None:
        """Stop the process; the store of the next round stays."""
        if self._control is not None:
            self._control.close()
            self._control = None
        self._let_go()
        if self._worker is not None:
            if not self._worker.cancel():
                self._worker.send_signal(signal.SIGKILL)
                self._worker.close()
            self._worker = None
        self._ended = ""
        self._stopped = 0.0

    def _alive(self) -> bool:
        if self._worker is None:
            return False
        for event in self._worker.read():
            match event:
                case Started():
                    self._let_go()
                case Lost():
                    self._ask()
                case Refused():
                    self._requests = None
                    self._ask()
                case Ended(code):
                    self._ended = f"ended with code {code}"
                case Failed(error):
                    self._ended = f"could not be started: {error}"
        return not self._ended

    def _ensure(self) -> None:
        if self._alive():
            return
        self.close()
        self._silence = -(_START_PATIENCE - _PATIENCE)
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ask()

    def _ask(self) -> None:
        """Start the process at the other end of the control socket, which keeps what was said to it meanwhile."""
        assert self._theirs is not None
        if self._worker is not None:
            self._worker.close()
        program = Program(
            module="elastic_runtime.agent.store_host",
            # A folder of the user's with our name must not be taken for ours.
            environment={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
            cwd=os.getcwd(),  # noqa: PTH109 - as the environment has it
        )
        log = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if self._requests is not None:
                self._worker = WarmWorker(self._requests, program, log=log, channel=self._theirs.fileno())
            else:
                self._worker = SpawnedWorker(program, log=log, channel=self._theirs.fileno())
                self._let_go()
        finally:
            os.close(log)

    def _let_go(self) -> None:
        """Close the process's end here, once it has its own."""
        if self._theirs is not None:
            self._theirs.close()
            self._theirs = None


def _listen(address: str) -> socket.socket:
    """Return a listening socket on a free port; in place of an IPv4 loopback that is not there, the IPv6 one."""
    last: OSError | None = None
    for host in dict.fromkeys((address, "::1" if address == "127.0.0.1" else address)):
        try:
            listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
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
