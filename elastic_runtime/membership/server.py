"""The membership service's socket: many authenticated clients, and many that are not, in one asyncio loop.

Nothing here knows what a message means. What a stranger can cost is bounded: a challenge of 46 bytes, one buffer of
4 KiB, a place among the unauthenticated ones (of which the oldest has to go when there are too many) for a few
seconds. It gets no answer. Who is authenticated is never dropped in favour of a stranger.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from elastic_runtime.errors import InputError
from elastic_runtime.membership.session import Opened, Peer, Received, ServerSession
from elastic_runtime.membership.sockets import prepare_socket, raise_descriptor_limit

__all__ = ["Handler", "Limits", "Server"]

log = logging.getLogger(__name__)

_READ = 64 * 1024
_ACCEPTS_A_TURN = 32
_SWEEP = 0.25
_RESERVED = 64
_LINGER = 2.0
_ACCEPT_PAUSE = 0.1
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What clients may cost."""

    handshake: float = 5.0
    """Seconds within which a client must have proved itself."""
    unauthenticated: int = 2048
    """Connections that have not; above it the oldest of them is dropped."""
    unauthenticated_a_host: int = 256
    """The same for one address (IPv6: /64 network), other than this machine's own."""
    unread: int = 1024 * 1024
    """Bytes that an authenticated client may leave unread (besides the kernel's buffers) before it is dropped."""

    def __post_init__(self) -> None:
        """Raise `InputError` for a limit that is not positive."""
        for name, value in vars(self).items():
            if not value > 0:
                raise InputError(f"limits: {name} {value!r} is not above 0: leave it out for the default")


class Handler(Protocol):
    """What the layer above does. Called in the loop's thread; what it raises ends that connection and is reported.

    None of these is called from within `send` or `close`. Of one connection: first `on_open`, once; last `on_close`,
    once; nothing after `close`, except `on_close`.
    """

    def on_open(self, connection: int, peer: Peer) -> None:
        """A client has proved itself."""

    def on_message(self, connection: int, message: dict[str, Any]) -> None:
        """An authentic message came."""

    def on_close(self, connection: int, why: str) -> None:
        """The connection is gone: `eof`, `reset`, `timed out`, `slow reader`, `closed` (here) or a `Refused` one."""


def _host_key(address: str) -> str:
    """What counts as one host; empty for this machine, which is not limited apart (all local agents share it)."""
    host = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(host, ipaddress.IPv6Address):
        host = host.ipv4_mapped or host
    if host.is_loopback:
        return ""
    if isinstance(host, ipaddress.IPv6Address):
        return host.packed[:8].hex()
    return str(host)


class _Connection:
    """One socket with its session and what it has not read yet."""

    __slots__ = ("closing", "deadline", "fd", "heard", "host", "number", "session", "socket", "unsent")

    def __init__(
        self, number: int, connection: socket.socket, host: str, secret: bytes, deadline: float
    ) -> None:
        self.number = number
        self.socket = connection
        self.fd = connection.fileno()
        self.host = host
        self.session = ServerSession(secret)
        self.deadline = deadline
        self.heard = 0.0
        self.closing = False
        self.unsent: bytearray | None = None


class Server:
    """Serves one listening socket. Every method belongs to the loop's thread, and none of them blocks."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        handler: Handler,
        *,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take over `listener`; `start` begins to serve."""
        self._listener = listener
        self._secret = secret
        self._handler = handler
        self._limits = limits or Limits()
        self._most_strangers = self._most = self._limits.unauthenticated
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next = 1
        self._opened: dict[int, _Connection] = {}
        # In the order of their deadlines, so that the oldest is the first.
        self._strangers: dict[int, _Connection] = {}
        self._strangers_of: dict[str, dict[int, _Connection]] = {}
        self._lingering: dict[int, _Connection] = {}
        self._counters: Counter[str] = Counter()
        self._sweeper: asyncio.TimerHandle | None = None
        self._resume: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to serve in the running loop; raises this process's limit of open files as far as it may."""
        # Clients never take the descriptors that the rest of this process needs.
        limit = raise_descriptor_limit()
        self._most_strangers = min(self._limits.unauthenticated, max(1, limit // 4))
        self._most = max(1, limit - min(_RESERVED, limit // 2))
        self._loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)
        self._sweeper = self._loop.call_later(_SWEEP, self._sweep)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens at."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def connections(self) -> int:
        """Number of authenticated connections."""
        return len(self._opened)

    @property
    def unauthenticated(self) -> int:
        """Number of connections that have not proved themselves yet."""
        return len(self._strangers)

    @property
    def counters(self) -> Mapping[str, int]:
        """What happened so far.

        `accepted`, `opened`; refused before they were authenticated: `malformed`, `oversized`, `unauthentic`,
        `version`, `late` (no proof in time), `displaced` (too many of them), `no descriptors`, `gave up`; and by
        their reason the ends of authenticated ones (see `Handler.on_close`).
        """
        return dict(self._counters)

    def last_heard(self, connection: int) -> float | None:
        """Return the clock's time of the last authentic message (at first: of the handshake); None if it is gone."""
        found = self._opened.get(connection)
        return None if found is None else found.heard

    def send(self, connection: int, message: Mapping[str, Any]) -> bool:
        """Send a message, now or when the client reads; return whether the connection is still there.

        A client that leaves too much unread is dropped. Raises `InputError` for what is no message.
        """
        found = self._opened.get(connection)
        # The session ends before its last messages have been acted on when a bad frame came right behind them.
        if found is None or found.closing or not found.session.is_open:
            return False
        self._write(found, found.session.seal(message))
        return connection in self._opened

    def close(self, connection: int) -> None:
        """End a connection after what was sent to it has gone out (two seconds at most)."""
        found = self._opened.get(connection)
        if found is not None and not found.closing:
            self._forget(found, "closed")
            found.closing = True
            found.deadline = self._clock() + _LINGER
            self._lingering[found.number] = found
            if not found.unsent:
                self._shut(found)

    async def stop(self) -> None:
        """Stop accepting, and end every connection after what was sent to it has gone out (two seconds at most)."""
        assert self._loop is not None
        if self._sweeper is None:
            return
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        if self._resume is not None:
            self._resume.cancel()
        for found in list(self._strangers.values()):
            self._drop(found, "closed")
        for number in list(self._opened):
            self.close(number)
        while self._lingering:
            await asyncio.sleep(0.01)
        self._sweeper.cancel()
        self._sweeper = None
        await asyncio.sleep(0)

    # Accepting

    def _accept(self) -> None:
        assert self._loop is not None
        # A few a turn: those who are in come first.
        for _ in range(_ACCEPTS_A_TURN):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTORS:
                    continue  # the client was gone before it was accepted
                # Linux takes a descriptor before it looks whether anybody waits.
                waiting = select.poll()
                waiting.register(self._listener, select.POLLIN)
                if not waiting.poll(0):
                    return
                if not self._displace(self._strangers, "no descriptors"):
                    log.warning("no descriptor left for another client (%s): waiting", error)
                    self._loop.remove_reader(self._listener.fileno())
                    self._resume = self._loop.call_later(_ACCEPT_PAUSE, self._accept_again)
                    return
                continue
            self._counters["accepted"] += 1
            try:
                prepare_socket(connection)
            except OSError:
                connection.close()
                self._counters["gave up"] += 1
                continue
            self._admit(connection, _host_key(address[0]))

    def _accept_again(self) -> None:
        assert self._loop is not None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _admit(self, connection: socket.socket, host: str) -> None:
        assert self._loop is not None
        of_host = self._strangers_of.get(host, {})
        if host and len(of_host) >= self._limits.unauthenticated_a_host:
            self._displace(of_host, "displaced")
        if len(self._strangers) >= self._most_strangers:
            self._displace(self._strangers, "displaced")
        held = len(self._opened) + len(self._strangers) + len(self._lingering)
        if held >= self._most and not self._displace(self._strangers, "no descriptors"):
            self._counters["no descriptors"] += 1
            connection.close()
            return
        number = self._next
        self._next += 1
        found = _Connection(number, connection, host, self._secret, self._clock() + self._limits.handshake)
        self._strangers[number] = found
        self._strangers_of.setdefault(host, {})[number] = found
        self._loop.add_reader(found.fd, self._readable, found)
        self._write(found, found.session.output())

    def _displace(self, among: dict[int, _Connection], reason: str) -> bool:
        """Drop the oldest of these; return whether there was one."""
        oldest = next(iter(among.values()), None)
        if oldest is None:
            return False
        self._drop(oldest, reason)
        return True

    def _sweep(self) -> None:
        assert self._loop is not None
        now = self._clock()
        for among in (self._strangers, self._lingering):
            # Each is in the order of its deadlines: this costs what it drops.
            while (oldest := next(iter(among.values()), None)) is not None and oldest.deadline <= now:
                self._drop(oldest, "late")
        self._sweeper = self._loop.call_later(_SWEEP, self._sweep)

    # Reading and writing

    def _readable(self, found: _Connection) -> None:
        try:
            data = found.socket.recv(_READ)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._drop(found, "timed out" if error.errno in _UNREACHABLE else "reset")
            return
        if not data:
            self._drop(found, "eof")
            return
        if found.closing:
            return
        now = self._clock()
        for event in found.session.receive(data):
            try:
                self._act(found, event, now)
            except BaseException:
                self._drop(found, "handler failed")
                raise
            if found.closing:
                return

    def _act(self, found: _Connection, event: object, now: float) -> None:
        if isinstance(event, Received):
            found.heard = now
            self._handler.on_message(found.number, event.message)
        elif isinstance(event, Opened):
            self._write(found, found.session.output())
            if found.closing:
                return
            self._no_stranger(found)
            found.heard = now
            self._opened[found.number] = found
            self._counters["opened"] += 1
            self._handler.on_open(found.number, event.peer)
        else:
            # To one of another version, which has proved itself, there is an answer left to give.
            with contextlib.suppress(OSError):
                found.socket.send(found.session.output())
            assert found.session.refused is not None
            self._drop(found, found.session.refused)

    def _write(self, found: _Connection, data: bytes) -> None:
        assert self._loop is not None
        if found.unsent is None:
            try:
                sent = found.socket.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as error:
                self._drop(found, "timed out" if error.errno in _UNREACHABLE else "reset")
                return
            if sent == len(data):
                return
            found.unsent = bytearray(data[sent:])
            self._loop.add_writer(found.fd, self._writable, found)
        else:
            found.unsent += data
        if len(found.unsent) > self._limits.unread:
            self._drop(found, "slow reader")

    def _writable(self, found: _Connection) -> None:
        assert self._loop is not None
        assert found.unsent is not None
        try:
            del found.unsent[: found.socket.send(memoryview(found.unsent)[:_READ])]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._drop(found, "timed out" if error.errno in _UNREACHABLE else "reset")
            return
        if not found.unsent:
            found.unsent = None
            self._loop.remove_writer(found.fd)
            if found.closing:
                self._shut(found)

    # Ends

    def _shut(self, found: _Connection) -> None:
        """Say that nothing follows. The rest is read and thrown away: closing now would take back what was sent."""
        try:
            found.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self._drop(found, "reset")

    def _no_stranger(self, found: _Connection) -> None:
        if self._strangers.pop(found.number, None) is not None:
            of_host = self._strangers_of[found.host]
            del of_host[found.number]
            if not of_host:
                del self._strangers_of[found.host]

    def _forget(self, found: _Connection, why: str) -> None:
        """Take it out of the authenticated ones, and tell the layer above when it is not in the midst of something."""
        assert self._loop is not None
        if self._opened.pop(found.number, None) is not None:
            self._counters[why] += 1
            self._loop.call_soon(self._handler.on_close, found.number, why)

    def _drop(self, found: _Connection, why: str) -> None:
        """End a connection at once."""
        assert self._loop is not None
        if found.fd < 0:
            return
        if found.number in self._strangers:
            self._counters["gave up" if why in ("eof", "reset", "closed") else why] += 1
            self._no_stranger(found)
        self._forget(found, why)
        self._lingering.pop(found.number, None)
        found.closing = True
        self._loop.remove_reader(found.fd)
        if found.unsent is not None:
            self._loop.remove_writer(found.fd)
        found.fd = -1
        found.socket.close()
