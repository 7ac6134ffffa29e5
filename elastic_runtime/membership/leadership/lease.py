"""What every leadership back end gives: a lease with a term, and a thread that keeps it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["MARGIN", "Keeper", "Leadership", "Lease"]

log = logging.getLogger(__name__)

MARGIN = 0.1
"""Part of a lease's length that its holder does not use, for clocks that run at other speeds."""


class Lease:
    """The right to decide, for as long as it is `valid`, in the name of its `term`. Safe to read from any thread."""

    def __init__(self, owner: Leadership, *, term: int, holder: str, until: float = math.inf) -> None:
        """Begin a lease of `owner` that lasts until `until` (`time.monotonic`) unless it is extended."""
        self._owner = owner
        self.term = term
        self.holder = holder
        self._until = until
        self._ended = False

    def __repr__(self) -> str:
        return f"Lease(term={self.term}, holder={self.holder!r}{', ended' if self._ended else ''})"

    @property
    def until(self) -> float:
        """When it runs out, by `time.monotonic`; it may be extended."""
        return -math.inf if self._ended else self._until

    @property
    def interval(self) -> float:
        """Seconds between two calls of `renew` that keep it."""
        return self._owner.interval

    def valid(self, now: float) -> bool:
        """Return whether the holder may decide at `now` (`time.monotonic`)."""
        return now < self.until

    def renew(self) -> bool:
        """Extend it, see `Leadership.renew`; False once it has ended."""
        return not self._ended and self._owner.renew() and not self._ended

    def release(self) -> None:
        """Give it up, see `Leadership.release`; nothing to do once it has ended."""
        if not self._ended:
            self._owner.release()

    def extend(self, until: float) -> None:
        """Let it last until `until`; one that has ended stays so. For back ends."""
        self._until = max(self._until, until)

    def end(self) -> None:
        """End it for good. For back ends."""
        self._ended = True


class Leadership(Protocol):
    """A back end. Its methods may block, each for a bounded time; one thread at a time uses them."""

    def acquire(self, timeout: float, *, above: int = 0) -> Lease | None:
        """Return a lease whose term is above that of every lease before it, and above `above`.

        None if that takes longer than `timeout` seconds. `above` is the highest term that is known from elsewhere
        (the agents), for back ends whose memory can be lost. Raises `InputError` if the back end cannot be used.
        """

    def renew(self) -> bool:
        """Extend the lease; return whether it is still held. False is final: acquire another."""

    def release(self) -> None:
        """Give the lease up, so that another can have it at once; never raises, nothing to do without a lease."""

    def close(self) -> None:
        """Release, and end whatever works in the background; the last call."""

    @property
    def interval(self) -> float:
        """Seconds between two calls of `renew` that keep the lease."""


class Keeper:
    """Renews a lease in a thread of its own, and says once when it is lost."""

    def __init__(self, lease: Lease, on_lost: Callable[[Lease], None]) -> None:
        """Begin. `on_lost` is called in the thread, at most once, and not after `stop`."""
        self._lease = lease
        self._on_lost = on_lost
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """Stop renewing (the lease is not released); wait for a renewal under way, `timeout` seconds at most."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _keep(self) -> None:
        while not self._stopped.wait(self._lease.interval):
            # A lease that ran out may be held again when its holder was paused and nobody else took it.
            if self._lease.renew() and self._lease.valid(time.monotonic()):
                continue
            if not self._stopped.is_set():
                self._lease.end()
                log.warning("lease of term %d lost by %s", self._lease.term, self._lease.holder)
                self._on_lost(self._lease)
            return
