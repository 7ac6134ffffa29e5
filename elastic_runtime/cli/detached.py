"""A launcher in the background: a process in a session of its own that follows its job to the end.

It is a fork of the command, made before anything heavy is loaded, so it runs the very job that was checked. What it
says goes to `logs/launcher.log`, which it locks as long as it lives. If it dies, its job ends, like that of a
launcher in the foreground.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from elastic_runtime.errors import EXIT_FAILED, EXIT_INTERRUPTED, ElasticError, JobFailed, NameInUseError
from elastic_runtime.jobs import locks
from elastic_runtime.jobs.folder import JobFolder, default_folder, tail
from elastic_runtime.jobs.spec import JobSpec

__all__ = ["start_detached"]

_START_PATIENCE = 120.0
_END_PATIENCE = 30.0
_POLL = 0.02
_SHOWN = 20
"""Lines of the launcher's log that an error shows."""

Follow = Callable[[Callable[[str], object]], int]


class _Relayed(ElasticError):
    """An error of the launcher in the background."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def start_detached(spec: JobSpec, follow: Follow, *, scheduler: str) -> tuple[str, JobFolder]:
    """Call `follow` in the background, and return the job's handle and folder once the job runs.

    `follow` gets a function that it has to call with the handle as soon as there is one; it returns an exit code. On
    this machine the job runs when its supervisor holds the folder; elsewhere when the scheduler has taken it.

    Raises what the launcher raised before that, `NameInUseError` if a live job has the name, `JobFailed` if the job
    ended before it began or has not begun after two minutes; then nothing of it is left.
    """
    from elastic_runtime.launching.launcher import LOCAL_SCHEDULER, check_startable

    assert spec.name is not None, "a launched job has a name"
    folder = JobFolder(Path(spec.state_dir) if spec.state_dir else default_folder(spec.name))
    if scheduler == LOCAL_SCHEDULER:
        check_startable(spec.name, folder)
    folder.create()
    held = locks.take(folder.launcher_log, patience=5.0)
    if held is None:
        raise NameInUseError(
            f"job {spec.name!r}: a launcher still follows the job in {folder.path}: "
            f"stop it (kfp-elastic stop {spec.name}) or choose another name"
        )
    os.ftruncate(held, 0)
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _background(folder, follow, writing, keep=held)
    os.close(writing)
    # The lock goes on in the child, which shares it.
    os.close(held)
    try:
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            handle = _wait(pipe, folder, by_folder=scheduler == LOCAL_SCHEDULER)
    except BaseException:
        _end(pid)
        _forget(folder)
        raise
    return handle, folder


def _background(folder: JobFolder, follow: Follow, writing: int, *, keep: int) -> NoReturn:
    code = EXIT_FAILED
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        log = os.open(folder.launcher_log, os.O_WRONLY | os.O_APPEND)
        for target, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source, target)
        # Whoever waits for the end of the command's output must not wait for the job.
        first = 3
        for kept in sorted((writing, keep)):
            os.closerange(first, kept)
            first = kept + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        code = follow(lambda handle: _say(writing, handle=handle))
        with suppress(OSError):
            _say(writing, ended=code)
    except ElasticError as error:
        code = error.exit_code
        sys.stderr.write(f"error: {error}\n")
        with suppress(OSError):
            _say(writing, error=str(error), exit_code=code)
    except (KeyboardInterrupt, BrokenPipeError):
        code = EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - told to the one who waits
        traceback.print_exc()
        with suppress(OSError):
            _say(writing, error=f"the launcher failed: {error!r}", exit_code=code)
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _say(writing: int, **message: Any) -> None:
    os.write(writing, json.dumps(message).encode() + b"\n")


def _wait(pipe: Any, folder: JobFolder, *, by_folder: bool) -> str:
    """Return the handle once the job has started."""
    deadline = time.monotonic() + _START_PATIENCE
    handle, rest, over = "", b"", False
    while True:
        if not over and select.select([pipe], [], [], _POLL)[0]:
            data = pipe.read(1 << 16)
            over = not data
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "error" in message:
                    raise _Relayed(message["error"], message["exit_code"])
                handle = message.get("handle", handle)
                over = over or "ended" in message
        if handle and (not by_folder or _has_begun(folder, handle.rpartition("/")[2])):
            return handle
        if over:
            raise JobFailed(f"the job ended before it began{_log(folder)}")
        if time.monotonic() > deadline:
            raise JobFailed(f"the job has not begun after {_START_PATIENCE:.0f} s{_log(folder)}")


def _has_begun(folder: JobFolder, app_id: str) -> bool:
    if folder.supervisor_of(app_id) is not None:
        return True
    with suppress(ElasticError, OSError):
        record = folder.record()
        return record is not None and record.get("app_id") == app_id
    return False


def _log(folder: JobFolder) -> str:
    lines = tail(folder.launcher_log).splitlines()[-_SHOWN:]
    return ":\n  " + "\n  ".join(lines) if lines else f" (see {folder.launcher_log})"


def _forget(folder: JobFolder) -> None:
    """Remove the folder again if no job has begun in it."""
    with suppress(OSError):
        if not (folder.path / "job.json").exists() and not folder.is_live():
            folder.launcher_log.unlink(missing_ok=True)
            folder.logs.rmdir()
            folder.path.rmdir()


def _end(pid: int) -> None:
    """Have the launcher cancel its job and end."""
    deadline = time.monotonic() + _END_PATIENCE
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGTERM)
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)  # Its guard ends the rest.
                os.waitpid(pid, 0)
                return
            time.sleep(_POLL)
