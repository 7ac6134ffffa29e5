"""What the zygote is asked, and what is answered.

One request is one packet on a SOCK_SEQPACKET pair of the machine: every agent has a copy of the sending end, every
zygote one of the receiving end, and the supervisor keeps both. So a request that comes before the zygote is up waits,
and one that a zygote left unread is read by its successor. A request carries descriptors only:

    link     one end of a socket pair of its own: what becomes of this worker is said there
    body     a memory file with the JSON of a `Program`, of any size
    log      where the worker's output goes
    channel  a socket for the worker itself, which finds its number in ELASTIC_CHANNEL; or none

Said on the link, one JSON object a packet:

    started  pid, keeper (its pid), and the worker's pidfd as a descriptor
    ended    code: the exit code, or minus the number of the signal that ended the worker
    failed   error: the worker could not be forked
    refused  there is no zygote for this job: start the worker some other way

The link closes when nothing is left of the worker. A link that closes before anything was said belonged to a zygote
that died before it forked, or a keeper that died before it let the worker run: ask again.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["CHANNEL", "Program", "receive", "request_pair", "send_message"]

CHANNEL = "ELASTIC_CHANNEL"
"""Environment variable with the number of the descriptor of a worker's own socket."""
_PACKET = 1 << 12


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a worker runs, and how: all that decides what it sees of the world."""

    script: str | None = None
    """Path of a Python file; None for a module."""
    module: str | None = None
    """Name of a module to run as `python -m`; None for a script."""
    arguments: Sequence[str] = ()
    """Command line behind the program."""
    environment: Mapping[str, str]
    """The whole environment; nothing is inherited."""
    cwd: str
    """Working folder."""

    def words(self) -> list[str]:
        """Return what follows `python` on a command line that runs the same."""
        program = [self.script] if self.script is not None else ["-m", self.module or ""]
        return [*program, *self.arguments]

    def to_bytes(self) -> bytes:
        """Return it as JSON; bytes in names that are no valid text survive."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Program:
        """Return what `to_bytes` wrote."""
        return cls(**json.loads(data))


def request_pair() -> tuple[socket.socket, socket.socket]:
    """Return the sending and the receiving end for the requests of one machine."""
    sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    return sender, receiver


def send_message(
    connection: socket.socket, kind: str, descriptors: Sequence[int] = (), **details: Any
) -> None:
    """Send one message. Raises `OSError` if the other side is gone, or would have to be waited for."""
    data = json.dumps({"kind": kind, **details}).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    # Not socket.send_fds and recv_fds: they take flags and forget them.
    connection.sendmsg([data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def receive(connection: socket.socket, *, most: int = 8) -> tuple[dict[str, Any], list[int]]:
    """Return the next message and its descriptors, which no program started later inherits.

    Raises `BlockingIOError` if there is none, and `EOFError` once the other side is gone.
    """
    rights = array.array("i")
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    try:
        data, ancillary, _, _ = connection.recvmsg(_PACKET, socket.CMSG_LEN(most * rights.itemsize), flags)
    except ConnectionError:
        raise EOFError from None
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            rights.frombytes(content[: len(content) - len(content) % rights.itemsize])
    descriptors = rights.tolist()
    if not data:
        for descriptor in descriptors:
            os.close(descriptor)
        raise EOFError
    return json.loads(data), descriptors
