"""Leadership by the vote of a list of candidates: the `Election` with sockets, a clock and a file under it.

Each candidate runs a server, and holds one connection to each of the others, on which it only sends. Both ends must
have the same list, or two majorities could be had: a peer with another one is turned away. All of it lives in one
thread; `acquire`, `renew` and `release` talk to it.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastic_runtime.errors import InputError, IntegrityError
from elastic_runtime.membership.connection import resolve
from elastic_runtime.membership.leadership.election import Action, Election, Persist, Send, Vote
from elastic_runtime.membership.leadership.lease import Lease
from elastic_runtime.membership.leadership.links import Link
from elastic_runtime.membership.server import Server
from elastic_runtime.membership.session import Peer
from elastic_runtime.membership.sockets import listen

__all__ = ["CandidateList", "read_vote", "write_vote"]

log = logging.getLogger(__name__)

_SCHEMA = 1
_PATIENCE = 10.0
_HANDOVER = 2.0
"""Seconds that the process before this one may take to be gone."""


def read_vote(path: Path) -> Vote:
    """Return the vote stored at `path`; an empty one if there is none. Raises `IntegrityError` if it is unreadable."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return Vote()
    except (OSError, ValueError) as error:
        raise IntegrityError(
            f"vote {str(path)!r}: {error}: a vote that was given must not be forgotten"
        ) from error
    term, voted_for = (
        (document.get(key) for key in ("term", "voted_for")) if isinstance(document, dict) else (0, 0)
    )
    if type(term) is not int or not isinstance(voted_for, str) or document.get("schema") != _SCHEMA:
        raise IntegrityError(
            f"vote {str(path)!r}: is none of schema {_SCHEMA}: give the file of this candidate"
        )
    return Vote(term, voted_for)


def write_vote(path: Path, vote: Vote) -> None:
    """Store a vote so that it is whole, and on the disk, when this returns. Raises `OSError`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    document = {"schema": _SCHEMA, "term": vote.term, "voted_for": vote.voted_for}
    with temporary.open("w", encoding="ascii") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _hold(path: Path) -> int:
    """Lock the file at `path` and return its descriptor: two with one memory could vote twice."""
    descriptor, where = -1, f"vote file lock {str(path)!r}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        end = time.monotonic() + _HANDOVER
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)
            else:
                return descriptor
    except BlockingIOError:
        os.close(descriptor)
        raise InputError(f"{where}: another candidate has it: give each a file of its own") from None
    except OSError as error:
        raise InputError(f"{where}: {error.strerror}: give a folder that can be written") from error


class CandidateList:
    """`Leadership` by majority. It votes from the start; it leads only on `acquire`."""

    def __init__(
        self,
        name: str,
        candidates: Mapping[str, tuple[str, int]],
        *,
        secret: bytes,
        vote_file: Path,
        listener: socket.socket | None = None,
        lease: float = 1.0,
        rng: random.Random | None = None,
    ) -> None:
        """Take part as `name`; `candidates` gives the address of each, an odd number of them.

        `vote_file` must be this candidate's own, on a disk that outlives the process. `listener` is the listening
        socket at this one's address, if it exists already. `lease` is in seconds: a leader that is silent for so long
        is replaced; one whose process ends, at once. Raises `InputError` if the list, the address or the file is
        not usable, and `IntegrityError` if the file is damaged.
        """
        self._candidates = dict(candidates)
        self._vote_file = vote_file
        self._guard = _hold(vote_file.with_name(f"{vote_file.name}.lock"))
        try:
            self._election = Election(
                name, self._candidates, now=time.monotonic(), vote=read_vote(vote_file), lease=lease, rng=rng
            )
            self._listener = listener if listener is not None else listen(*self._candidates[name])
        except BaseException:
            os.close(self._guard)
            raise
        self.interval = lease / 5
        """Seconds between two calls of `renew`."""
        self._name, self._secret = name, secret
        self._info = {"name": name, "candidates": {each: list(at) for each, at in sorted(candidates.items())}}
        self._changed = threading.Condition()
        self._lease: Lease | None = None
        self._failed: BaseException | None = None
        self._stopped = False
        self._loop = asyncio.new_event_loop()
        self._finish = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._links: dict[str, Link] = {}
        self._names: dict[int, str] = {}
        self._newest: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name=f"candidate {name}", daemon=True)
        self._thread.start()

    # For the owner, from its threads

    @property
    def leader(self) -> str | None:
        """Name of the candidate that leads, as far as this one knows."""
        return self._election.leader

    @property
    def term(self) -> int:
        """Highest term that this one knows of."""
        return self._election.term

    def acquire(self, timeout: float, *, above: int = 0) -> Lease | None:
        """Try to be elected for `timeout` seconds; see `Leadership`.

        Raises `InputError` if the vote cannot be stored.
        """
        end = time.monotonic() + timeout
        self._do(lambda now: self._election.campaign(now, above=above))
        with self._changed:
            while self._lease is None or not self._lease.valid(time.monotonic()) or self._lease.term <= above:
                self._check()
                left = end - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            else:
                return self._lease
        self._do(lambda now: self._election.campaign(now, wanted=False))
        return None

    def renew(self) -> bool:
        """Return whether the lease is held; the thread extends it by itself."""
        lease = self._lease
        return lease is not None and lease.valid(time.monotonic())

    def release(self) -> None:
        """Step down and tell the others, who need not wait then."""
        if not self._stopped and self._failed is None:
            self._do(lambda now: self._election.campaign(now, wanted=False))

    def close(self) -> None:
        """Release, and take part no longer."""
        self.release()
        if not self._stopped:
            self._stopped = True
            self._loop.call_soon_threadsafe(self._finish.set)
        self._thread.join(_PATIENCE)

    def _do(self, step: Callable[[float], list[Action]]) -> None:
        """Have the thread take a step of the election, and wait until it did."""
        done = threading.Event()

        def run() -> None:
            self._perform(step(time.monotonic()))
            done.set()

        with self._changed:
            self._check()
            self._loop.call_soon_threadsafe(run)
        end = time.monotonic() + _PATIENCE
        while not done.wait(0.05) and self._failed is None and time.monotonic() < end:
            pass

    def _check(self) -> None:
        if self._failed is not None:
            raise InputError(
                f"vote file {str(self._vote_file)!r}: {self._failed}: candidate {self._name!r} can take part no "
                "longer; give a file on a disk that can be written"
            ) from self._failed
        assert not self._stopped, "the candidate was closed"

    # In the thread

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._main())
        except BaseException as error:
            self._failed = error
            raise
        finally:
            os.close(self._guard)
            with self._changed:
                self._stopped = True
                if self._lease is not None:
                    self._lease.end()
                self._changed.notify_all()

    async def _main(self) -> None:
        server = Server(self._listener, self._secret, self)
        self._server = server
        server.start()
        others = {name: at for name, at in self._candidates.items() if name != self._name}
        for name, address in others.items():
            self._links[name] = Link(address, self._secret, self._info, self._on_link, resolve)
        try:
            self._schedule()
            await self._finish.wait()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for link in self._links.values():
                await link.close()
            await server.stop()

    def _on_link(self) -> None:
        self._election.connected(time.monotonic())
        self._schedule()

    def _tick(self) -> None:
        self._perform(self._election.tick(time.monotonic()))

    def on_open(self, connection: int, peer: Peer) -> None:
        """See `Handler`: a peer connected."""
        name = peer.info.get("name")
        known = self._candidates.keys() - {self._name}
        if (
            peer.role != "candidate"
            or peer.info.get("candidates") != self._info["candidates"]
            or name not in known
        ):
            log.error(
                "candidate %r: turned away %r, whose list of candidates is %r instead of %r: give all the same list",
                self._name, name, peer.info.get("candidates"), self._info["candidates"],
            )  # fmt: skip
            self._server.close(connection)
            return
        self._names[connection] = name
        self._newest[name] = connection

    def on_message(self, connection: int, message: dict[str, Any]) -> None:
        """See `Handler`: a peer said something."""
        name = self._names.get(connection)
        if name is not None and self._newest.get(name) == connection:
            self._perform(self._election.receive(name, message, time.monotonic()))

    def on_close(self, connection: int, why: str) -> None:
        """See `Handler`: a connection ended; the end of a peer's newest one is the end of its process."""
        name = self._names.pop(connection, None)
        if name is not None and self._newest.get(name) == connection:
            del self._newest[name]
            if why in ("eof", "reset"):
                self._election.disconnected(name, time.monotonic())
                self._schedule()

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Persist(vote):
                    try:
                        write_vote(self._vote_file, vote)
                    except OSError as error:
                        # Without its memory it must say nothing more: it could vote twice.
                        self._fail(error)
                        return
                case Send(to, message):
                    self._links[to].send(message)
        self._publish()
        self._schedule()

    def _fail(self, error: BaseException) -> None:
        log.error("candidate %r: cannot store its vote (%s): takes part no longer", self._name, error)
        with self._changed:
            self._failed = error
            if self._lease is not None:
                self._lease.end()
                self._lease = None
            self._changed.notify_all()
        self._finish.set()

    def _publish(self) -> None:
        """Bring the lease that the owner sees up to date."""
        election, lease = self._election, self._lease
        if lease is not None and not (election.leads and election.term == lease.term):
            lease.end()
            with self._changed:
                self._lease = lease = None
                self._changed.notify_all()
        if lease is not None:
            lease.extend(election.lease_until)
        elif election.leads and election.lease_until > time.monotonic():
            with self._changed:
                self._lease = Lease(self, term=election.term, holder=self._name, until=election.lease_until)
                self._changed.notify_all()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._election.next_tick
        if at < float("inf"):
            # The loop's clock is time.monotonic.
            self._timer = self._loop.call_at(at, self._tick)
