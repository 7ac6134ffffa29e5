"""Workers that are started by exec: for a job whose preloads are not safe to fork."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

from elastic_runtime.agent import forked
from elastic_runtime.agent.requests import CHANNEL, Program
from elastic_runtime.agent.warm import Ended, Event, Gone
from elastic_runtime.processes import tree

__all__ = ["SpawnedWorker"]


class SpawnedWorker:
    """A child process that runs the interpreter anew. It dies with this process, which collects it."""

    keeper: int | None = None

    def __init__(self, program: Program, *, log: int, channel: int | None = None) -> None:
        """Start it; the arguments are those of `WarmWorker`. Raises `OSError` if it cannot be started.

        It has started when this returns: no event says so.
        """
        starter = os.getpid()

        def in_child() -> None:
            tree.die_with_parent(starter, signal.SIGKILL)
            forked.default_signals()

        process = subprocess.Popen(
            [sys.executable, *program.words()],
            env={**program.environment, **({} if channel is None else {CHANNEL: str(channel)})},
            cwd=program.cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[] if channel is None else [channel],
            preexec_fn=in_child,
        )
        process.returncode = 0  # Collected in `read`, where the wait status is wanted.
        self.pid: int | None = process.pid
        self._pidfd = os.pidfd_open(process.pid)

    def fileno(self) -> int:
        """See `Worker`."""
        return self._pidfd

    def read(self) -> list[Event]:
        """See `Worker`."""
        if self.pid is None:
            return []
        ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return []
        # What the worker started (loaders, shells) shares its process group and goes with it. As long as the worker
        # is not collected, nobody else can have the group's number.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.pid = None
        return [Ended(os.waitstatus_to_exitcode(status)), Gone()]

    def send_signal(self, number: signal.Signals) -> None:
        """See `Worker`."""
        if self.pid is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def cancel(self) -> bool:
        """See `Worker`."""
        return False

    def close(self) -> None:
        """See `Worker`. A worker that still runs ends with this process."""
        os.close(self._pidfd)
