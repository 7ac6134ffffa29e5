"""Files that a living process holds (flock) and in whose first line it says who it is.

The kernel lets go of a lock when its holder ends, however it ends; so a lock says who lives, and nothing goes stale.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

__all__ = ["is_held", "read", "take", "write"]

_PATIENCE = 0.25
"""Seconds for which a taker tries again: somebody may just look whether the lock is held, and holds it for that."""
_LONGEST = 4096


def take(path: Path, *, patience: float = _PATIENCE) -> int | None:
    """Lock the file at `path`, made if need be, and return its descriptor; the lock is held until that is closed.

    Returns None if another process holds it, after `patience` seconds. The descriptor is not inherited across exec.
    Raises `OSError` if the file cannot be opened.
    """
    deadline = time.monotonic() + patience
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, descriptor):
                return descriptor
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                return None
            time.sleep(0.005)
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # Removed, and perhaps made anew, between opening and locking.


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def is_held(path: Path) -> bool:
    """Return whether a process holds the file at `path` now. Raises `OSError` if that cannot be found out."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared, so that two that look do not take each other for the holder.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def write(descriptor: int, text: str) -> None:
    """Make `text` the first line of a held file; a reader sees the old line or this one."""
    data = text.encode("utf-8", "surrogateescape") + b"\n"
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))


def read(path: Path) -> str:
    """Return the first line of a file that `write` wrote, whether it is held or not; empty if there is none."""
    try:
        with path.open("rb") as file:
            return file.read(_LONGEST).partition(b"\n")[0].decode("utf-8", "surrogateescape")
    except OSError:
        return ""
