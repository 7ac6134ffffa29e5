"""Ending a job of this machine from outside: politely, then by force, until nothing of it is left."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastic_runtime.errors import InputError, IntegrityError, JobPreempted
from elastic_runtime.jobs import locks
from elastic_runtime.jobs.account import look
from elastic_runtime.jobs.folder import JobFolder, write_json
from elastic_runtime.jobs.lookup import FoundJob

__all__ = ["end"]

_MARGIN = 10.0
"""Seconds beyond the workers' grace that a supervisor gets to end: it needs 3 for agents, 2 for each that hangs."""
_GUARD_PATIENCE = 20.0
"""Seconds in which a guard must have killed what its supervisor left behind."""
_LAUNCHER_PATIENCE = 30.0
"""Seconds in which a detached launcher must have ended after its job: it still writes the report."""
_SAME_SIGNAL = 1.1
"""Seconds after which a second SIGTERM is not taken for the first one: it ends the workers' grace."""
_START_PATIENCE = 30.0
_POLL = 0.05
_LEFTOVERS = ("secret", "agent.json", "coordinator.json", "leader")


@dataclass
class _Process:
    """A process that cannot be mistaken for a later one with the same pid."""

    pid: int
    pidfd: int

    @classmethod
    def of(cls, pid: int, what: str) -> _Process | None:
        """Open the process `pid` if its command line holds `what`."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return None
        try:
            if what.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                return cls(pid, pidfd)
        except OSError:
            pass
        os.close(pidfd)
        return None

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if the process is there."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def wait(self, seconds: float) -> bool:
        """Return whether it ended within `seconds`."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(max(0.0, seconds) * 1000))

    def wake(self) -> None:
        """Have it go on if somebody has stopped it (SIGSTOP)."""
        with suppress(OSError, IndexError):
            if Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T":
                self.send(signal.SIGCONT)

    def parent(self) -> int:
        """Return the pid of its parent; 0 if it is gone."""
        try:
            return int(Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except (OSError, IndexError):
            return 0


def end(job: FoundJob, *, grace: float | None = None) -> bool:
    """End `job` and return when nothing of it is left; False if it was over already.

    Its workers get the grace of the job between SIGTERM and SIGKILL, or at most `grace` seconds (not less than about
    one). A supervisor that does not end 10 seconds after that is killed, and its guard kills the rest. Several may do
    this at once.

    Raises `InputError` if the job cannot be reached from this machine or by this user, `JobPreempted` (exit code 3)
    if something of it would not end.
    """
    folder = job.folder
    supervisor = _supervisor(job) if folder.is_live() else None
    if supervisor is None:
        # It may have been killed this moment, and its guard be at work.
        _wait_for_rest(job, None, _guard(folder, None))
        return False
    guard = _guard(folder, supervisor)
    started = time.monotonic()
    try:
        _signal_once(folder, supervisor)
    except PermissionError as error:
        raise InputError(
            f"job {job.name!r}: pid {supervisor.pid} is of another user: stop it as that user"
        ) from error
    _wait_politely(supervisor, started, _grace(folder), grace)
    if not supervisor.wait(0.0):
        # It leaves no record, so its launcher learns from this one that it was stopped.
        with suppress(OSError, InputError):
            write_json(
                folder.record_file,
                look(job).as_record(
                    state="stopped", reason="stopped; its supervisor did not end and was killed"
                ),
            )
        supervisor.send(signal.SIGKILL)
    _wait_for_rest(job, supervisor, guard)
    return True


def _supervisor(job: FoundJob) -> _Process | None:
    """Return the supervisor, once it can be signalled; None if the job has ended meanwhile."""
    deadline = time.monotonic() + _START_PATIENCE
    while True:
        pid = job.folder.owner()
        found = _Process.of(pid, "elastic_runtime.supervisor") if pid else None
        # Its pid is its own as long as it holds the lock, and the descriptor is older than this look at the lock.
        if not job.folder.is_live():
            return None
        if found is not None and job.folder.owner() == pid:
            # One that has not begun yet would be killed by the signal, and leave no record.
            description = job.folder.description()
            if description is not None and description.get("pid") == pid:
                return found
        if found is not None:
            os.close(found.pidfd)
        if time.monotonic() > deadline:
            raise InputError(
                f"job {job.name!r} is running, but pid {pid or 'unknown'} here is not its supervisor: "
                "it runs on another machine or in a container: stop it there"
            )
        time.sleep(_POLL)


def _grace(folder: JobFolder) -> float:
    try:
        return float(json.loads((folder.path / "agent.json").read_text(encoding="utf-8"))["grace"])
    except (OSError, ValueError, KeyError, TypeError):
        return 3.0  # It is only just starting, or about to end.


def _signal_once(folder: JobFolder, supervisor: _Process) -> None:
    """Send SIGTERM, unless another `end` has: a second one would take the workers' grace away."""
    word = f"{supervisor.pid} {(folder.description() or {}).get('app_id')}"
    path = folder.path / "stop"
    descriptor = None
    with suppress(OSError):
        # Whoever holds it is about to signal; one that is stopped there is not waited for.
        descriptor = locks.take(path, patience=1.0)
    try:
        if descriptor is None or locks.read(path) != word:
            supervisor.send(signal.SIGTERM)
            if descriptor is not None:
                with suppress(OSError):
                    locks.write(descriptor, word)
    finally:
        if descriptor is not None:
            os.close(descriptor)
    supervisor.wake()


def _guard(folder: JobFolder, supervisor: _Process | None) -> _Process | None:
    """Return the guard of the job's processes, if there is one; also after its supervisor's end."""
    what = "elastic_runtime.processes.guard"
    if supervisor is not None:
        return _Process.of(supervisor.parent(), what)
    app_id = (folder.description() or {}).get("app_id")
    for entry in Path("/proc").iterdir() if app_id else ():
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if what.encode() in words and f"--app-id={app_id}".encode() in words:
                return _Process.of(int(entry.name), what)
    return None


def _wait_politely(supervisor: _Process, started: float, job_grace: float, grace: float | None) -> None:
    """Wait for the supervisor; after `grace` seconds, if given, have it give its workers no more."""
    if grace is not None and grace < job_grace:
        job_grace = max(grace, _SAME_SIGNAL)
        if not supervisor.wait(started + job_grace - time.monotonic()):
            supervisor.send(signal.SIGTERM)
    supervisor.wait(started + job_grace + _MARGIN - time.monotonic())


def _wait_for_rest(job: FoundJob, supervisor: _Process | None, guard: _Process | None) -> None:
    """Wait until nothing is left, and remove what a killed supervisor could not."""
    left = []
    if supervisor is not None and not supervisor.wait(_GUARD_PATIENCE):
        left.append(supervisor.pid)
    if guard is not None:
        guard.wake()
        if not guard.wait(_GUARD_PATIENCE):
            left.append(guard.pid)
    if left:
        pids = ", ".join(map(str, left))
        raise JobPreempted(
            f"job {job.name!r}: pid {pids} does not end, not even when killed: try again later"
        )
    deadline = time.monotonic() + _LAUNCHER_PATIENCE
    while _is_held(job.folder.launcher_log):
        if time.monotonic() > deadline:
            raise JobPreempted(f"job {job.name!r} is stopped, but its launcher still runs: try again later")
        time.sleep(_POLL)
    _tidy(job)


def _is_held(path: Path) -> bool:
    try:
        return locks.is_held(path)
    except OSError:
        return False


def _tidy(job: FoundJob) -> None:
    """Remove what a supervisor that was killed could not remove, its secret above all."""
    if not any((job.folder.path / name).exists() for name in _LEFTOVERS):
        return
    with suppress(OSError, InputError, IntegrityError):
        held = job.folder.lock(job.name)  # Not of a job that has begun here since.
        try:
            for name in _LEFTOVERS:
                (job.folder.path / name).unlink(missing_ok=True)
        finally:
            os.close(held)
