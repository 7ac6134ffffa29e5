"""The page of one run: status, key figures, steps, recoveries, and a link to everything it wrote."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from elastic_runtime.report import Page
from kfp_elastic.pipelines.results import (
    FAILED,
    GATE_FAILED,
    RunResult,
    metrics_by_step,
    named_page,
    reports_of_end,
    rounded,
    served_sentences,
)
from kfp_elastic.pipelines.step_output import readable

__all__ = ["render_run", "served_rows"]

_STATUS = {FAILED: ("bad", "failed"), GATE_FAILED: ("warn", "gate failed")}
_LOG_LINES = 40
_SHOWN_FILES = 3


def render_run(result: RunResult) -> str:
    """Return the run's index page. Its links are relative, so that the folder can be moved as a whole."""
    status, text = _STATUS.get(result.status, ("good", "succeeded"))
    page = Page(
        f"{result.pipeline}",
        f"run {result.run_id}",
        status=status,
        status_text="interrupted" if result.interrupted else text,
    )
    _figures(page, result)
    if result.error:
        _what_happened(page, result)
    for note in result.notes:
        page.text(note)
    _steps(page, result)
    _recoveries(page, result)
    if result.served:
        page.section("Served model")
        for sentence in served_sentences(result.served):
            page.text(f"{sentence[0].upper()}{sentence[1:]}.")
        said = {"url", "answer", "matches_offline", "pid", "stop"}
        others = {name: value for name, value in result.served.items() if name not in said}
        page.table(["", ""], served_rows(others))
    _artifacts(page, result)
    if result.metrics:
        page.section("Metrics")
        rows = [(step.name, name, value) for step, name, value in metrics_by_step(result.steps)]
        order = {step.name: number for number, step in enumerate(result.steps)}
        page.table(["step", "metric", "value"], sorted(rows, key=lambda row: (order[row[0]], row[1])))
    if result.parameters:
        page.section("Parameters given")
        page.table(["parameter", "value"], [(name, str(value)) for name, value in result.parameters.items()])
    return page.render()


def served_rows(served: Any) -> list[tuple[str, Any]]:
    """Return what is known of the served model as rows of label and value, nested keys joined by a space."""
    rows: list[tuple[str, Any]] = []
    for key, value in served.items():
        if isinstance(value, dict):
            rows.extend((f"{key} {label}", _cell(inner)) for label, inner in value.items())
        else:
            rows.append((key, _cell(value)))
    return rows


def _cell(value: Any) -> Any:
    if isinstance(value, list | dict):
        text = str(value)
        return text if len(text) <= 120 else text[:117] + "…"
    return value


def _figures(page: Page, result: RunResult) -> None:
    page.key_figure("duration", f"{result.seconds:.1f} s")
    for name in ("test_accuracy", "test_r2", "accuracy", "r2"):
        if name in result.metrics:
            page.key_figure(name.replace("_", " "), result.metrics[name])
            break
    if result.recoveries:
        slowest = max((recovery["seconds"] or 0.0) for recovery in result.recoveries)
        page.key_figure("recoveries", len(result.recoveries), f"slowest {slowest:.2f} s")
    if result.served:
        matches = result.served.get("matches_offline")
        page.key_figure("served answer", "equals offline" if matches else "differs from offline")


def _what_happened(page: Page, result: RunResult) -> None:
    page.section("What happened")
    for line in (result.error or "").splitlines():
        page.text(line)
    links = {
        f"report of {step}": os.path.relpath(path, result.run_dir) for step, path in reports_of_end(result)
    }
    failed = [step for step in result.steps if step.status != "succeeded"]
    log = _log_of(result.run_dir, failed[0].name) if failed else None
    if log is None or not log.is_file():
        page.links(links)
        return
    page.links({**links, f"whole log of {failed[0].name}": os.path.relpath(log, result.run_dir)})
    lines = readable(log.read_text(encoding="utf-8", errors="replace").splitlines())
    page.code("\n".join(lines[-_LOG_LINES:]), f"End of the output of step {failed[0].name}")


def _log_of(run_dir: Path, step: str) -> Path:
    return run_dir / "logs" / f"{step.replace('/', '.')}.log"


def _steps(page: Page, result: RunResult) -> None:
    page.section("Steps")
    rows, links = [], {}
    for step in result.steps:
        log = _log_of(result.run_dir, step.name)
        label = f"{step.name}.log"
        if log.is_file():
            links[label] = os.path.relpath(log, result.run_dir)
        said = step.parameters.get("Output")
        rows.append(
            (step.name, step.status, rounded(step.seconds, 1), label if log.is_file() else None, said)
        )
    rows += [(name, result.not_run_status, None, None, None) for name in result.not_run]
    page.table(["step", "status", "seconds", "log", "returned"], rows, links=links)


def _recoveries(page: Page, result: RunResult) -> None:
    if result.recoveries:
        page.section("Recoveries")
        rows = [
            (recovery["cause"], rounded(recovery["seconds"], 2), recovery["steps_lost"])
            for recovery in result.recoveries
        ]
        page.table(["cause", "seconds", "steps lost"], rows)


def _artifacts(page: Page, result: RunResult) -> None:
    reports: list[tuple[str, str, str]] = []
    others: list[tuple[str, str, str]] = []
    links: dict[str, str] = {}
    for step in result.steps:
        for artifact in step.artifacts.values():
            path = named_page(Path(artifact["path"]))
            relative = os.path.relpath(path, result.run_dir)
            shown = f"{step.name}/{path.name}" + ("/" if path.is_dir() else "")
            links[shown] = relative + ("/" if path.is_dir() else "")
            kind = artifact["type"].removeprefix("system.")
            rows = reports if kind in {"HTML", "Markdown"} else others
            rows.append((shown, kind, _contents(path)))
    if reports:
        page.section("Reports")
        page.table(["report", "type", "size"], reports, links=links)
    page.section("Artifacts")
    for name, kind in (("result.json", "JSON"), ("pipeline.yaml", "YAML")):
        links[name] = name
        path = result.run_dir / name
        others.append((name, kind, _size(path.stat().st_size) if path.exists() else ""))
    page.table(["artifact", "type", "contents"], others, links=links)


def _contents(path: Path) -> str:
    if not path.is_dir():
        return _size(path.stat().st_size) if path.exists() else "metadata only"
    files = sorted(file for file in path.rglob("*") if file.is_file())
    total = _size(sum(file.stat().st_size for file in files))
    names = ", ".join(str(file.relative_to(path)) for file in files[:_SHOWN_FILES])
    return f"{len(files)} files, {total}: {names}{' …' if len(files) > _SHOWN_FILES else ''}"


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
