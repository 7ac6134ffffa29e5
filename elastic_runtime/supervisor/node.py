"""The supervisor's end of one agent: a child process and the channel to it."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from elastic_runtime.agent.protocol import Channel
from elastic_runtime.processes.command import internal_command

__all__ = ["NodeHandle"]

_START_PATIENCE = 120.0
_PATIENCE = 15.0
_SEND_PATIENCE = 5.0


class NodeHandle:
    """A running agent. One that answers nothing for 15 seconds (120 at its start) is killed, and so is lost."""

    def __init__(self, node: str, log: Path, *, config: Path, requests: socket.socket) -> None:
        """Start the agent of `node`; what it prints itself goes to `log`.

        `config` is the file of its `AgentConfig`; it asks for workers on `requests`.
        """
        self.node = node
        ours, theirs = socket.socketpair()
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                internal_command(
                    "elastic_runtime.agent",
                    f"--channel={theirs.fileno()}",
                    f"--node={node}",
                    f"--config={config}",
                    f"--zygote={requests.fileno()}",
                ),
                pass_fds=[theirs.fileno(), requests.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        theirs.close()
        ours.settimeout(_SEND_PATIENCE)
        self.channel = Channel(ours)
        self._silence = -(_START_PATIENCE - _PATIENCE)
        self._keepers: dict[int, int] = {}

    @property
    def pid(self) -> int:
        """Process id of the agent."""
        return self._process.pid

    @property
    def keepers(self) -> set[int]:
        """Process ids of the keepers of its present workers."""
        return set(self._keepers)

    def keep(self, keepers: Iterable[int]) -> None:
        """Note keepers of workers that have started, and forget those that have ended."""
        for pid, pidfd in list(self._keepers.items()):
            if select.select([pidfd], [], [], 0)[0]:
                os.close(pidfd)
                del self._keepers[pid]
        for pid in keepers:
            with suppress(OSError):  # It may have ended already.
                self._keepers[pid] = os.pidfd_open(pid)

    def end_keepers(self, timeout: float) -> None:
        """Wait until nothing is left of a gone agent's workers; kill what takes over `timeout` seconds."""
        poll = select.poll()
        for pidfd in self._keepers.values():
            poll.register(pidfd, select.POLLIN)
            # A stopped one would only be killed at the end, and all that depends on it would wait.
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        left = set(self._keepers.values())
        deadline = time.monotonic() + timeout
        while left and (remaining := deadline - time.monotonic()) > 0:
            for pidfd, _ in poll.poll(remaining * 1000):
                poll.unregister(pidfd)
                left.discard(pidfd)
        for pidfd in left:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        self._forget_keepers()

    def _forget_keepers(self) -> None:
        for pidfd in self._keepers.values():
            os.close(pidfd)
        self._keepers = {}

    def send(self, kind: str, **details: Any) -> None:
        """Send a message; that the agent is gone shows when its channel is read. One that reads nothing is killed."""
        try:
            self.channel.send(kind, **details)
        except TimeoutError:
            self.kill()
        except OSError:
            pass

    def heard(self) -> None:
        """Note that the agent said something."""
        self._silence = 0.0

    def silent(self, seconds: float) -> bool:
        """Note `seconds` without a word and ask for one; return whether it was too long, and the agent killed."""
        self._silence += seconds
        if self._silence < _PATIENCE:
            self.send("ping")
            return False
        self.kill()
        return True

    def kill(self) -> None:
        """Kill the agent, and with it its workers."""
        self._process.kill()

    def close(self) -> None:
        """Forget the agent: it sees its channel closed, stops its workers and ends."""
        self.channel.close()

    def wait(self, timeout: float) -> None:
        """Wait for the agent's end and collect it; kill it if that takes longer than `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
