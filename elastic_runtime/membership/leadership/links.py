"""A connection that a candidate keeps to a peer, in an asyncio loop: made again whenever it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from typing import Any

from elastic_runtime.membership.channel_errors import ChannelError
from elastic_runtime.membership.connection import Connection

__all__ = ["Link"]

_TIMEOUT = 1.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5

Resolve = Callable[[tuple[str, int], float], list[tuple[socket.AddressFamily, tuple[Any, ...]]]]


class Link:
    """Sends to one peer while it can be reached; what is said while it cannot is lost."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        info: Mapping[str, Any],
        on_open: Callable[[], None],
        resolve: Resolve,
    ) -> None:
        """Begin to connect, in the running loop; `on_open` is called each time it can be reached."""
        self._address, self._secret, self._info = address, secret, info
        self._on_open, self._resolve = on_open, resolve
        self._connection: Connection | None = None
        self._changed = asyncio.Event()
        self._watched, self._writing = -1, False
        self._task = asyncio.get_running_loop().create_task(self._keep())

    def send(self, message: Mapping[str, Any]) -> None:
        """Send, if the peer can be reached."""
        if self._connection is not None and self._connection.is_open:
            self._connection.send(message)
            self._after()

    async def close(self) -> None:
        """Close the connection and make none again."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _keep(self) -> None:
        loop, pause, attempt = asyncio.get_running_loop(), _FIRST_PAUSE, 0
        while True:
            with contextlib.suppress(ChannelError):
                # Resolving a name may take long: not in the loop's thread.
                found = await loop.run_in_executor(None, self._resolve, self._address, _TIMEOUT)
                address = found[attempt % len(found)][1][:2]
                if await self._use(address):
                    pause = _FIRST_PAUSE
            attempt += 1
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _use(self, address: tuple[Any, ...]) -> bool:
        """Connect and serve until the connection is gone; return whether it was ever open."""
        loop = asyncio.get_running_loop()
        connection = self._connection = Connection(
            (address[0], address[1]), self._secret, role="candidate", info=self._info, timeout=_TIMEOUT
        )
        opened = False
        try:
            if connection.closed is None:
                self._watched, self._writing = connection.fileno(), False
                connection.before_close = self._unwatch
                loop.add_reader(self._watched, self._on_ready, connection.on_readable)
            while connection.closed is None:
                self._changed.clear()
                self._after()
                left = None if connection.deadline is None else max(0.0, connection.deadline - loop.time())
                # Not wait_for, which may swallow the cancellation that `close` waits for.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._changed.wait()
                connection.tick()
                connection.messages()
                if connection.is_open and not opened:
                    opened = True
                    self._on_open()
        finally:
            connection.close()
            self._connection = None
        return opened

    def _on_ready(self, step: Callable[[], None]) -> None:
        step()
        self._after()
        self._changed.set()

    def _after(self) -> None:
        """Listen for room to write only while something waits; call this after whatever may have changed that."""
        connection, loop = self._connection, asyncio.get_running_loop()
        if connection is not None and self._watched >= 0 and connection.wants_write != self._writing:
            self._writing = connection.wants_write
            if self._writing:
                loop.add_writer(self._watched, self._on_ready, connection.on_writable)
            else:
                loop.remove_writer(self._watched)

    def _unwatch(self) -> None:
        """Forget the descriptor before it is closed: the next socket gets its number."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._watched)
        loop.remove_writer(self._watched)
        self._watched = -1
        self._changed.set()
