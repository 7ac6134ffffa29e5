"""The Markdown summary: verdict, metrics and gates on one screen, for the artifact's preview."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from elastic_runtime.evaluation.bootstrap import Interval
from elastic_runtime.evaluation.result import Evaluation
from elastic_runtime.report.page import format_value

__all__ = ["render_summary", "show_interval"]

# An underscore inside a word (f1_macro) is only itself.
_SPECIAL = re.compile(r"([\\`*{}\[\]<>|#$~&]|(?<!\w)_|_(?!\w))")


def show_interval(interval: Interval) -> str:
    """Return `low to high`, or an empty text when there is no interval."""
    if interval.low is None or interval.high is None:
        return ""
    return f"{format_value(interval.low)} to {format_value(interval.high)}"


def render_summary(evaluation: Evaluation) -> str:
    """Return the summary as CommonMark with tables."""
    config = evaluation.config
    lines = [
        f"# Evaluation {evaluation.gate.verdict}",
        "",
        _escape(
            f"{evaluation.gate.reason}. Model of {evaluation.target} ({evaluation.task}) on "
            f"{evaluation.rows:,} rows of the split {config.split} of {evaluation.dataset_name}."
        ),
        "",
    ]
    if evaluation.assessment is not None:
        coverage = f"{config.confidence * 100:g} % interval"
        rows = [
            (name, format_value(one.value), show_interval(one))
            for name, one in evaluation.assessment.metrics.items()
        ]
        lines += _table(("metric", "value", coverage), rows)
    if evaluation.gate.rules:
        lines += ["## Gates", ""]
        lines += _table(
            ("gate", "limit", "value", "result"),
            [
                (rule.name, format_value(rule.limit), format_value(rule.value), _result(rule.passed))
                for rule in evaluation.gate.rules
            ],
        )
    if evaluation.baseline is not None:
        lines += ["## Against the baseline", ""]
        lines += _table(
            ("metric", "model", "baseline", "difference", "interval", "verdict"),
            [
                (
                    one.name,
                    format_value(one.model),
                    format_value(one.baseline),
                    format_value(one.difference.value),
                    show_interval(one.difference),
                    one.verdict,
                )
                for one in evaluation.baseline.metrics
            ],
        )
    if evaluation.slices is not None:
        metric = evaluation.slices.metric
        lines += [f"## Slices by {_escape(evaluation.slices.column)}", ""]
        lines += _table(
            ("slice", "rows", metric, "interval", ""),
            [
                (
                    row.label,
                    format_value(row.rows),
                    format_value(row.metrics[metric].value),
                    show_interval(row.metrics[metric]),
                    "small" if row.small else "worst" if row.label == evaluation.slices.worst else "",
                )
                for row in evaluation.slices.rows
            ],
        )
    if evaluation.remarks:
        lines += ["## Remarks", "", *(f"- {_escape(remark)}" for remark in evaluation.remarks), ""]
    return "\n".join(lines).rstrip() + "\n"


def _result(passed: bool) -> str:
    return "passed" if passed else "**failed**"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    body = [line([cell if cell == "**failed**" else _escape(cell) for cell in row]) for row in rows]
    return [line([_escape(column) for column in columns]), line(["---"] * len(columns)), *body, ""]


def _escape(text: str) -> str:
    # Labels and column names come from data: they must not end a cell or start markup.
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
