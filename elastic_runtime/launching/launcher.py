"""Submits a job through the torchx runner, streams its log, and returns how it ended."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from elastic_runtime.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    InputError,
    NameInUseError,
    UnknownNameError,
)
from elastic_runtime.jobs.folder import JobFolder, default_folder
from elastic_runtime.jobs.spec import JobSpec

__all__ = ["JobResult", "launch"]

LOCAL_SCHEDULER = "local_cwd"


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
) -> JobResult:
    """Run a job to its end. Its log lines go to `write` (standard output by default), newline included.

    The job is cancelled, and nothing of it left on this machine, when this call is interrupted by SIGINT,
    SIGTERM or an exception. Call it in the main thread: the kernel takes that thread's end for the launcher's.

    Raises `InputError` for an unknown scheduler or option and `NameInUseError` if a live job has this name, before
    anything starts; `KeyboardInterrupt` after an interrupt.
    """
    from torchx.runner import get_runner

    from elastic_runtime.launching.appdef import ROLE, build_appdef, check_appdef

    assert spec.name is not None, "a launched job has a name"
    folder = JobFolder(Path(spec.state_dir) if spec.state_dir else default_folder(spec.name))
    local = scheduler.startswith("local")
    if local and folder.is_live():
        raise NameInUseError(f"job {spec.name!r} is running ({folder.path}): stop it or choose another name")
    app = check_appdef(build_appdef(spec, image=image))
    output = write or sys.stdout.write
    with _stop_signals() as install, get_runner() as runner:
        config = _scheduler_config(runner, scheduler, scheduler_args or {})
        # torchx's local scheduler brings handlers of its own, which raise an error that is no interrupt.
        install()
        if local:
            folder.create()
            config.setdefault("log_dir", str(folder.path / "torchx"))
        handle = runner.run(app, scheduler, config)
        try:
            lines = runner.log_lines(handle, ROLE, 0, should_tail=True)
            for line in _whole_lines(lines) if local else lines:
                output(line if line.endswith("\n") else f"{line}\n")
            status = runner.wait(handle, wait_interval=0.05)
        except BaseException:
            runner.cancel(handle)
            raise
    return _result(spec.name, handle, folder, status)


def _whole_lines(pieces: Iterable[str]) -> Iterator[str]:
    """Join what torchx's local scheduler cuts: it reads fixed blocks, and a line across two comes as two pieces."""
    rest = ""
    for piece in pieces:
        rest += piece
        if rest.endswith("\n"):
            yield rest
            rest = ""
    if rest:
        yield rest


def _result(name: str, handle: str, folder: JobFolder, status: Any) -> JobResult:
    record = folder.record()
    state_name = getattr(getattr(status, "state", None), "name", "UNKNOWN")
    by_scheduler = {"SUCCEEDED": ("succeeded", EXIT_OK), "CANCELLED": ("stopped", EXIT_INTERRUPTED)}
    state, code = by_scheduler.get(state_name, ("failed", EXIT_FAILED))
    reason = f"the scheduler says {state_name}"
    if record is not None:
        state, code, reason = record["state"], record["exit_code"], record["reason"]
    elif state == "failed":
        reason += "; the job left no record: see its log above"
    return JobResult(
        name=name, handle=handle, exit_code=code, state=state, reason=reason, folder=folder, record=record
    )


def _scheduler_config(runner: Any, scheduler: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `.torchxconfig`'s options for the scheduler with `given` on top; a mistyped one is an error."""
    from torchx.runner import config

    known = runner.scheduler_backends()
    if scheduler not in known:
        raise UnknownNameError.of("scheduler", scheduler, known)
    options = {name for name, _ in runner.scheduler_run_opts(scheduler)}
    for name in given:
        if name not in options:
            raise UnknownNameError.of(f"option of scheduler {scheduler}", name, options)
    merged = dict(given)
    try:
        config.apply(scheduler, merged)
    except (OSError, ValueError) as error:
        raise InputError(f".torchxconfig: {error}") from error
    return merged


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
