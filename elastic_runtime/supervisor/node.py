"""The supervisor's end of one agent: a child process and the channel to it."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from elastic_runtime.agent.protocol import Channel

__all__ = ["NodeHandle", "internal_command"]


def internal_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs one of our modules.

    `-P` keeps the current folder out of the import path: a user's own `elastic_runtime/` there must not be taken
    for ours.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


_START_PATIENCE = 120.0
_PATIENCE = 15.0
_SEND_PATIENCE = 5.0


class NodeHandle:
    """A running agent. One that answers nothing for 15 seconds (120 at its start) is killed, and so is lost."""

    def __init__(self, node: int, log: Path, *, grace: float) -> None:
        """Start the agent of `node`; what it prints itself goes to `log`.

        Told to end by a signal, it gives its workers `grace` seconds.
        """
        self.node = node
        ours, theirs = socket.socketpair()
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                internal_command(
                    "elastic_runtime.agent",
                    f"--channel={theirs.fileno()}",
                    f"--node={node}",
                    f"--grace={grace}",
                ),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        theirs.close()
        ours.settimeout(_SEND_PATIENCE)
        self.channel = Channel(ours)
        self._silence = -(_START_PATIENCE - _PATIENCE)

    @property
    def pid(self) -> int:
        """Process id of the agent."""
        return self._process.pid

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
