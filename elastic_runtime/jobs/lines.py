"""Reading the log of a rank by lines: from its last ones on, as it grows, without what was given back to the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["LogReader"]

_BLOCK = 1 << 18
_LONGEST_LINE = 1 << 16
"""Bytes after which a line without an end is shown in pieces, so that it does not have to fit into memory."""


class LogReader:
    """One log file, read from its start or from its last lines on."""

    def __init__(self, path: Path) -> None:
        """Read `path`, which may not be there yet."""
        self._path = path
        self._offset = 0
        self._rest = b""

    def skip_to_last(self, lines: int) -> None:
        """Go to the last `lines` lines of the file as it is now; a last one that is not complete counts."""
        try:
            with self._path.open("rb") as file:
                self._offset = _start_of_last(file.fileno(), lines)
        except FileNotFoundError:
            return

    def lines(self, *, last: bool = False) -> Iterator[str]:
        """Yield the complete lines that are new, without their end; with `last` what follows the last end as well."""
        try:
            with self._path.open("rb") as file:
                while data := _read(file.fileno(), self._offset):
                    self._offset = data[0]
                    yield from self._split(data[1])
        except FileNotFoundError:
            return
        if last and self._rest:
            yield _text(self._rest)
            self._rest = b""

    def _split(self, data: bytes) -> Iterator[str]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        yield from map(_text, lines)
        if len(self._rest) > _LONGEST_LINE:
            yield _text(self._rest)
            self._rest = b""


def _text(line: bytes) -> str:
    # What was given back to the disk reads as zeros.
    return line.replace(b"\0", b"").removesuffix(b"\r").decode("utf-8", "replace")


def _read(descriptor: int, offset: int) -> tuple[int, bytes] | None:
    """Return the next block of data at or after `offset`, and where it ends; None at the end of the file."""
    try:
        start = os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError:
        return None  # Nothing but a hole, or nothing at all.
    data = os.pread(descriptor, _BLOCK, start)
    return (start + len(data), data) if data else None


def _start_of_last(descriptor: int, lines: int) -> int:
    """Return the offset at which the last `lines` lines begin."""
    end = os.fstat(descriptor).st_size
    if lines == 0 or end == 0:
        return end
    # The end of the last line is not the start of another one.
    wanted = lines + (os.pread(descriptor, 1, end - 1) == b"\n")
    position = end
    while position > 0:
        start = max(0, position - _BLOCK)
        block = os.pread(descriptor, position - start, start)
        if not block.strip(b"\0"):
            return position  # A hole: what was there was given back.
        found = block.count(b"\n")
        if found >= wanted:
            place = len(block)
            for _ in range(wanted):
                place = block.rindex(b"\n", 0, place)
            return start + place + 1
        wanted -= found
        position = start
    return 0
