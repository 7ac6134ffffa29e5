"""What a finished, failed or interrupted run left behind: collected from its folder, whatever is there."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_runtime.errors import EXIT_FAILED, EXIT_GATE, EXIT_INTERRUPTED, EXIT_OK

__all__ = [
    "FAILED",
    "GATE_FAILED",
    "SUCCEEDED",
    "RunResult",
    "StepResult",
    "collect",
    "metrics_by_step",
    "named_page",
    "reports_of_end",
    "rounded",
    "served_sentences",
    "write_result",
]

SUCCEEDED = "succeeded"
GATE_FAILED = "gate_failed"
FAILED = "failed"

_EXTENSIONS = {"system.HTML": ".html", "system.Markdown": ".md"}


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One step of a run."""

    name: str
    status: str
    """`succeeded`, `failed`, or `interrupted` for one that was running when the run was stopped."""
    seconds: float | None
    """Duration; None when it was interrupted."""
    error: str | None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Output parameters; a plain return value is called `Output`."""
    artifacts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By name: `type` (kfp's), `path` and `metadata`."""

    @property
    def evaluates(self) -> bool:
        """Whether it is a step of the evaluate component, also inside a loop (`for-loop-1-iteration-0/evaluate`)."""
        return self.name.rpartition("/")[2].startswith("evaluate")

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> StepResult:
        """Build one from what the run's process recorded."""
        running = record["status"] == "running"
        return cls(
            name=record["name"],
            status="interrupted" if running else record["status"],
            seconds=record["seconds"],
            error=record["error"],
            parameters=record["parameters"],
            artifacts=record["artifacts"],
        )


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The end of one local run."""

    pipeline: str
    run_id: str
    run_dir: Path
    status: str
    """`succeeded`, `gate_failed` or `failed` (also when interrupted)."""
    error: str | None
    interrupted: bool
    seconds: float
    parameters: Mapping[str, Any]
    steps: Sequence[StepResult]
    metrics: Mapping[str, float]
    """Every number of every Metrics artifact; the step's name comes first where two steps use one name."""
    recoveries: Sequence[Mapping[str, Any]]
    """`{cause, seconds, steps_lost}` of each recovery of the training job."""
    served: Mapping[str, Any] | None
    """`{url, matches_offline, latency_ms}` of the served model, its `name` and its `answer` to a request."""
    packaged: Path | None
    """Folder of the packaged model that was served."""
    artifacts: Mapping[str, Path]
    """Absolute path of every artifact by `step/name`."""
    not_run: Sequence[str] = ()
    """Steps of the pipeline that did not run: left out by a condition, or because the run ended before."""
    notes: Sequence[str] = ()
    """What a person should know about the run, one sentence each."""

    @property
    def exit_code(self) -> int:
        """The exit code of the command that made this run."""
        if self.interrupted:
            return EXIT_INTERRUPTED
        return {SUCCEEDED: EXIT_OK, GATE_FAILED: EXIT_GATE}.get(self.status, EXIT_FAILED)

    @property
    def not_run_status(self) -> str:
        """What to call a step that did not run: `skipped` by a condition, or `not run` in a run that failed."""
        return "not run" if self.status == FAILED else "skipped"

    def document(self) -> dict[str, Any]:
        """Return the JSON document of `pipeline run --local --json`, without `schema`."""
        served = self.served
        return {
            "pipeline": self.pipeline,
            "run_id": self.run_id,
            "status": self.status,
            "error": self.error,
            "interrupted": self.interrupted,
            "run_dir": str(self.run_dir),
            "metrics": dict(self.metrics),
            "recoveries": [dict(recovery) for recovery in self.recoveries],
            "served": dict(served) if served is not None else None,
            "artifacts": {name: str(path) for name, path in self.artifacts.items()},
            "seconds": self.seconds,
            "parameters": dict(self.parameters),
            "steps": [
                {"name": step.name, "status": step.status, "seconds": step.seconds, "error": step.error}
                for step in self.steps
            ],
            "not_run": list(self.not_run),
            "notes": list(self.notes),
        }


def collect(
    *,
    pipeline: str,
    run_dir: Path,
    parameters: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    exit_code: int,
    interrupted: bool,
    seconds: float,
    wants_recovery: bool,
    planned: Sequence[str] = (),
) -> RunResult:
    """Return the result of a run from what its steps recorded and wrote.

    `exit_code` is that of the process that ran kfp; `wants_recovery` says that a worker was to be killed; `planned`
    has the names of the pipeline's steps.
    """
    steps = [StepResult.of(record) for record in records]
    status, error = _verdict(steps, exit_code, interrupted)
    recoveries = list(_recoveries(steps))
    served, packaged = _served(steps)
    notes = []
    if wants_recovery and status != FAILED and not recoveries:
        notes.append("--kill-worker: no worker was killed, for training ended before the chosen step")
    return RunResult(
        pipeline=pipeline,
        run_id=run_dir.name,
        run_dir=run_dir,
        status=status,
        error=error,
        interrupted=interrupted,
        seconds=round(seconds, 3),
        parameters=parameters,
        steps=steps,
        metrics=_metrics(steps),
        recoveries=recoveries,
        served=served,
        packaged=packaged,
        artifacts={f"{step.name}/{name}": path for step, name, path in _present(steps)},
        not_run=_not_run(steps, planned),
        notes=notes,
    )


def write_result(result: RunResult) -> None:
    """Write `result.json` and give every page a name that a browser knows.

    `report` becomes `report.html`, and a link of the old name stays: not the other way round, for a browser follows
    the link and shows the source of a page whose real name has no ending.
    """
    for step in result.steps:
        for artifact in step.artifacts.values():
            path = Path(artifact["path"])
            _write_metadata(path, artifact["metadata"])
            extension = _EXTENSIONS.get(artifact["type"]) or (".json" if _is_json(path) else None)
            if extension and path.is_file() and not path.suffix and not path.is_symlink():
                named = path.with_name(path.name + extension)
                path.replace(named)
                path.symlink_to(named.name)
    document = {"schema": 1, **result.document()}
    text = json.dumps(document, ensure_ascii=False, indent=2) + "\n"
    (result.run_dir / "result.json").write_text(text, encoding="utf-8")


def rounded(seconds: float | None, digits: int) -> float | None:
    """Return `seconds` as people read it, None as None."""
    return None if seconds is None else round(seconds, digits)


def reports_of_end(result: RunResult) -> Iterator[tuple[str, Path]]:
    """Yield step and path of each HTML report of the step that decided how a run ended badly."""
    decided = [step for step in result.steps if step.status != "succeeded"] or [
        step for step in result.steps if step.evaluates and step.parameters.get("Output") == "failed"
    ]
    for step in decided[:1] if result.error else ():
        for artifact in step.artifacts.values():
            if artifact["type"] == "system.HTML":
                yield step.name, named_page(Path(artifact["path"]))


def named_page(path: Path) -> Path:
    """Return the file with an ending that `path` links to (see `write_result`), or `path` itself."""
    return path.parent / path.readlink() if path.is_symlink() else path


def served_sentences(served: Mapping[str, Any]) -> list[str]:
    """Return where a model was or is served, and what it answered."""
    if served.get("pid") is None:
        where = f"the model was served at {served.get('url')} (stopped; --keep-serving leaves it running)"
    else:
        where = (
            f"the model is being served at {served.get('url')} by process {served['pid']}, until you stop it: "
            f"{served['stop']}"
        )
    answer = (
        "the server's answer" if served.get("answer") is None else f"it answered {served['answer']!r}, which"
    )
    equals = "equals" if served.get("matches_offline") else "DIFFERS from"
    return [where, f"{answer} {equals} the offline prediction"]


def _verdict(steps: Sequence[StepResult], exit_code: int, interrupted: bool) -> tuple[str, str | None]:
    failed = [step for step in steps if step.status == "failed"]
    running = [step for step in steps if step.status == "interrupted"]
    if interrupted:
        where = f" in step {running[-1].name}" if running else ""
        return FAILED, f"interrupted{where}"
    if failed:
        return FAILED, f"step {failed[0].name} failed: {failed[0].error}"
    if exit_code != 0:
        where = f" in step {running[-1].name}" if running else ""
        how = f"signal {exit_code - 128}" if exit_code > 128 else f"exit code {exit_code}"
        return FAILED, f"the process that runs the pipeline ended{where} with {how}; its output is above"
    for step in steps:
        if step.evaluates and step.parameters.get("Output") == "failed":
            return GATE_FAILED, f"the quality gate of step {step.name} said no: {_broken_rules(step)}"
    return SUCCEEDED, None


def _broken_rules(step: StepResult) -> str:
    """Return in words which rules of the evaluation `step` were broken."""
    for artifact in step.artifacts.values():
        gate = _read_json(Path(artifact["path"])).get("gate")
        rules = gate.get("rules") if isinstance(gate, dict) else None
        broken = [str(rule.get("reason")) for rule in rules or () if rule.get("passed") is False]
        if broken:
            return "; ".join(broken)
    return "see its report"


def _not_run(steps: Sequence[StepResult], planned: Sequence[str]) -> list[str]:
    # A step inside a loop is called for-loop-1-iteration-0/NAME.
    ran = {step.name.rpartition("/")[2] for step in steps}
    return [name for name in planned if name not in ran]


def _present(steps: Sequence[StepResult]) -> Iterator[tuple[StepResult, str, Path]]:
    for step in steps:
        for name, artifact in step.artifacts.items():
            yield step, name, Path(artifact["path"])


def metrics_by_step(steps: Sequence[StepResult]) -> Iterator[tuple[StepResult, str, float]]:
    """Yield every finite number of every Metrics artifact: step, name, value."""
    for step in steps:
        for artifact in step.artifacts.values():
            if artifact["type"] == "system.Metrics":
                for key, value in artifact["metadata"].items():
                    if isinstance(value, int | float) and math.isfinite(value):
                        yield step, key, _plain(value)


def _metrics(steps: Sequence[StepResult]) -> dict[str, float]:
    found: dict[str, list[tuple[StepResult, float]]] = {}
    for step, key, value in metrics_by_step(steps):
        found.setdefault(key, []).append((step, value))
    flat = {}
    for key, values in found.items():
        # The evaluation's names are the ones that people ask for: they stay short if there is one evaluation.
        judged = [step for step, _ in values if step.evaluates]
        for step, value in values:
            short = len(values) == 1 or [step] == judged
            flat[key if short else f"{step.name.replace('-', '_')}_{key}"] = value
    return flat


def _plain(value: float) -> float:
    # kfp keeps metadata as floats; a count of rows reads better as a whole number.
    return int(value) if float(value).is_integer() and abs(value) <= 2**53 else value


def _recoveries(steps: Sequence[StepResult]) -> Iterator[dict[str, Any]]:
    for step, name, path in _present(steps):
        if name == "job_record":
            for recovery in _read_json(path).get("recoveries", []):
                if step.status == "failed" and recovery.get("seconds") is None:
                    continue  # the failure that the job did not survive
                yield {key: recovery.get(key) for key in ("cause", "seconds", "steps_lost")}


def _served(steps: Sequence[StepResult]) -> tuple[dict[str, Any] | None, Path | None]:
    """Return what the first serving step said, and the folder that it served from."""
    for _, name, path in _present(steps):
        if name == "serving":
            said = _read_json(path / "serving.json")
            if said:
                kept = {key: said.get(key) for key in ("url", "matches_offline", "latency_ms")}
                return {**kept, "name": said.get("name"), "answer": _answer(said)}, path
    return None, None


def _answer(said: Mapping[str, Any]) -> Any:
    """Return what the model said to the example request: its label, or its first output."""
    outputs = (said.get("example_response") or {}).get("outputs") or []
    by_name = {output["name"]: output["data"] for output in outputs}
    if "label" in by_name:
        return by_name["label"][0]
    return next((data[0] for data in by_name.values() if data), None)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _is_json(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return path.stat().st_size < 2**24 and file.read(1) == b"{" and bool(_read_json(path))
    except OSError:
        return False


def _write_metadata(path: Path, metadata: Mapping[str, Any]) -> None:
    if metadata and not path.exists():
        path.write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
