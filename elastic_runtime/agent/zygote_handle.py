"""The starter's end of the zygote: started first of all, asked whether it is there, started again when it is not."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from elastic_runtime.agent.requests import receive, request_pair, send_message
from elastic_runtime.processes import tree
from elastic_runtime.processes.command import internal_command
from elastic_runtime.processes.title import room
from elastic_runtime.wording import killed_by

__all__ = ["ZygoteHandle"]

_START_PATIENCE = 180.0
_PATIENCE = 15.0
_MOST_LOSSES = 3
"""Losses in a row after which workers are started without a zygote; a while of service starts a new count."""
_GOOD_WHILE = 60.0
_OWN = "torch"
"""What the zygote says it loads while it loads what is not the user's."""


class ZygoteHandle:
    """A child process that forks workers, and the sockets on which they are asked for.

    Requests sent before the zygote is up, or while there is none, wait. When there is to be none any more, each is
    answered with `refused`.
    """

    def __init__(
        self, log: Path, *, preload: Sequence[str], entry: str | None, environment: Mapping[str, str]
    ) -> None:
        """Prepare; what the zygote and its preloads print goes to `log`.

        `entry` is what the program will have first on its import path, `environment` the zygote's whole environment.
        """
        self.requests, self._receiver = request_pair()
        """The end that is given to agents."""
        self._log = log
        self._command = internal_command(
            "elastic_runtime.agent.zygote",
            f"--preload={','.join(preload)}",
            *([] if entry is None else [f"--path={entry}"]),
        )
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.given_up = False
        """Whether there is to be no zygote any more."""
        self.ready = False
        """Whether the zygote has done its imports."""
        self._loading = _OWN
        self._silence = 0.0
        self._served = 0.0
        self._losses = 0

    @property
    def pid(self) -> int | None:
        """Process id, while there is one."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process; it imports for a second or more, and is not waited for. Raises `OSError`."""
        self.ready, self._loading, self._served = False, _OWN, 0.0
        self._silence = -(_START_PATIENCE - _PATIENCE)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        options = [f"--control={theirs.fileno()}", f"--requests={self._receiver.fileno()}", room()]
        with theirs, self._log.open("ab") as file:
            self._process = subprocess.Popen(
                [*self._command, *options],
                env=self._environment,
                pass_fds=[theirs.fileno(), self._receiver.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                # Signals to our group are for us: the zygote ends with us.
                start_new_session=True,
            )

    def watch(self, seconds: float) -> list[str]:
        """Take in what the zygote says; return what the job's log is to say of it.

        Call it often, with the `seconds` that went by. A zygote that is lost is started again, one that answers
        nothing for 15 seconds (180 for one import at its start) is killed; one that cannot be had is given up.
        """
        if self.given_up:
            self._refuse()
            return []
        if self._process is None or self._control is None:
            return []
        told = self._hear()
        if self.given_up:
            return told
        if self._process.poll() is not None:
            code = self._process.returncode
            return [
                *told,
                self._on_loss(f"ended with code {code}" if code >= 0 else f"was {killed_by(-code)}"),
            ]
        before, self._silence = self._silence, self._silence + seconds
        if int(before) != int(self._silence) and self._silence > 2 and tree.is_stopped(self._process.pid):
            # Workers that are to start wait for it, and another one takes longer to load.
            self._process.send_signal(signal.SIGCONT)
        if self._silence >= _PATIENCE:
            return [*told, self._on_loss("no longer answered")]
        if self.ready:
            self._served += seconds
            self._losses = 0 if self._served > _GOOD_WHILE else self._losses
            if int(before) != int(self._silence):
                with suppress(OSError):
                    send_message(self._control, "ping")
        return told

    def close(self) -> None:
        """End the process."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _hear(self) -> list[str]:
        told: list[str] = []
        assert self._control is not None
        with suppress(BlockingIOError, EOFError):
            while True:
                message, _ = receive(self._control)
                if message["kind"] == "preloading":
                    self._loading = message["name"]
                    self._silence = -(_START_PATIENCE - _PATIENCE)
                    continue
                self._silence = 0.0
                if message["kind"] == "ready":
                    self.ready = True
                    told += [f"{warning}; going on without it" for warning in message["warnings"]]
                elif message["kind"] == "refused":
                    return [*told, self._give_up(message["error"])]
        return told

    def _on_loss(self, how: str) -> str:
        self._losses += 1
        if not self.ready and self._loading != _OWN:
            return self._give_up(f"preload {self._loading!r}: the zygote {how}")
        if self._losses >= _MOST_LOSSES:
            return self._give_up(
                f"the zygote was lost {self._losses} times in a row and {how} (see {self._log})"
            )
        self.close()
        self.start()
        return f"the zygote {how}; another one is started"

    def _give_up(self, why: str) -> str:
        self.given_up = True
        self.close()
        self._refuse()
        return f"{why}: workers are started without the zygote"

    def _refuse(self) -> None:
        with suppress(BlockingIOError, EOFError, json.JSONDecodeError):
            while True:
                _, descriptors = receive(self._receiver)
                if descriptors:
                    with socket.socket(fileno=descriptors[0]) as link, suppress(OSError):
                        send_message(link, "refused")
                for descriptor in descriptors[1:]:
                    os.close(descriptor)
