"""Workers that the zygote forks: the client's side. Nothing here waits for the zygote, or loads torch."""

from __future__ import annotations

import os
import select
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from elastic_runtime.agent.requests import Program, receive, send_message

__all__ = ["Ended", "Event", "Failed", "Gone", "Lost", "Refused", "Started", "WarmWorker", "Worker"]

_KILL_PATIENCE = 2.0
"""Seconds in which a keeper must have killed a worker that nobody wants."""


@dataclass(frozen=True)
class Started:
    """The worker runs."""

    pid: int


@dataclass(frozen=True)
class Ended:
    """The worker ended; what it left behind is being killed."""

    code: int
    """Exit code, or minus the number of the signal that ended it; -9 as well if nobody can say."""


@dataclass(frozen=True)
class Failed:
    """The worker could not be started."""

    error: str


@dataclass(frozen=True)
class Refused:
    """There is no zygote for this job: start this worker, and all later ones, by `SpawnedWorker`."""


@dataclass(frozen=True)
class Lost:
    """The zygote died before it forked the worker, which never ran: ask again."""


@dataclass(frozen=True)
class Gone:
    """Nothing is left of the worker. The last event of each worker that started."""


Event = Started | Ended | Failed | Refused | Lost | Gone


class Worker(Protocol):
    """A worker that was asked for, however it is started."""

    pid: int | None
    """Process id; None until it has started, and again once it has ended."""
    keeper: int | None
    """Process id of its keeper, if it has one and has started."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when `read` has something."""

    def read(self) -> list[Event]:
        """Return what happened, without waiting. Nothing comes after `Gone`, `Failed`, `Refused` and `Lost`."""

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; one to a worker that is not there does nothing."""

    def cancel(self) -> bool:
        """Withdraw a worker that has not started, and return True: it never runs.

        Return False for one that has started, which `read` then tells.
        """

    def close(self) -> None:
        """Close the descriptors. A worker that still runs is killed with all that came of it."""


class WarmWorker:
    """A worker asked of the zygote; see `requests` for what is said."""

    def __init__(
        self, requests: socket.socket, program: Program, *, log: int, channel: int | None = None
    ) -> None:
        """Ask for a worker that runs `program`, with the descriptors `log` for its output and `channel` for itself.

        Both stay the caller's to close; the worker has copies. Raises `OSError` if the request cannot be sent:
        `BlockingIOError` when the zygote has not taken the earlier ones, so that it can be sent later.
        """
        self.pid: int | None = None
        self.keeper: int | None = None
        self._pidfd: int | None = None
        self._ended = False
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        body = os.memfd_create("program", os.MFD_CLOEXEC)
        try:
            with open(body, "wb", closefd=False) as file:
                file.write(program.to_bytes())
            descriptors = [theirs.fileno(), body, log, *([] if channel is None else [channel])]
            send_message(requests, "fork", descriptors)
        except OSError:
            self._link.close()
            raise
        finally:
            os.close(body)
            theirs.close()

    def fileno(self) -> int:
        """See `Worker`."""
        return self._link.fileno()

    def read(self) -> list[Event]:
        """See `Worker`."""
        events: list[Event] = []
        while True:
            try:
                message, descriptors = receive(self._link)
            except BlockingIOError:
                return events
            except EOFError:
                return [*events, *self._on_end()]
            match message["kind"]:
                case "started":
                    self.pid, self.keeper, self._pidfd = message["pid"], message["keeper"], descriptors[0]
                    events.append(Started(message["pid"]))
                case "ended":
                    self._ended = True
                    self._forget()
                    events.append(Ended(message["code"]))
                case "failed":
                    return [*events, Failed(message["error"])]
                case "refused":
                    return [*events, Refused()]

    def send_signal(self, number: signal.Signals) -> None:
        """See `Worker`."""
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def cancel(self) -> bool:
        """See `Worker`."""
        if self.pid is not None or self._ended or self._has_news():
            return False
        # From here on the keeper cannot say that the worker started, and without that it does not let it run.
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RD)
        started = None
        with suppress(BlockingIOError, EOFError):
            # It started in the moment before.
            _, (started, *_) = receive(self._link)
        self._link.close()
        if started is not None:
            poll = select.poll()
            poll.register(started, select.POLLIN)
            poll.poll(_KILL_PATIENCE * 1000)
            os.close(started)
        return True

    def close(self) -> None:
        """See `Worker`."""
        self._link.close()
        self._forget()

    def _has_news(self) -> bool:
        try:
            return bool(self._link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def _on_end(self) -> list[Event]:
        if self._ended:
            return [Gone()]
        if self.pid is None:
            return [Lost()]
        # The keeper was killed, and the kernel killed the worker with it.
        self._ended = True
        self._forget()
        return [Ended(-signal.SIGKILL), Gone()]

    def _forget(self) -> None:
        self.pid = None
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
