"""Linux process plumbing: parent-death signals, subreaping, and killing a whole process tree."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

__all__ = [
    "become_subreaper",
    "descendants",
    "die_with_parent",
    "exit_code",
    "has_ended",
    "is_stopped",
    "kill_descendants",
    "reap",
    "reap_others",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")


def die_with_parent(parent: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `signum` to this process when the thread that started it ends.

    `parent` is the pid that the caller believes to be its parent: if it is gone already, the signal is
    raised at once, for the kernel only reports deaths that happen after this call.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def become_subreaper() -> None:
    """Have orphaned descendants become children of this process instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal (not by a debugger)."""
    return _state(pid) == b"T"


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or only still to be collected."""
    return _state(pid) in (b"", b"Z", b"X")


def _state(pid: int) -> bytes:
    """Return the kernel's letter for the state of a process; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return b""


def _parents() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if fields[0] != b"Z":
                    yield int(entry.name), int(fields[1])


def _tree() -> dict[int, list[int]]:
    tree: dict[int, list[int]] = {}
    for pid, parent in _parents():
        tree.setdefault(parent, []).append(pid)
    return tree


def descendants(pid: int, *, keep: Collection[int] = ()) -> list[int]:
    """Return the pids of every living process below `pid`, parents before their children; not `keep` and below."""
    tree = _tree()
    found: list[int] = []
    queue = list(tree.get(pid, []))
    while queue:
        current = queue.pop(0)
        if current in keep:
            continue
        found.append(current)
        queue.extend(tree.get(current, []))
    return found


def kill_descendants(patience: float = 5.0, *, keep: Collection[int] = ()) -> list[int]:
    """Kill and reap every process below this one; return the pids that would not die in `patience` seconds.

    The children in `keep`, and what is below them, are left alone, and not collected either.
    Call `become_subreaper` first: then what a dying child leaves behind becomes our child and is found too.
    Looks again until nothing is left, because a process may fork while it is being killed.
    """
    deadline = time.monotonic() + patience
    while True:
        alive = descendants(os.getpid(), keep=keep)
        for pid in alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        reap_others(keep)
        if not alive:
            return []
        if time.monotonic() > deadline:
            return alive
        time.sleep(0.005)


def reap() -> dict[int, int]:
    """Collect every child that has ended; return its wait status by pid."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


def reap_others(keep: Collection[int]) -> None:
    """Collect every child that has ended, but for those in `keep`, whose status somebody else wants."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in keep:
            return  # One in `keep` hides those behind it until it is collected.
        os.waitpid(found.si_pid, 0)


def exit_code(status: int) -> int:
    """Return a wait status as a shell does: the exit code, or 128 plus the signal's number."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
