"""The TCP sockets of this process, and how a thread that is blocked in one of them is set free.

gloo notices a dead peer when the connection closes, but a silent or stopped one only after the group's timeout, and
`abort()` does nothing there. shutdown(2) of the survivor's own end sets it free in milliseconds. Only the reading
direction: gloo notices the end of the stream in its event loop, fails everything that is pending and closes the
connection, which frees the peer too. When a write fails first, gloo (torch 2.13) loses the send that it was about to
start, and whoever waits for that one waits for the whole timeout. A listening socket is never touched: gloo ends the
process when its listener fails.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress

__all__ = ["close_in_child", "shut_down", "socket_inodes"]

_LINK = re.compile(r"socket:\[(\d+)\]")


def socket_inodes() -> frozenset[int]:
    """Return the inode of every open socket of this process. An inode, unlike a descriptor, is not used again."""
    return frozenset(inode for _, inode in _sockets())


def shut_down(mine: Callable[[int], bool], how: int = socket.SHUT_RD) -> int:
    """Shut down every connected TCP socket whose inode `mine` accepts; return how many. Safe in any thread."""
    count = 0
    for descriptor, inode in _sockets():
        if not mine(inode):
            continue
        try:
            copy = os.dup(descriptor)
        except OSError:
            continue
        try:
            # The descriptor may have been closed and used again between listing and copying.
            if os.fstat(copy).st_ino == inode:
                count += _shut_down(copy, how)
        except OSError:
            continue
        finally:
            os.close(copy)
    return count


def close_in_child(inodes: frozenset[int]) -> None:
    """Close the sockets with these inodes: for a forked helper, which would keep its parent's connections open."""
    for descriptor, inode in _sockets():
        if inode in inodes:
            with suppress(OSError):
                os.close(descriptor)


def _shut_down(descriptor: int, how: int) -> int:
    connection = socket.socket(fileno=descriptor)
    try:
        if (
            connection.family not in (socket.AF_INET, socket.AF_INET6)
            or connection.type != socket.SOCK_STREAM
        ):
            return 0
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return 0
        connection.shutdown(how)
        return 1
    finally:
        connection.detach()


def _sockets() -> list[tuple[int, int]]:
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  called while a peer's death is waited out: no objects
        with suppress(OSError):
            if match := _LINK.fullmatch(os.readlink(f"/proc/self/fd/{name}")):  # noqa: PTH115
                found.append((int(name), int(match[1])))
    return found
