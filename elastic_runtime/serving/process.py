"""A server as a process of its own: start it, know when it really answers, stop it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from elastic_runtime.errors import EXIT_INPUT, InputError, JobFailed
from elastic_runtime.models.config import read_config
from elastic_runtime.serving.names import check_name, check_port, require_kserve

__all__ = ["Server", "start_server"]

START_SECONDS = 120.0
STOP_SECONDS = 8.0
_LOG_LINES = 20


@dataclass(kw_only=True)
class Server:
    """A server that answers. As a context manager it stops at the end of the block, whatever happens in it.

    One that was not started detached ends with the thread that started it, at the latest.
    """

    name: str
    """Name of the model."""

    url: str
    """Where it answers, such as `http://127.0.0.1:8080`; the model is at `/v2/models/NAME`."""

    pid: int
    """Process id of the server."""

    ready_seconds: float
    """Time from the start of the process to its first answer."""

    log: IO[bytes]
    """What it wrote, open for reading."""

    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _pidfd: int = field(default=-1, repr=False)

    def log_tail(self) -> str:
        """Return the last lines that the server wrote."""
        return _tail(self.log)

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self._pidfd >= 0 and not _ended(self._pidfd, 0.0)

    def stop(self, patience: float = STOP_SECONDS) -> None:
        """Stop the server and wait until its process is gone; kill it after `patience` seconds.

        Requests in progress are finished first. May be called twice.
        """
        if self._pidfd < 0:
            return
        try:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
            if not _ended(self._pidfd, patience):
                self._kill()
        except BaseException:  # a second Ctrl-C: do not wait, but leave nothing behind either
            self._kill()
            raise
        finally:
            self._release()

    def release(self) -> None:
        """Let a detached server go on, and close what this process holds of it."""
        assert self._process is None, "only a detached server may outlive the process that started it"
        self._release()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        _ended(self._pidfd, STOP_SECONDS)

    def _release(self) -> None:
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        os.close(self._pidfd)
        self._pidfd = -1
        self.log.close()


def start_server(
    model_folder: str | os.PathLike[str],
    *,
    name: str,
    port: int = 0,
    host: str = "127.0.0.1",
    log_file: str | os.PathLike[str] | None = None,
    detached: bool = False,
    patience: float = START_SECONDS,
) -> Server:
    """Start a server of the model in `model_folder` and return it as soon as it has answered a request.

    `port` 0 takes a free one. What the server writes goes to `log_file` (default: a temporary file, gone with
    the handle). A `detached` server is in a session of its own and goes on after this process has ended; it
    needs a `log_file`. The process has `patience` seconds to answer.

    Raises `InputError` for a wrong argument, a model that cannot be served or a port in use,
    `MissingDependencyError` without kserve, and `JobFailed` with the end of the log if the server dies or
    does not answer in time; nothing is left running then.
    """
    check_name(name)
    check_port(port)
    read_config(model_folder)
    require_kserve()
    if detached and log_file is None:
        raise InputError("log_file=None: a detached server outlives this process, so name a file for its log")
    command = [sys.executable, "-P", "-m", "elastic_runtime.serving", "--model", os.fspath(model_folder)]
    command += ["--name", name, "--port", str(port), "--host", host]
    command += ["--detach"] if detached else ["--parent", str(os.getpid())]
    log = _open_log(log_file)
    try:
        return _started(command, log, name=name, detached=detached, patience=patience)
    except BaseException:
        log.close()
        raise


def _started(command: list[str], log: IO[bytes], *, name: str, detached: bool, patience: float) -> Server:
    started = time.monotonic()
    reader, writer = os.pipe()
    pidfd = -1
    process = None
    try:
        try:
            process = subprocess.Popen(
                [*command, "--ready-fd", str(writer)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(writer,),
                start_new_session=True,
            )
        finally:
            os.close(writer)
        lines = _Lines(reader, started + patience)
        # First its pid, unknown of a detached server; then that it answers, or why it never will.
        pid = int(lines.next_or_fail(process, log, patience)["pid"])
        pidfd = os.pidfd_open(pid)
        said = lines.next_or_fail(process, log, patience)
        if detached:
            process.wait()
        return Server(
            name=name,
            url=said["url"],
            pid=pid,
            ready_seconds=time.monotonic() - started,
            log=log,
            _process=None if detached else process,
            _pidfd=pidfd,
        )
    except BaseException:
        if pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        if process is not None:
            process.kill()
            process.wait()
        raise
    finally:
        os.close(reader)


class _Lines:
    """JSON lines from a pipe, waited for until a deadline."""

    def __init__(self, reader: int, deadline: float) -> None:
        self._reader = reader
        self._deadline = deadline
        self._content = b""

    def next_or_fail(
        self, process: subprocess.Popen[bytes], log: IO[bytes], patience: float
    ) -> dict[str, Any]:
        """Return the next line, or raise the error that explains why there is none."""
        while b"\n" not in self._content:
            left = max(0.0, self._deadline - time.monotonic())
            if not select.select([self._reader], [], [], left)[0]:
                raise JobFailed(
                    f"the server did not answer within {patience:g} s; the end of its log:\n{_tail(log)}"
                )
            part = os.read(self._reader, 4096)
            if not part:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_SECONDS)
                raise JobFailed(
                    f"the server ended before it answered (exit code {process.returncode}); the end of "
                    f"its log:\n{_tail(log)}"
                )
            self._content += part
        line, _, self._content = self._content.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise (InputError if said["code"] == EXIT_INPUT else JobFailed)(said["error"])
        return said


def _open_log(log_file: str | os.PathLike[str] | None) -> IO[bytes]:
    if log_file is None:
        return tempfile.TemporaryFile(prefix="serving-")
    path = Path(log_file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w+b")
    except OSError as error:
        raise InputError(f"log_file={os.fspath(log_file)!r} cannot be written: {error.strerror}") from error


def _tail(log: IO[bytes]) -> str:
    # Not by seeking: the server writes through the same open file, and would go on writing there.
    size = os.fstat(log.fileno()).st_size
    content = os.pread(log.fileno(), 16_384, max(0, size - 16_384))
    lines = content.decode(errors="replace").strip().splitlines()
    return "\n".join(lines[-_LOG_LINES:]) or "(the log is empty)"


def _ended(pidfd: int, patience: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(round(patience * 1000)))
