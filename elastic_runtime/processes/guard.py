"""Run one command and leave no process of it behind, however it or its starter ends.

    python -P -m elastic_runtime.processes.guard [--grace SECONDS] [--parent PID] -- COMMAND [ARG …]

The guard is a subreaper, so that everything the command starts stays below it, also after setsid. When the
command ends, is stopped by a signal to the guard, or when the process that started the guard dies, the guard
passes SIGTERM on, waits `--grace` seconds, kills whatever is left, and returns the command's exit code (128 plus
the number of the signal that ended it). A second signal ends the grace. If the guard itself is SIGKILLed, the
kernel kills the command. `--parent` names the starter, so that its death before the guard came up counts too.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from elastic_runtime.processes import tree

__all__ = ["guarded", "main"]

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)


def guarded(command: Sequence[str], *, grace: float = 5.0) -> list[str]:
    """Return `command` wrapped so that it runs under a guard with `grace` seconds to end politely.

    The calling process must be the one that starts it: when it dies, the command is stopped.
    """
    options = ["--grace", str(grace), "--parent", str(os.getpid())]
    return [sys.executable, "-P", "-m", "elastic_runtime.processes.guard", *options, "--", *command]


def _run(command: Sequence[str], grace: float, parent: int) -> int:
    watched = {*_STOPS, *_FORWARDED, signal.SIGCHLD}
    inherited = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    tree.die_with_parent(parent, signal.SIGTERM)
    tree.become_subreaper()
    guard_pid = os.getpid()

    def in_child() -> None:
        tree.die_with_parent(guard_pid, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, inherited - watched)

    try:
        process = subprocess.Popen(command, preexec_fn=in_child)
    except OSError as error:
        sys.stderr.write(f"error: cannot start {command[0]!r}: {error.strerror}\n")
        return 127 if isinstance(error, FileNotFoundError) else 126
    # The status is collected in `_watch`; a Popen that goes out of scope would take it first.
    process.returncode = 0
    return _watch(process.pid, grace, watched, parent)


def _watch(child: int, grace: float, watched: set[signal.Signals], parent: int) -> int:
    deadline: float | None = None
    orphaned = False
    while True:
        ended = tree.reap()
        if child in ended:
            return tree.exit_code(ended[child])
        remaining = 3600.0 if deadline is None else deadline - time.monotonic()
        if remaining <= 0:
            os.kill(child, signal.SIGKILL)
            deadline = None
            continue
        received = signal.sigtimedwait(watched, remaining)
        if received is None or received.si_signo == signal.SIGCHLD:
            continue
        with suppress(ProcessLookupError):
            if received.si_signo in _FORWARDED:
                os.kill(child, received.si_signo)
            elif deadline is None:
                deadline = time.monotonic() + grace
                orphaned = received.si_pid == parent and tree.has_ended(parent)
                os.kill(child, signal.SIGTERM)
            elif not (orphaned and received.si_pid == parent):
                # The kernel tells of the starter's death again for its other threads: that is not a second signal.
                os.kill(child, signal.SIGKILL)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line above and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="guard", description="Run a command and leave no process of it behind."
    )
    parser.add_argument("--grace", type=float, default=5.0, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("--parent", type=int, default=0, help="pid of the starter; 0 takes the parent found")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND [ARG …]")
    arguments = parser.parse_args(argv)
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        parser.error("no command given")
    try:
        return _run(command, arguments.grace, arguments.parent or os.getppid())
    finally:
        stubborn = tree.kill_descendants()
        if stubborn:
            sys.stderr.write(f"warning: processes that would not die: {stubborn}\n")


if __name__ == "__main__":
    sys.exit(main())
