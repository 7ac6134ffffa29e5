"""Leadership on one machine: a file lock, and the term in the same file.

The kernel releases the lock when its holder is gone, however it ended, and not before: a paused holder keeps it, so
whoever watches it has to kill it. A child that was forked without exec shares the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import zlib
from pathlib import Path

from elastic_runtime.errors import InputError, IntegrityError
from elastic_runtime.membership.leadership.lease import Lease

__all__ = ["MachineLock"]

_POLL = 0.02
_SLOT = 64
_SLOTS = 2


class MachineLock:
    """`Leadership` of whoever holds the lock on a file; works on every file system that has flock."""

    interval = 0.5

    def __init__(self, path: Path, *, holder: str = "") -> None:
        """Use the file at `path`, which is made when it is first needed. `holder` is shown in logs."""
        self._path = path
        self._holder = holder or f"pid {os.getpid()}"
        self._descriptor = -1
        self._lease: Lease | None = None

    def acquire(self, timeout: float, *, above: int = 0) -> Lease | None:
        """Take the lock within `timeout` seconds; see `Leadership`.

        Raises `InputError` if the file cannot be used, and `IntegrityError` if it does not hold what we write.
        """
        assert self._lease is None, "the lease is held already"
        end = time.monotonic() + timeout
        while True:
            if self._try_lock():
                try:
                    term = max(self._read(), above) + 1
                    self._write(term)
                except BaseException as error:
                    self.release()
                    if isinstance(error, OSError):
                        raise self._unusable(error) from error
                    raise
                self._lease = Lease(self, term=term, holder=self._holder)
                return self._lease
            left = end - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(_POLL, left))

    def renew(self) -> bool:
        """Return whether the lock is held: not when its file was removed or replaced, for then another can be had."""
        if self._lease is None or not self._is_ours():
            self.release()
            return False
        return True

    def release(self) -> None:
        """Give the lock up."""
        if self._lease is not None:
            self._lease.end()
            self._lease = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def close(self) -> None:
        """Release."""
        self.release()

    def _unusable(self, error: OSError) -> InputError:
        return InputError(
            f"lock {str(self._path)!r}: {error.strerror}: give a file in a folder that can be written"
        )

    def _try_lock(self) -> bool:
        try:
            self._descriptor = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600
            )
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            return False
        except OSError as error:
            self.release()
            raise self._unusable(error) from error
        if not self._is_ours():
            # Removed or replaced between the two calls: what we hold is the lock of nothing.
            self.release()
            return False
        return True

    def _is_ours(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except OSError:
            return False

    # The term stands in two slots that are written in turn: a write that is cut short spoils one that was not used
    # yet, and the other still has the term before it.

    def _read(self) -> int:
        terms = [0]
        data = os.pread(self._descriptor, _SLOT * _SLOTS, 0)
        for slot in range(_SLOTS):
            with contextlib.suppress(ValueError):
                text, check = data[slot * _SLOT : (slot + 1) * _SLOT].split()
                if int(check, 16) == zlib.crc32(text):
                    terms.append(int(text))
        if data.strip(b"\0") and terms == [0]:
            raise IntegrityError(
                f"lock {str(self._path)!r}: holds no term: remove it once nothing of the job runs"
            )
        return max(terms)

    def _write(self, term: int) -> None:
        text = b"%020d" % term
        record = (b"%s %08x" % (text, zlib.crc32(text))).ljust(_SLOT - 1) + b"\n"
        os.pwrite(self._descriptor, record, term % _SLOTS * _SLOT)
        os.fsync(self._descriptor)
        if term == 1:
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
