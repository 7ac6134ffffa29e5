"""The client's end of the membership service: a connection for a `selectors` loop, and one request that blocks."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from elastic_runtime.errors import InputError
from elastic_runtime.membership.channel_errors import ChannelError, ChannelTimeout, WrongSecretError
from elastic_runtime.membership.session import ClientSession, Opened, Peer, Received
from elastic_runtime.membership.sockets import prepare_socket

__all__ = ["Connection", "request", "resolve"]

_READ = 64 * 1024
_READS_A_CALL = 16
_UNSENT = 4 * 1024 * 1024

SocketAddress = tuple[Any, ...]


def resolve(
    address: tuple[str, int], timeout: float = 5.0
) -> list[tuple[socket.AddressFamily, SocketAddress]]:
    """Return every socket address of host and port, in the order to try.

    An address in numbers takes no time. Raises `ChannelError` if the name is not known and `ChannelTimeout` if the
    resolver does not answer within `timeout` seconds; `InputError` for a port that is none.
    """
    host, port = address
    if not isinstance(port, int) or not 0 < port < 65536:
        raise InputError(f"port {port!r}: is not a number from 1 to 65535: give HOST:PORT of the coordinator")
    with contextlib.suppress(OSError, UnicodeError):
        return _lookup(host, port, socket.AI_NUMERICHOST)
    found: list[tuple[socket.AddressFamily, SocketAddress]] = []
    failed: list[str] = []

    def look() -> None:
        try:
            found.extend(_lookup(host, port, 0))
        except (OSError, UnicodeError) as error:
            failed.append(str(error))

    # The resolver takes no time-out: a thread that nobody waits for any more is what bounds it.
    thread = threading.Thread(target=look, name="resolve", daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        raise ChannelTimeout(
            f"host {host!r}: no answer from the resolver in {timeout:g} s: check the name and DNS"
        )
    if not found:
        raise ChannelError(f"host {host!r}: {failed[0] if failed else 'no address'}: check the name")
    return found


def _lookup(host: str, port: int, flags: int) -> list[tuple[socket.AddressFamily, SocketAddress]]:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, sockaddr) for family, _, _, _, sockaddr in infos]


class Connection:
    """A connection that never blocks. It does not reconnect: when `closed` says why, make another.

    Register it for reading, and for writing while `wants_write`; call `on_readable` and `on_writable` when told, and
    `tick` at `deadline` or often. Then take `messages()`. Messages may be sent at once: they wait for the handshake.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        *,
        role: str,
        info: Mapping[str, Any] | None = None,
        timeout: float = 5.0,
        attempt: int = 0,
    ) -> None:
        """Begin to connect; connecting and the handshake may take `timeout` seconds.

        Only a host given by name can block here, for as long as its resolver takes (`timeout` at most). Of a name
        with several addresses, `attempt` chooses which: count it up from try to try. Raises what `resolve` raises,
        and `InputError` if secret, role or info are not usable.
        """
        self.address = address
        self.deadline: float | None = time.monotonic() + timeout
        """When it must be open, by `time.monotonic`; None once it is, or is closed."""
        self._timeout = timeout
        self._session = ClientSession(secret, Peer(role=role, info=dict(info or {})))
        self._messages: list[dict[str, Any]] = []
        self._waiting: list[Mapping[str, Any]] = []
        self._unsent = bytearray()
        self.closed: ChannelError | None = None
        """Why it is closed; None while it is not."""
        self.before_close: Callable[[], None] | None = None
        """Called once, when the descriptor is about to be closed: for loops that must forget it before."""
        self.last_heard: float | None = None
        """When the last authentic message, or the end of the handshake, came, by `time.monotonic`."""
        addresses = resolve(address, timeout)
        family, sockaddr = addresses[attempt % len(addresses)]
        self._connecting = True
        try:
            self._socket = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise ChannelError(f"{self._where}: no socket: {error.strerror}") from error
        try:
            prepare_socket(self._socket)
            code = self._socket.connect_ex(sockaddr)
        except OSError as error:
            code = error.errno or errno.EIO
        if code == 0:
            self._connecting = False
        elif code != errno.EINPROGRESS:
            self._end(ChannelError(f"{self._where}: {_text(code)}"))

    @property
    def _where(self) -> str:
        host, port = self.address
        return f"coordinator at {f'[{host}]' if ':' in host else host}:{port}"

    def fileno(self) -> int:
        """Return the descriptor, for selectors; -1 once closed."""
        return self._socket.fileno()

    @property
    def is_open(self) -> bool:
        """Whether both sides have proved themselves and the connection is there."""
        return self._session.is_open and self.closed is None

    @property
    def wants_write(self) -> bool:
        """Whether `on_writable` is to be called as soon as the socket takes bytes."""
        return self.closed is None and (self._connecting or bool(self._unsent))

    @property
    def unsent(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return len(self._unsent)

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send a message, now or later; return whether the connection is still there.

        The connection ends if the other side leaves 4 MiB unread. Raises `InputError` for what is no message.
        """
        if self.closed is not None:
            return False
        if not self._session.is_open:
            if len(self._waiting) >= 1024:
                self._end(ChannelError(f"{self._where}: 1,024 messages wait for the handshake"))
                return False
            self._waiting.append(dict(message))
            return True
        self._write(self._session.seal(message))
        return self.closed is None

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages that have come since the last call, also those that came before an end."""
        messages, self._messages = self._messages, []
        return messages

    def on_readable(self) -> None:
        """Read what is there."""
        if self.closed is not None or (self._connecting and not self._finish_connecting()):
            return
        for _ in range(_READS_A_CALL):
            try:
                data = self._socket.recv(_READ)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._hung_up(_text(error.errno))
                return
            if not data:
                self._hung_up("it closed the connection")
                return
            self._take(data)
            if self.closed is not None or len(data) < _READ:
                return

    def on_writable(self) -> None:
        """Finish connecting, or write what waits."""
        if self.closed is not None or (self._connecting and not self._finish_connecting()):
            return
        self._flush()

    def tick(self, now: float | None = None) -> None:
        """End the connection if it was not open by its deadline."""
        if self.deadline is not None and (time.monotonic() if now is None else now) >= self.deadline:
            doing = "connecting" if self._connecting else "the handshake"
            self._end(ChannelTimeout(f"{self._where}: no answer in {self._timeout:.3g} s ({doing})"))

    def close(self) -> None:
        """Close the connection; what was not sent is lost."""
        self._end(ChannelError(f"{self._where}: closed here"))

    def _take(self, data: bytes) -> None:
        for event in self._session.receive(data):
            if isinstance(event, Received):
                self.last_heard = time.monotonic()
                self._messages.append(event.message)
            elif isinstance(event, Opened):
                self.deadline, self.last_heard = None, time.monotonic()
                waiting, self._waiting = self._waiting, []
                for message in waiting:
                    self.send(message)
            else:
                self._end(self._refusal(event.reason))
                return
        if output := self._session.output():
            self._write(output)

    def _refusal(self, reason: str) -> ChannelError:
        if reason == "version":
            return ChannelError(
                f"{self._where}: speaks another version of the protocol: use the same kfp-elastic"
            )
        if reason == "unauthentic":
            return WrongSecretError(
                f"{self._where}: does not know the job's secret: is it another job's port?"
            )
        if not self._session.has_answered:
            return ChannelError(f"{self._where}: what answers there is no coordinator: check host and port")
        return ChannelError(f"{self._where}: sent what it cannot have sent ({reason})")

    def _hung_up(self, how: str) -> None:
        if self._session.has_answered and not self._session.is_open:
            # A server says nothing to who does not know the secret; a loaded one may drop a client here as well.
            self._end(
                WrongSecretError(
                    f"{self._where}: refused: the secret is not this job's (or it takes nobody now)"
                )
            )
        else:
            self._end(ChannelError(f"{self._where}: {how}"))

    def _finish_connecting(self) -> bool:
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._end(ChannelError(f"{self._where}: {_text(code)}"))
            return False
        try:
            self._socket.getpeername()
        except OSError:
            return False  # told too early: still under way
        self._connecting = False
        return True

    def _write(self, data: bytes) -> None:
        self._unsent += data
        self._flush()
        if len(self._unsent) > _UNSENT:
            self._end(ChannelError(f"{self._where}: it reads nothing"))

    def _flush(self) -> None:
        while self._unsent and self.closed is None:
            try:
                sent = self._socket.send(memoryview(self._unsent)[:_READ])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                # What it said before it went is still to be read; reading then shows the end.
                self._unsent.clear()
                return
            del self._unsent[:sent]

    def _end(self, why: ChannelError) -> None:
        if self.closed is None:
            self.closed = why
            self.deadline = None
            self._unsent.clear()
            self._waiting.clear()
            if self.before_close is not None:
                self.before_close()
            self._socket.close()


def _text(code: int | None) -> str:
    return os.strerror(code or errno.EIO)


def request(
    address: tuple[str, int],
    secret: bytes,
    message: Mapping[str, Any],
    *,
    timeout: float = 10.0,
    role: str = "control",
    info: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Send one message to the service at (host, port) and return the first that comes back. For command lines.

    The welcome, with which the service begins every connection, is no answer.

    Raises `ChannelError` if nobody is there or the connection ends, `ChannelTimeout` after `timeout` seconds,
    `WrongSecretError` if the two do not share a secret, and `InputError` for what cannot be sent.
    """
    end = time.monotonic() + timeout
    tries = len(resolve(address, timeout))
    for attempt in range(tries):
        left = max(0.0, end - time.monotonic())
        connection = Connection(address, secret, role=role, info=info, timeout=left, attempt=attempt)
        reachable = False
        with contextlib.closing(connection), selectors.DefaultSelector() as selector:
            connection.send(message)
            if connection.closed is None:
                selector.register(connection, selectors.EVENT_READ)
            while connection.closed is None:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_write else 0)
                selector.modify(connection, events)
                for _, ready in selector.select(max(0.0, end - time.monotonic())):
                    if ready & selectors.EVENT_WRITE:
                        connection.on_writable()
                    if ready & selectors.EVENT_READ:
                        connection.on_readable()
                if answers := [m for m in connection.messages() if m.get("kind") != "welcome"]:
                    return answers[0]
                connection.tick()
                reachable = reachable or connection.is_open
                if connection.closed is None and time.monotonic() >= end:
                    raise ChannelTimeout(f"{connection._where}: no answer in {timeout:.3g} s: try again")
            error = connection.closed
        if reachable or attempt == tries - 1 or isinstance(error, ChannelTimeout | WrongSecretError):
            raise error
    raise AssertionError
