"""The agent process: `python -P -m elastic_runtime.agent --channel FD --node N`.

It starts its workers as the supervisor says and reports how each ends, within milliseconds, by pidfd. When the
supervisor is gone, or on SIGTERM, it stops its workers and ends; when the agent itself is killed, the kernel kills
its workers. SIGUSR1 and SIGUSR2 are passed on to the workers. It is a subreaper: what workers leave behind in sessions
of their own is killed when the last of them has ended.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elastic_runtime.agent.protocol import Channel
from elastic_runtime.processes import tree

__all__ = ["Agent"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)


@dataclass(frozen=True)
class _Worker:
    rank: int
    pid: int
    pidfd: int


class Agent:
    """The workers of one node and the loop that watches them."""

    def __init__(self, channel: Channel, *, grace: float) -> None:
        """Serve the supervisor at the other end of `channel`; `grace` seconds are for a SIGTERM to the agent."""
        self._grace = grace
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, _Worker] = {}
        self._round = -1
        self._kill_at: float | None = None
        self._stopping = False
        self._leaving = False

    def run(self) -> int:
        """Work until told to leave; return the exit code."""
        wake, waker = socket.socketpair()
        for end in (wake, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        self._selector.register(self._channel, selectors.EVENT_READ, self._on_message)
        self._selector.register(wake, selectors.EVENT_READ, lambda: self._on_signals(wake.recv(64)))
        self._channel.send("ready")
        while not (self._leaving and not self._workers):
            timeout = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
            for key, _ in self._selector.select(timeout):
                key.data()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill_at = None
                self._signal_all(signal.SIGKILL)
        return 0

    # --- what the supervisor says ------------------------------------------------------------------------------

    def _on_message(self) -> None:
        try:
            for message in self._channel.receive():
                if message["kind"] == "start":
                    self._start(message)
                elif message["kind"] == "ping":
                    self._say("pong")
                elif message["kind"] == "stop":
                    self._stop(message["grace"])
                else:
                    self._leave(message["grace"])
        except EOFError:
            self._selector.unregister(self._channel)
            self._leave(0.0)

    def _start(self, message: dict[str, Any]) -> None:
        self._round = message["round"]
        self._stopping = False
        pids = {}
        for worker in message["workers"]:
            try:
                pids[worker["rank"]] = self._spawn(worker)
            except OSError as error:
                self._say("exited", round=self._round, rank=worker["rank"], code=127, error=str(error))
        self._say("started", round=self._round, pids=pids)

    def _spawn(self, worker: dict[str, Any]) -> int:
        agent = os.getpid()

        def in_child() -> None:
            tree.die_with_parent(agent, signal.SIGKILL)
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)

        log = os.open(worker["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            process = subprocess.Popen(
                worker["command"],
                env={**os.environ, **worker["environment"]},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=in_child,
            )
        finally:
            os.close(log)
        started = _Worker(worker["rank"], process.pid, os.pidfd_open(process.pid))
        process.returncode = 0  # reaped in _on_exit, where the wait status is wanted
        self._workers[started.pid] = started
        self._selector.register(started.pidfd, selectors.EVENT_READ, lambda: self._on_exit(started))
        return started.pid

    def _stop(self, grace: float) -> None:
        self._stopping = True
        if not self._workers:
            self._say("stopped")
            return
        self._signal_all(signal.SIGTERM)
        # A stopped worker (SIGSTOP) acts on no signal but these two.
        self._signal_all(signal.SIGCONT)
        kill_at = time.monotonic() + grace
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    def _leave(self, grace: float) -> None:
        self._leaving = True
        self._stop(grace)

    # --- what the workers do -----------------------------------------------------------------------------------

    def _on_exit(self, worker: _Worker) -> None:
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        # What the worker started (loaders, shells) shares its process group and goes with it. As long as the worker
        # is not collected, nobody else can have the group's number.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
        _, status = os.waitpid(worker.pid, 0)
        del self._workers[worker.pid]
        if not self._workers:
            tree.kill_descendants(2.0)
        code = os.waitstatus_to_exitcode(status)
        self._say("exited", round=self._round, rank=worker.rank, code=code)
        if self._stopping and not self._workers:
            self._kill_at = None
            self._say("stopped")

    def _on_signals(self, received: bytes) -> None:
        for number in received:
            if number in (signal.SIGUSR1, signal.SIGUSR2):
                self._signal_all(signal.Signals(number))
            elif number == signal.SIGCHLD:
                tree.reap_others(self._workers)
            elif not self._leaving:
                self._say("leaving", signal=signal.Signals(number).name)
                self._leave(self._grace)

    def _signal_all(self, number: signal.Signals) -> None:
        for worker in self._workers.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker.pidfd, number)

    def _say(self, kind: str, **details: Any) -> None:
        with suppress(OSError):
            self._channel.send(kind, **details)


def main() -> int:
    """Run the agent of one node."""
    parser = argparse.ArgumentParser(prog="agent")
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--grace", type=float, required=True)
    arguments = parser.parse_args()
    tree.die_with_parent(os.getppid(), signal.SIGTERM)
    tree.become_subreaper()
    return Agent(Channel(socket.socket(fileno=arguments.channel)), grace=arguments.grace).run()


if __name__ == "__main__":
    sys.exit(main())
