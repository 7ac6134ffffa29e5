"""The workers' log files as one stream of rank-prefixed lines, and their size kept in bounds.

Workers write straight into their files, so that no reader can slow them down and nothing is lost however they end.
The stream follows the files. A file that grows over the limit has its oldest blocks given back to the disk (a hole:
offsets stay, and the writers notice nothing).
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

__all__ = ["LogStream"]

_CHUNK = 1 << 18
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_LONGEST_LINE = 1 << 16
_ROLE = "elastic"
_TORCHX, _COMBINED = "stdout.log", "combined.log"
"""torchx's local scheduler keeps our standard output in ROLE/0/stdout.log, and a copy of that and of stderr."""


class _Bounded:
    """A growing file that is kept under a limit on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.freed = 0

    def bound(self, limit: int) -> None:
        """Give the oldest blocks back to the disk when the file is over `limit` bytes."""
        with suppress(FileNotFoundError):
            size = self.path.stat().st_size
            end = (size - limit // 2) // 4096 * 4096
            if size - self.freed > limit and _punch(self.path, self.freed, end - self.freed):
                self.freed = end


class _Follower(_Bounded):
    def __init__(self, path: Path, prefix: bytes) -> None:
        super().__init__(path)
        self.prefix = prefix
        self._offset = 0
        self._rest = b""

    def _skip_freed(self, write: Callable[[bytes], object]) -> None:
        """Go on after what `bound` gave back before it could be passed on, and say so."""
        if self._offset < self.freed:
            skipped = self.freed - self._offset
            write(
                b"%b(%d bytes were over the log limit before they could be shown)\n" % (self.prefix, skipped)
            )
            self._offset, self._rest = self.freed, b""

    def read(self, write: Callable[[bytes], object]) -> int:
        """Pass one chunk of new lines on; return how many bytes were new."""
        self._skip_freed(write)
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(_CHUNK)
        except FileNotFoundError:
            return 0
        if not data:
            return 0
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        write(b"".join(self.prefix + line + b"\n" for line in lines))
        return len(data)

    def finish(self, write: Callable[[bytes], object]) -> None:
        """Pass on a last line that has no newline."""
        if self._rest:
            write(self.prefix + self._rest + b"\n")
            self._rest = b""


class LogStream:
    """Follows the log files of all ranks."""

    def __init__(self, *, limit: int, output: BinaryIO | None = None) -> None:
        """Write to `output` (standard output by default); keep each file under `limit` bytes on disk."""
        self._limit = limit
        self._output = output or sys.stdout.buffer
        self._closed = False
        self._copies = _copies_of(self._output)
        self._followers: dict[int, _Follower] = {}

    def follow(self, rank: int, path: Path) -> None:
        """Follow the file of `rank`, from its start if it is new."""
        if rank not in self._followers:
            self._followers[rank] = _Follower(path, f"[rank{rank}] ".encode())

    def rename(self, number: int, rank: int) -> None:
        """Show what comes from log file `number` as of `rank`: its worker has another rank from now on."""
        if number in self._followers:
            self._followers[number].prefix = f"[rank{rank}] ".encode()

    def pump(self) -> bool:
        """Pass on what is new: at most one chunk a rank, so that the caller is not held up.

        Return whether there may be more.
        """
        more = False
        for follower in self._followers.values():
            more = follower.read(self._write) == _CHUNK or more
            follower.bound(self._limit)
        for copy in self._copies:
            copy.bound(self._limit * max(1, len(self._followers)))
        self._flush()
        return more

    def drain(self) -> None:
        """Pass on everything, also a last line without a newline."""
        for follower in self._followers.values():
            while follower.read(self._write):
                pass
            follower.finish(self._write)
        self._flush()

    def say(self, line: str) -> None:
        """Write a line of the supervisor's own."""
        self._write(line.encode("utf-8", "replace") + b"\n")
        self._flush()

    def _write(self, data: bytes) -> None:
        # The reader may be gone (a closed pipe, a full disk); the log files still have everything.
        if not self._closed:
            try:
                self._output.write(data)
            except (OSError, ValueError):
                self._closed = True

    def _flush(self) -> None:
        if not self._closed:
            try:
                self._output.flush()
            except (OSError, ValueError):
                self._closed = True


def _copies_of(output: BinaryIO) -> list[_Bounded]:
    """Return the files that the stream goes into: its own, and the combined one that torchx copies that into."""
    try:
        descriptor = output.fileno()
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return []
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
    except (OSError, ValueError):
        return []
    return [
        _Bounded(path),
        *(
            [_Bounded(path.with_name(_COMBINED))]
            if path.name == _TORCHX and path.parent.parent.name == _ROLE
            else []
        ),
    ]


def _punch(path: Path, start: int, length: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(path, os.O_WRONLY)
    try:
        mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
        result: int = libc.fallocate(descriptor, mode, ctypes.c_long(start), ctypes.c_long(length))
        return result == 0
    finally:
        os.close(descriptor)
