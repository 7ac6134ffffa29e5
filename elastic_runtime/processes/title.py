"""What `ps` shows of this process: the command line, written anew in place.

A fork shows its parent's command line. The kernel shows the bytes where the arguments lie, so a process can write
others there, as long as they fit: `room` is what a parent appends to its own arguments to make place for longer ones.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["room", "set_title"]

_ROOM = 512


def room() -> str:
    """Return an argument that does nothing but take place."""
    return " " * _ROOM


def set_title(words: Sequence[str]) -> None:
    """Show `words` as the command line of this process, cut to the place there is.

    Call it only in a process whose interpreter does not read its arguments any more. Where the kernel does not say
    where they lie, nothing changes.
    """
    try:
        # Fields 48 and 49 of proc_pid_stat(5), counted behind the command's name, which may hold spaces.
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])
    except (OSError, IndexError, ValueError):
        return
    size = end - start
    if not start or size <= 1:
        return
    # The last byte stays zero: any other makes the kernel read on into the environment.
    text = b"\0".join(os.fsencode(word) for word in words)[: size - 1]
    ctypes.memmove(start, text.ljust(size, b"\0"), size)
