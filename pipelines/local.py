"""Run a pipeline on this machine into a predictable folder, and leave no process behind however it ends.

    runs/<pipeline>/<run id>/<step>/<artifact>      what the steps wrote
    runs/<pipeline>/<run id>/logs/<step>.log        everything they printed
    runs/<pipeline>/<run id>/index.html             the page that links it all
    runs/<pipeline>/<run id>/result.json            the same for programs
    runs/<pipeline>/latest                          the newest run

kfp runs in a child process below a guard (`elastic_runtime.processes.guard`). The guard gets SIGTERM from
the kernel when this process dies, from its very first instruction on, so that no moment of a SIGKILL leaves
anything.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from elastic_runtime.errors import ElasticError, InputError
from elastic_runtime.processes import tree
from elastic_runtime.processes.guard import guarded
from kfp_elastic.pipelines import RegisteredPipeline, lookup
from kfp_elastic.pipelines.compiling import compiled_text, load_pipeline
from kfp_elastic.pipelines.faults import TRAIN_STEP, kill_environment
from kfp_elastic.pipelines.limits import check_limits
from kfp_elastic.pipelines.parameters import check_nested_text, checked_parameters
from kfp_elastic.pipelines.planned import planned_steps
from kfp_elastic.pipelines.results import FAILED, RunResult, collect, write_result
from kfp_elastic.pipelines.run_page import render_run
from kfp_elastic.pipelines.scratch import scratch_folder

__all__ = ["run_local"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_S = 3.0
"""Seconds that the run's own process has to end; its steps are killed right after it."""
_PATIENCE_S = 20.0
"""Seconds after which a guard that does not end is killed itself."""


def run_local(
    name: str,
    parameters: Mapping[str, Any] | None = None,
    *,
    runs_dir: str | Path = "./runs",
    kill_worker: bool = False,
    keep_serving: bool = False,
) -> RunResult:
    """Run the pipeline `name` (or a compiled `.yaml` file) here and return its result.

    `kill_worker` has one training worker killed in the middle of an epoch; `keep_serving` starts a server of
    the model that goes on when this process has ended (`RunResult.served` says its pid). Everything steps
    print goes to standard error. SIGINT, SIGTERM and SIGHUP end the run (result: `interrupted`), a second one
    at once; this needs the main thread, elsewhere the process' own handlers stay.

    Raises `InputError` before anything starts: unknown pipeline or parameter, a value of the wrong type, a
    `runs_dir` that cannot be written. A step that fails does not raise: see `RunResult.status` and `.error`.
    """
    entry = lookup(name)
    pipeline = load_pipeline(entry)
    values = checked_parameters(parameters or {}, pipeline.component_spec.inputs, pipeline=entry.name)
    check_limits(values, entry)
    package = compiled_text(pipeline)
    check_nested_text(values, package, pipeline=entry.name)
    environments = {}
    if kill_worker:
        environments[TRAIN_STEP] = kill_environment(entry, pipeline.pipeline_spec, values)
    run_dir = _new_run_dir(runs_dir, entry)
    began = time.monotonic()
    try:
        with _Stopping() as stopping, scratch_folder() as internal:
            (run_dir / "pipeline.yaml").write_text(package, encoding="utf-8")
            request = {
                "run_dir": str(run_dir),
                "package": str(run_dir / "pipeline.yaml"),
                "parameters": values,
                "environments": environments,
                "state_file": str(internal / "state.json"),
            }
            (internal / "request.json").write_text(json.dumps(request), encoding="utf-8")
            exit_code = _run_child(internal, stopping)
            result = collect(
                pipeline=entry.name,
                run_dir=run_dir,
                parameters=values,
                records=_read_records(internal / "state.json"),
                exit_code=exit_code,
                interrupted=stopping.requested,
                seconds=time.monotonic() - began,
                wants_recovery=kill_worker,
                planned=planned_steps(package),
            )
            result = _written(result)
            if keep_serving:
                result = _written(_with_server(result, stopping))
    except OSError as error:
        where = error.filename or run_dir
        raise ElasticError(f"cannot start the run in {str(where)!r}: {error.strerror or error}") from error
    return result


def _written(result: RunResult) -> RunResult:
    """Write `result` into its folder; where that fails, return it with the reason, as a failure."""
    try:
        write_result(result)
        (result.run_dir / "index.html").write_text(render_run(result), encoding="utf-8")
    except OSError as error:
        where = error.filename or result.run_dir
        reason = f"cannot write the run's results to {str(where)!r}: {error.strerror or error}"
        before = f"{result.error}\n" if result.error else ""
        return replace(result, status=FAILED, error=before + reason)
    return result


def _with_server(result: RunResult, stopping: _Stopping) -> RunResult:
    """Start a server that stays and return `result` with its address, or with a note why there is none."""
    # The folder that the step served from: a pipeline may train several models.
    if result.served is None or result.packaged is None:
        note = "--keep-serving: there is nothing to serve, for the run served no model"
        return replace(result, notes=[*result.notes, note])
    from elastic_runtime.serving import start_server

    try:
        server = start_server(
            result.packaged,
            name=result.served.get("name") or "model",
            log_file=result.run_dir / "logs" / "server.log",
            detached=True,
        )
    except ElasticError as error:
        return replace(result, status=FAILED, error=f"--keep-serving: {error}")
    if stopping.requested:
        server.stop()
        return replace(result, status=FAILED, error="interrupted while the server started", interrupted=True)
    server.release()
    served = {**result.served, "url": server.url, "pid": server.pid, "stop": f"kill {server.pid}"}
    return replace(result, served=served)


@dataclass
class _Stopping:
    """Turns signals into an orderly end of the guard: the first asks, the second insists."""

    requested: bool = False
    guard: subprocess.Popen[bytes] | None = None
    deadline: float | None = None
    _before: dict[signal.Signals, Any] = field(default_factory=dict)

    def __enter__(self) -> _Stopping:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def watch(self, guard: subprocess.Popen[bytes]) -> None:
        """Pass stops on to `guard` from now on, also one that came while it was being started."""
        self.guard = guard
        if self.requested:
            self._pass_on()

    def _received(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._pass_on()

    def _pass_on(self) -> None:
        if self.guard is None:
            return
        if self.deadline is None:
            self.deadline = time.monotonic() + _PATIENCE_S
        with suppress(ProcessLookupError):
            # Not Popen.send_signal, which polls: the wait that this handler interrupts would lose the status.
            os.kill(self.guard.pid, signal.SIGTERM)


def _run_child(internal: Path, stopping: _Stopping) -> int:
    if stopping.requested:
        return 128 + signal.SIGTERM
    # -P: a user's own `kfp_elastic/` or `elastic_runtime/` in the current folder must not be taken for ours.
    command = [
        sys.executable,
        "-P",
        "-m",
        "kfp_elastic.pipelines.local_child",
        str(internal / "request.json"),
    ]
    parent = os.getpid()
    guard = subprocess.Popen(
        guarded(command, grace=_GRACE_S),
        stdin=subprocess.DEVNULL,
        # Standard output belongs to this command's result.
        stdout=2,
        env={**os.environ, "TMPDIR": str(internal), "PYTHONUNBUFFERED": "1"},
        # A Ctrl-C goes to this process alone, which stops the guard in order.
        start_new_session=True,
        preexec_fn=lambda: tree.die_with_parent(parent, signal.SIGTERM),
    )
    stopping.watch(guard)
    while True:
        try:
            return _shell_code(guard.wait(timeout=0.2))
        except subprocess.TimeoutExpired:
            if stopping.deadline is not None and time.monotonic() > stopping.deadline:
                guard.kill()


def _read_records(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    steps: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["steps"]
    return steps


def _new_run_dir(runs_dir: str | Path, entry: RegisteredPipeline) -> Path:
    if not str(runs_dir):
        raise InputError("--runs-dir is empty: give a folder, or leave it out for ./runs")
    run_id = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    try:
        run_dir = Path(runs_dir).resolve() / entry.name / run_id
        run_dir.mkdir(parents=True)
        _point_latest(run_dir)
    except OSError as error:
        raise InputError(
            f"--runs-dir {str(runs_dir)!r} cannot be written: {error.strerror}; give a folder that can be"
        ) from error
    return run_dir


def _point_latest(run_dir: Path) -> None:
    """Have `latest` beside `run_dir` point to it; two runs at once never leave it missing."""
    link = run_dir.parent / "latest"
    if link.exists() and not link.is_symlink():
        return
    temporary = run_dir.parent / f".latest-{run_dir.name}"
    temporary.symlink_to(run_dir.name)
    temporary.replace(link)


def _shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code
