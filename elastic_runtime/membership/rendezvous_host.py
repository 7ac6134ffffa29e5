"""Starts the coordinator of torchrun's agents, on the node that its address belongs to, and again when it dies.

Every agent on that machine may: who gets the port is the one. The listening socket stays open here, so that clients
of a coordinator that died wait in its queue for the next one. A coordinator outlives this process as long as it has
agents; when the last one is gone it ends. If it dies without this process, another agent of the machine takes the port.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import subprocess
import sys
import tempfile
import time
from typing import IO

from elastic_runtime.errors import InputError
from elastic_runtime.membership.rendezvous import RendezvousConfig
from elastic_runtime.membership.sockets import listen

__all__ = ["Host", "is_loopback", "is_this_machine"]

log = logging.getLogger(__name__)

_PAUSE = 0.5
"""Seconds between two starts of a coordinator that dies."""


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine by its loopback address, which no other machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_this_machine(host: str) -> bool:
    """Return whether `host` is a name or an address of this machine: whether a socket may be bound to it."""
    if is_loopback(host) or host in (socket.gethostname(), socket.getfqdn()):
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind((address[0], 0))
            return True
    return False


class Host:
    """The coordinator's process, if this agent is the one that has it."""

    def __init__(self, config: RendezvousConfig) -> None:
        """Prepare; `look` starts it."""
        self._config = config
        self._listener: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._not_before = 0.0
        self.may = is_this_machine(config.host) if config.is_host is None else config.is_host

    def look(self) -> None:
        """Start the coordinator if it is ours and does not run; call it often."""
        if self._listener is None or time.monotonic() < self._not_before:
            return
        if self._process is not None:
            if (code := self._process.poll()) is None:
                return
            log.warning(
                "the coordinator ended with code %s: starting another one%s", code, self._last_words()
            )
        self._start()

    def claim(self) -> None:
        """Take the port, if this machine has it and it is free: nobody answers there."""
        if not self.may or self._listener is not None:
            return
        config = self._config
        addresses = ["127.0.0.1"] if is_loopback(config.host) else ["::", "0.0.0.0"]
        for address in ["::1"] if config.host == "::1" else addresses:
            try:
                self._listener = listen(address, config.port)
            except InputError:
                continue  # Another agent of this machine was faster.
            self._start()
            return

    def close(self) -> None:
        """Leave the coordinator to the others: it ends when they have gone."""
        if self._listener is not None:
            self._listener.close()
        if self._errors is not None:
            self._errors.close()

    @property
    def pid(self) -> int | None:
        """Process id of the coordinator, if this process started it."""
        return None if self._process is None else self._process.pid

    def _start(self) -> None:
        config, listener = self._config, self._listener
        assert listener is not None
        self._not_before = time.monotonic() + _PAUSE
        if self._errors is not None:
            self._errors.close()
        # Not a pipe, and not torchrun's own error output: whoever reads that would wait for the coordinator's end.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        command = [
            sys.executable, "-P", "-m", "elastic_runtime.membership.rendezvous_service", "--listen",
            str(listener.fileno()), "--secret", str(config.secret_file.absolute()), "--run-id", config.run_id,
            "--minimum", str(config.minimum), "--maximum", str(config.maximum), "--last-call",
            str(config.last_call_timeout), "--heartbeat", str(config.heartbeat),
        ]  # fmt: skip
        # A session of its own: Ctrl-C is for the agent, which tells the coordinator what follows.
        self._process = subprocess.Popen(
            command, pass_fds=(listener.fileno(),), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=self._errors, start_new_session=True,
        )  # fmt: skip

    def _last_words(self) -> str:
        assert self._errors is not None
        self._errors.seek(0)
        lines = self._errors.read()[-2000:].decode("utf-8", "replace").strip().splitlines()
        return f" ({lines[-1]})" if lines else ""
