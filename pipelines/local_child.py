"""The process in which kfp runs a compiled pipeline on this machine; `local` starts it under a guard.

    python -m kfp_elastic.pipelines.local_child REQUEST.json

kfp's local runner differs from a cluster, and from what people need, in five ways; for each a function of
`kfp.local` is wrapped here for the time of the run (a unit test fails when kfp renames one):

- it waits for ever for what a step's process left running, and gives up at output that is not UTF-8;
- it turns whole numbers inside lists and dicts into floats, a cluster does not;
- it calls a step whose output artifact nobody wrote, or whose return value is None, a success;
- it says neither when a step began and ended nor what it wrote;
- it puts a run into a folder with a name of its own choice.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from elastic_runtime.errors import EXIT_FAILED, EXIT_OK
from elastic_runtime.processes.guard import guarded
from kfp_elastic.pipelines.step_output import StepOutput

__all__ = ["LocalRun", "main", "whole_numbers"]

_METADATA_ONLY = {
    "system.ClassificationMetrics",
    "system.Metrics",
    "system.SlicedClassificationMetrics",
}
"""Artifact types that kfp stores as metadata; a file is optional."""


def whole_numbers(value: Any) -> Any:
    """Return a JSON value with every float without a fraction as an int, as a cluster writes it."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        return int(value)
    if isinstance(value, list):
        return [whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: whole_numbers(item) for key, item in value.items()}
    return value


class LocalRun:
    """One run: wraps kfp's step execution and records every step in `state_file` as it begins and ends.

    `environments` maps a step's name to variables that this step alone gets.
    """

    def __init__(
        self,
        run_dir: Path,
        state_file: Path,
        output: StepOutput,
        environments: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.run_dir = run_dir
        self._state_file = state_file
        self._output = output
        self._environments = environments or {}
        self._steps: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._state = threading.local()

    @contextmanager
    def wrapped(self) -> Iterator[None]:
        """Wrap the functions of `kfp.local` for the time of this context."""
        from kfp.local import executor_input_utils, subprocess_task_handler, task_dispatcher

        def parameters_as_on_a_cluster(*args: Any, **kwargs: Any) -> dict[str, Any]:
            return _with_whole_numbers(to_dict(*args, **kwargs), kwargs["component_spec"])

        def process(full_command: list[str], env_vars: Mapping[str, str] | None = None) -> int:
            return self._process(full_command, env_vars or {})

        def step(**kwargs: Any) -> tuple[dict[str, Any], Any]:
            return self._step(run_step, kwargs)

        to_dict = executor_input_utils.executor_input_to_dict
        run_step = task_dispatcher.run_single_task_implementation
        with ExitStack() as stack:
            for owner, name, wrapper in (
                (executor_input_utils, "executor_input_to_dict", parameters_as_on_a_cluster),
                (executor_input_utils, "get_local_pipeline_resource_name", lambda _: self.run_dir.name),
                (subprocess_task_handler, "run_local_subprocess", process),
                (task_dispatcher, "run_single_task_implementation", step),
            ):
                stack.enter_context(_replaced(owner, name, wrapper))
            yield

    def _process(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run a step's process to its end, and end what it left running; return the exit code as a shell does."""
        with subprocess.Popen(
            guarded(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, **environment},
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                self._output.step_line(line.rstrip("\n"))
        code = process.returncode
        self._state.exit_code = code if code >= 0 else 128 - code
        return code

    def _step(
        self, run_step: Callable[..., tuple[dict[str, Any], Any]], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], Any]:
        from kfp.local import executor_input_utils, status

        name = executor_input_utils.get_local_task_resource_name(kwargs["component_name"])
        folder = self.run_dir.parent / kwargs["pipeline_resource_name"] / name
        record: dict[str, Any] = {
            "name": str(folder.relative_to(self.run_dir)),
            "status": "running",
            "started": time.time(),
            "seconds": None,
            "error": None,
            "parameters": {},
            "artifacts": {},
        }
        with self._lock:
            self._steps.append(record)
            self._save()
        self._output.say(f"{record['name']} | started")
        began = time.monotonic()
        self._state.exit_code = 0
        outputs: dict[str, Any] = {}
        ended: Any = None
        problem: str | None = "it was interrupted"
        log_path = self.run_dir / "logs" / f"{record['name'].replace('/', '.')}.log"
        with self._output.step(record["name"], log_path) as log, self._environment(name):
            try:
                outputs, ended = run_step(**kwargs)
                problem = None if ended == status.Status.SUCCESS else log.error(self._state.exit_code)
            except Exception as error:
                # Of a one-step pipeline kfp raises the failure, of any what it cannot hand to a step.
                problem = (
                    log.error(self._state.exit_code)
                    if _is_failure(error)
                    else f"{type(error).__name__}: {error}"
                )
                raise
            finally:
                # Also of a step that failed: its report says more than its error.
                missing = _describe_outputs(record, outputs, kwargs["component_spec"], folder)
                if problem is None and missing:
                    problem, ended = missing, status.Status.FAILURE
                record["seconds"] = round(time.monotonic() - began, 3)
                record["status"] = "failed" if problem else "succeeded"
                record["error"] = problem
                with self._lock:
                    self._save()
        self._output.say(f"{record['name']} | {record['status']} after {record['seconds']:.1f} s")
        return ({} if problem else outputs), ended

    @contextmanager
    def _environment(self, name: str) -> Iterator[None]:
        extra = self._environments.get(name)
        if not extra:
            yield
            return
        before = {key: os.environ.get(key) for key in extra}
        os.environ.update(extra)
        try:
            yield
        finally:
            for key, value in before.items():
                if value is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = value

    def _save(self) -> None:
        temporary = self._state_file.with_suffix(".tmp")
        temporary.write_text(json.dumps({"steps": self._steps}), encoding="utf-8")
        temporary.replace(self._state_file)


@contextmanager
def _replaced(owner: Any, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _with_whole_numbers(executor_input: dict[str, Any], component_spec: Any) -> dict[str, Any]:
    from kfp.pipeline_spec import pipeline_spec_pb2

    declared = component_spec.input_definitions.parameters
    double = pipeline_spec_pb2.ParameterType.ParameterTypeEnum.NUMBER_DOUBLE
    values = executor_input.get("inputs", {}).get("parameterValues", {})
    for name, value in values.items():
        # What kfp adds for placeholders inside text ("pipelinechannel--…") is not declared: it reads "5".
        if name not in declared or declared[name].parameter_type != double:
            values[name] = whole_numbers(value)
    return executor_input


def _is_failure(error: Exception) -> bool:
    """Whether kfp says with `error` no more than that a step failed."""
    return isinstance(error, RuntimeError) and "finished with status" in str(error)


def _describe_outputs(
    record: dict[str, Any], outputs: Mapping[str, Any], component_spec: Any, folder: Path
) -> str | None:
    """Fill in what the step wrote; return what is missing, or None."""
    missing = []
    for name in component_spec.output_definitions.parameters:
        record["parameters"][name] = outputs.get(name)
        if outputs.get(name) is None:
            missing.append(
                f"the return value {name!r}" if name == "Output" else f"the output parameter {name!r}"
            )
    for name, declared in component_spec.output_definitions.artifacts.items():
        kind = declared.artifact_type.schema_title
        artifact = outputs.get(name)
        metadata = dict(artifact.metadata) if artifact is not None else {}
        path = folder / name
        written = any(path.iterdir()) if path.is_dir() else path.exists()
        if not written and not (kind in _METADATA_ONLY and metadata):
            missing.append(f"the artifact {name!r} ({kind.removeprefix('system.')}, {path})")
            continue
        record["artifacts"][name] = {"type": kind, "metadata": metadata, "path": str(path)}
    return f"the step ended without an error but did not write {' and '.join(missing)}" if missing else None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the pipeline that the request file describes and return 0 or 1."""
    (request_path,) = argv if argv is not None else sys.argv[1:]
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    run_dir = Path(request["run_dir"])
    output = StepOutput(sys.stderr)
    # kfp logs each step's start, command, outputs and end on the root logger; `LocalRun` says it shorter.
    logging.getLogger().addFilter(
        lambda record: record.levelno > logging.INFO and "finished with status" not in record.getMessage()
    )

    from kfp import components, local

    run = LocalRun(run_dir, Path(request["state_file"]), output, request["environments"])
    pipeline = components.load_component_from_file(request["package"])
    local.init(
        local.SubprocessRunner(use_venv=False),
        pipeline_root=str(run_dir.parent),
        workspace_root=str(Path(request["state_file"]).parent / "workspace"),
        raise_on_error=True,
    )
    with redirect_stdout(output), run.wrapped(), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="You may be attemping to run a task", category=RuntimeWarning
        )
        try:
            pipeline(**request["parameters"])
        except RuntimeError as error:
            if not _is_failure(error):
                raise
            return EXIT_FAILED
        except OSError as error:
            # A full disk, mostly: the step's record has it, and a traceback through kfp would say no more.
            output.say(f"error: {error}")
            return EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
