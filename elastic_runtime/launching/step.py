"""The training step of a pipeline: launch the job, follow it, and check and describe what it produced."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_runtime import names
from elastic_runtime.errors import ElasticError, InputError, JobFailed, JobPreempted
from elastic_runtime.jobs import report
from elastic_runtime.jobs.folder import JobFolder, write_json
from elastic_runtime.jobs.nodes import parse_nodes, parse_workers
from elastic_runtime.jobs.spec import JobSpec, environment_of, preload_of, program_of
from elastic_runtime.launching.launcher import LOCAL_SCHEDULER, JobResult, launch
from elastic_runtime.models import ModelConfig, read_config

__all__ = ["TrainOutputs", "TrainRequest", "train"]


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """What the training step was asked for; the component's parameters, one to one."""

    script: str = ""
    """Python file to run, or empty for a module."""
    module: str = ""
    """Module to run as `python -m`, or empty for a script."""
    script_sha256: str = ""
    """Checksum that the program must have; empty accepts any."""
    arguments: Sequence[Any] = ()
    """Command line of the program; `{dataset}`, `{model}` and `{checkpoints}` become paths."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    """Appended as `--name=value`; lists and objects as JSON, True as `--name`, None and False left out."""
    nodes: str = "1"
    """Nodes, as in `--nodes`."""
    nproc_per_node: int = 1
    """Workers of a node."""
    max_restarts: int = 10
    """Worker failures after which the job stops."""
    preload: str = ""
    """Modules to import once, before workers are forked, separated by commas."""
    scheduler: str = LOCAL_SCHEDULER
    """torchx scheduler."""
    scheduler_args: Mapping[str, Any] = field(default_factory=dict)
    """Options of the scheduler."""
    env: Mapping[str, Any] = field(default_factory=dict)
    """Environment of the workers."""


@dataclass(frozen=True, kw_only=True)
class TrainOutputs:
    """Where the step writes, one path an artifact."""

    model: Path
    report: Path
    job_record: Path
    work_dir: Path
    """Folder of the job: logs, events, checkpoints."""


def whole_numbers(value: Any) -> Any:
    """Return `value` with whole floats as ints, at any depth.

    kfp carries numbers in lists and objects as doubles, so that 64 arrives as 64.0 from its local runner. What was
    written as 2.0 becomes 2 as well, as it does on a cluster.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [whole_numbers(item) for item in value]
    return value


def command_line(request: TrainRequest, places: Mapping[str, str]) -> list[str]:
    """Return the program's arguments: `request.arguments` with places filled in, then the hyperparameters.

    Raises `InputError` for an argument that is no text or number, or a hyperparameter name that cannot be an option.
    """
    words = []
    for argument in whole_numbers(list(request.arguments)):
        if argument is None:
            continue
        if isinstance(argument, bool) or not isinstance(argument, str | int | float):
            raise InputError(f"arguments: {argument!r} is neither a text nor a number")
        text = str(argument)
        for name, path in places.items():
            text = text.replace(f"{{{name}}}", path)
        words.append(text)
    for name, value in whole_numbers(request.hyperparameters).items():
        if not name or name.startswith("-") or any(character in name for character in "= \n\0"):
            raise InputError(f"hyperparameters: {name!r} cannot be the name of an option")
        if value is None or value is False:
            continue
        if value is True:
            words.append(f"--{name}")
        else:
            words.append(f"--{name}={value if isinstance(value, str) else json.dumps(value)}")
    return words


def train(request: TrainRequest, outputs: TrainOutputs, *, dataset: str | None = None) -> dict[str, float]:
    """Run the job and write model, report and record; return the figures for KFP's Metrics.

    The report and the record are written when the job fails, too. Raises `InputError` for a wrong parameter before
    anything starts, `JobFailed` if the job failed or wrote no valid model, and `JobPreempted` if it was stopped.
    """
    program = program_of(request.script, request.module, present=request.scheduler.startswith("local"))
    found = program.sha256()
    if request.script_sha256 and found and found != request.script_sha256:
        raise InputError(
            f"{program.script or program.module}: its sha256 is {found[:12]}…, but {request.script_sha256[:12]}… was "
            "compiled into the pipeline: compile it again, or use the image that it was compiled for"
        )
    folder = JobFolder(outputs.work_dir.absolute())
    outputs.model.mkdir(parents=True, exist_ok=True)
    places = {
        "dataset": dataset or "",
        "model": str(outputs.model.absolute()),
        "checkpoints": str(folder.path / "checkpoints"),
    }
    environment = environment_of(whole_numbers(request.env))
    if dataset:
        environment.setdefault("ELASTIC_DATASET_DIR", dataset)
    spec = JobSpec(
        program=program,
        arguments=command_line(request, places),
        nodes=parse_nodes(request.nodes, parse_workers(request.nproc_per_node)),
        name=_job_name(program.label, outputs.model),
        max_restarts=request.max_restarts,
        state_dir=str(folder.path),
        output_dir=places["model"],
        environment=environment,
        preload=preload_of(request.preload),
    )
    result = launch(spec, scheduler=request.scheduler, scheduler_args=whole_numbers(request.scheduler_args))
    record = _describe(result, outputs)
    if result.state == "stopped":
        raise JobPreempted(f"training was stopped: {result.reason}")
    if result.exit_code != 0:
        raise JobFailed(f"training failed: {result.reason}")
    config = _checked_model(outputs.model, program.script or program.module or "")
    return _figures(record, folder, config)


def _job_name(label: str, model: Path) -> str:
    """Return a name that a retry of the same step has again: the program and a hash of the output's place."""
    digest = hashlib.sha256(os.fsencode(model.absolute())).hexdigest()[:8]
    return names.valid_name(f"{names.valid_name(label, limit=40)}-{digest}")


def _describe(result: JobResult, outputs: TrainOutputs) -> Mapping[str, Any]:
    """Write record and report, also for a job that left none: then from what is known."""
    record = dict(
        result.record
        or {
            "name": result.name, "state": result.state, "reason": result.reason, "exit_code": result.exit_code,
            "global_step": 0, "world_size": 0, "restarts": 0, "max_restarts": 0, "started": 0.0, "ended": 0.0,
            "seconds": 0.0, "recoveries": [], "events": [],
        }
    )  # fmt: skip
    record.pop("schema", None)
    record["handle"] = result.handle
    outputs.job_record.parent.mkdir(parents=True, exist_ok=True)
    write_json(outputs.job_record, record)
    outputs.report.parent.mkdir(parents=True, exist_ok=True)
    outputs.report.write_text(report.render(result.folder, record), encoding="utf-8")
    return record


def _checked_model(folder: Path, program: str) -> ModelConfig:
    try:
        return read_config(folder)
    except (ElasticError, OSError) as error:
        if not any(folder.iterdir()):
            raise JobFailed(
                f"the script wrote no model to {folder}: {program} must save one there (save_model)"
            ) from error
        raise JobFailed(f"the script wrote no valid model to {folder}: {error}") from error


def _figures(record: Mapping[str, Any], folder: JobFolder, config: ModelConfig) -> dict[str, float]:
    figures = {
        "steps": record["global_step"],
        "seconds": round(record["seconds"], 3),
        "world_size": record["world_size"],
        "restarts": record["restarts"],
    }
    seconds = [recovery["seconds"] for recovery in record["recoveries"] if recovery["seconds"] is not None]
    if seconds:
        figures["recovery_seconds"] = round(sum(seconds), 3)
    metrics = folder.metrics()
    if metrics and isinstance(metrics[-1].get("loss"), int | float):
        figures["train_loss"] = metrics[-1]["loss"]
    return figures
