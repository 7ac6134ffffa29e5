"""Submits a job through the torchx runner, streams its log, and returns how it ended."""

from __future__ import annotations

import configparser
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from elastic_runtime.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    InputError,
    IntegrityError,
    JobFailed,
    NameInUseError,
    UnknownNameError,
)
from elastic_runtime.jobs.folder import JobFolder, default_folder
from elastic_runtime.jobs.lookup import check_free
from elastic_runtime.jobs.spec import JobSpec

__all__ = ["LOCAL_SCHEDULER", "JobResult", "check_startable", "launch", "write_line"]

LOCAL_SCHEDULER = "local_cwd"
"""torchx scheduler that runs a job on this machine."""
_STOP_MARGIN = 5.0
"""Seconds beyond the workers' grace in which a job on this machine must have stopped before torchx ends it."""


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """How a job ended."""

    name: str
    """Job name."""
    handle: str
    """torchx handle."""
    exit_code: int
    """0 done, 1 failed, 130 stopped; see `elastic_runtime.errors`."""
    state: str
    """`succeeded`, `failed` or `stopped`."""
    reason: str
    """Why, in one line."""
    folder: JobFolder
    """The job's folder, if it ran on this machine or on shared storage."""
    record: Mapping[str, Any] | None
    """The job record, if it could be read."""


def launch(
    spec: JobSpec,
    *,
    scheduler: str = LOCAL_SCHEDULER,
    scheduler_args: Mapping[str, Any] | None = None,
    image: str | None = None,
    write: Callable[[str], object] | None = None,
    submitted: Callable[[str], object] | None = None,
) -> JobResult:
    """Run a job to its end. Its log lines go to `write` (standard output by default), newline included.

    `submitted` is called once with the job's handle, as soon as the scheduler has it.

    The job is cancelled, and nothing of it left on this machine, when this call is interrupted by SIGINT,
    SIGTERM or an exception. Call it in the main thread: the kernel takes that thread's end for the launcher's.

    Raises `InputError` for an unknown scheduler or option and `NameInUseError` if a live job has this name, before
    anything starts; `KeyboardInterrupt` after an interrupt.
    """
    from torchx.runner import get_runner
    from torchx.schedulers.local_scheduler import SignalException

    from elastic_runtime.launching.appdef import ROLE, build_appdef, check_appdef

    assert spec.name is not None, "a launched job has a name"
    folder = JobFolder(Path(spec.state_dir) if spec.state_dir else default_folder(spec.name))
    local = scheduler.startswith("local")
    if local:
        check_startable(spec.name, folder)
    app = check_appdef(build_appdef(spec, image=image))
    # What torchx tells of itself (trackers, log folders) would stand between the job's own lines.
    logging.getLogger("torchx").setLevel(logging.WARNING)
    output = write or (lambda line: write_line(sys.stdout, line))
    handle, status, trouble = "", None, ""
    try:
        with _stop_signals() as install, get_runner() as runner:
            config = _scheduler_config(runner, scheduler, scheduler_args or {})
            # torchx's local scheduler brings handlers of its own, which raise an error that is no interrupt.
            install()
            if local:
                folder.create()
                config.setdefault("log_dir", str(folder.path / "torchx"))
            handle = runner.run(app, scheduler, config)
            try:
                if submitted is not None:
                    submitted(handle)
                lines = runner.log_lines(handle, ROLE, 0, should_tail=True)
                for line in _whole_lines(lines) if local else lines:
                    output(line if line.endswith("\n") else f"{line}\n")
                status = runner.wait(handle, wait_interval=0.05)
            except BaseException:
                try:
                    if local:
                        _stop_politely(runner, handle, folder, spec.grace + _STOP_MARGIN)
                finally:
                    runner.cancel(handle)
                raise
    except SignalException:
        # Raised by torchx's own handler, in the moment before ours are back.
        raise KeyboardInterrupt from None
    except BrokenPipeError:
        raise  # Whoever read our output went away, and with that stopped the job.
    except (OSError, configparser.Error) as error:
        if isinstance(error, configparser.Error):
            raise InputError(_config_trouble(error)) from error
        if not handle:
            raise JobFailed(f"job {spec.name!r} could not be started: {error}") from error
        trouble = str(error)  # Such as a full disk, on which torchx cannot write its own files either.
    return _result(spec.name, handle, folder, status, trouble)


def check_startable(name: str, folder: JobFolder) -> None:
    """Raise `NameInUseError` if a live job has the name or the folder, `InputError` if the folder is not usable."""
    folder.check_usable()
    if folder.is_live():
        raise NameInUseError(f"job {name!r} is running ({folder.path}): stop it or choose another name")
    check_free(name, folder.path.absolute())


def write_line(stream: TextIO, line: str) -> None:
    """Write `line` and flush; what the stream's encoding lacks is written as an escape."""
    try:
        stream.write(line)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(line.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def _stop_politely(runner: Any, handle: str, folder: JobFolder, patience: float) -> None:
    """Ask the supervisor to stop the job and wait at most `patience` seconds for that.

    torchx's own cancel waits 10 seconds, whatever the workers' grace. Another interrupt ends the wait.
    """
    pid = folder.supervisor_of(_app_id(handle))
    if pid is None:
        return
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        status = runner.status(handle)
        if status is None or status.is_terminal():
            return
        time.sleep(0.02)


def _app_id(handle: str) -> str:
    return handle.rpartition("/")[2]


def _whole_lines(pieces: Iterable[str]) -> Iterator[str]:
    """Join what torchx's local scheduler cuts: it reads fixed blocks, and a line across two comes as two pieces."""
    rest = ""
    for piece in pieces:
        rest += piece.replace("\0", "")  # What the supervisor gave back to the disk reads as zeros.
        if rest.endswith("\n"):
            yield rest
            rest = ""
    if rest:
        yield rest


def _result(name: str, handle: str, folder: JobFolder, status: Any, trouble: str = "") -> JobResult:
    record, told = None, ""
    try:
        record = folder.record()
    except IntegrityError as error:
        told = f"; {error}"
    if record is not None and record.get("app_id") != _app_id(handle):
        record = None  # An earlier job's, or another's that runs in this folder.
    state_name = getattr(getattr(status, "state", None), "name", "UNKNOWN")
    by_scheduler = {"SUCCEEDED": ("succeeded", EXIT_OK), "CANCELLED": ("stopped", EXIT_INTERRUPTED)}
    state, code = by_scheduler.get(state_name, ("failed", EXIT_FAILED))
    reason = f"the launcher failed: {trouble}" if trouble else f"the scheduler says {state_name}"
    if record is not None:
        state, code, reason = record["state"], record["exit_code"], record["reason"]
    elif state == "failed":
        reason += told or "; the job left no record: see its log above"
        with suppress(OSError):
            if shutil.disk_usage(folder.path).free < 1 << 16:
                reason += f"; the disk of {folder.path} is full: make room there or choose another folder"
    return JobResult(
        name=name, handle=handle, exit_code=code, state=state, reason=reason, folder=folder, record=record
    )


def _scheduler_config(runner: Any, scheduler: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `.torchxconfig`'s options for the scheduler with `given` on top; a mistyped one is an error."""
    from torchx.runner import config

    known = runner.scheduler_backends()
    if scheduler not in known:
        raise UnknownNameError.of("scheduler", scheduler, known)
    run_options = runner.scheduler_run_opts(scheduler)
    options = {name for name, _ in run_options}
    for name in given:
        if name not in options:
            raise UnknownNameError.of(f"option of scheduler {scheduler}", name, options)
    merged = {}
    for name, value in given.items():
        try:
            merged[name] = run_options.get(name).cast_to_type(value) if isinstance(value, str) else value
        except (ValueError, SyntaxError) as error:
            raise InputError(f"option {name}={value!r} of scheduler {scheduler}: {error}") from error
    try:
        for path in config.find_configs(None):
            _check_config(path, scheduler, options)
        config.apply(scheduler, merged)
    except UnknownNameError:
        raise
    except (OSError, ValueError, configparser.Error) as error:
        raise InputError(_config_trouble(error)) from error
    return merged


def _check_config(path: str, scheduler: str, options: set[str]) -> None:
    """Raise `UnknownNameError` for an option of our scheduler that torchx would only warn of."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # as torchx reads it
    parser.read(path, encoding="utf-8")
    for name in parser[scheduler] if parser.has_section(scheduler) else ():
        if name not in options:
            raise UnknownNameError.of(f"option of scheduler {scheduler} in .torchxconfig", name, options)


def _config_trouble(error: Exception) -> str:
    return f".torchxconfig: {' '.join(str(error).split())}: correct or remove that file"


@contextmanager
def _stop_signals() -> Iterator[Callable[[], None]]:
    """Have SIGTERM and SIGHUP interrupt the main thread as SIGINT does, so that the job is cancelled.

    Yields a function that installs the handlers again, after somebody else changed them.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def install() -> None:
        for number in before:
            signal.signal(number, interrupt)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    install()
    try:
        yield install
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
