"""What a person reads at the end of a local run; plain text when standard output is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from elastic_runtime.report.page import format_value
from kfp_elastic.pipelines.results import RunResult, reports_of_end, rounded, served_sentences

__all__ = ["show"]

_METRICS_FIRST = ("test_accuracy", "test_r2")


def show(result: RunResult, stream: TextIO | None = None) -> None:
    """Write the summary of `result`: steps, metrics, recoveries, the served answer, and where it all lies."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    target = sys.stdout if stream is None else stream
    # A file or a pipe must not cut lines at the width of a terminal that is not there.
    console = Console(file=target, width=None if target.isatty() else 200, highlight=False)

    def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        shown = Table(box=None, pad_edge=False, header_style="bold")
        for index, column in enumerate(columns):
            numeric = all(isinstance(row[index], int | float | None) for row in rows)
            shown.add_column(column, justify="right" if numeric else "left")
        for row in rows:
            shown.add_row(*(Text(format_value(cell)) for cell in row))
        console.print(shown)
        console.print()

    console.print()
    steps = [(step.name, step.status, rounded(step.seconds, 1)) for step in result.steps]
    steps += [(name, result.not_run_status, None) for name in result.not_run]
    if steps:
        table(["step", "status", "seconds"], steps)
    metrics = _with_intervals(result.metrics)
    if metrics:
        table(["metric", "value", "95 % interval"], metrics)
    if result.recoveries:
        rows = [
            (recovery["cause"], rounded(recovery["seconds"], 2), recovery["steps_lost"])
            for recovery in result.recoveries
        ]
        table(["recovered from", "seconds", "steps lost"], rows)
    if result.served:
        _served(console, result.served)
    for note in result.notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)
    if result.error:
        console.print(Text(result.error, style="bold red"), soft_wrap=True)
        for step, path in reports_of_end(result):
            console.print(Text(f"report of {step}: {path}"), soft_wrap=True)
    state = "interrupted" if result.interrupted else result.status.replace("_", " ")
    console.print(Text(f"{result.pipeline} {state} in {result.seconds:.1f} s"))
    console.print(Text(f"run: {result.run_dir}"), soft_wrap=True)
    console.print(Text(f"report: {result.run_dir / 'index.html'}"), soft_wrap=True)


def _with_intervals(metrics: Mapping[str, float]) -> list[tuple[str, float, str]]:
    """Return the measured metrics with their intervals, the main one first; the page lists all of them."""
    rows = [
        (name, value, f"{format_value(metrics[f'{name}_low'])} to {format_value(metrics[f'{name}_high'])}")
        for name, value in metrics.items()
        if f"{name}_low" in metrics and f"{name}_high" in metrics
    ]
    rows = rows or [(name, value, "") for name, value in metrics.items()]
    return sorted(rows, key=lambda row: (row[0] not in _METRICS_FIRST, row[0]))


def _served(console: Any, served: Any) -> None:
    from rich.text import Text

    for sentence in served_sentences(served):
        console.print(Text(sentence), soft_wrap=True)
    latency = served.get("latency_ms") or {}
    if latency:
        console.print(Text("latency: " + ", ".join(f"{k} {format_value(v)} ms" for k, v in latency.items())))
    console.print()
