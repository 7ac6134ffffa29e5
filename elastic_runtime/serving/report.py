"""The HTML page about what was served: the check against the offline model, latency, and how to call it."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from elastic_runtime.models.config import ModelConfig
from elastic_runtime.report import Page
from elastic_runtime.serving.local import TOLERANCE, ServeReport
from elastic_runtime.serving.package import PackagedModel
from elastic_runtime.serving.protocol import input_tensors, output_tensors

__all__ = ["render_report"]

_SHOWN_VALUES = 6
_LINE = re.compile(r"\n\s*")
_FLAT_LIST = re.compile(r"\[\n[^\[\]{}]*\]")


def render_report(report: ServeReport, config: ModelConfig, package: PackagedModel) -> str:
    """Return the page as one HTML document."""
    matches = report.matches_offline
    page = Page(
        f"Serving {report.name}",
        f"Open Inference Protocol v2 · predicts {config.target} ({config.task})",
        status="good" if matches else "bad",
        status_text="served as predicted offline" if matches else "differs from offline",
    )
    page.key_figure(
        "largest difference", report.max_difference, f"{report.samples} test rows; {TOLERANCE:g} is allowed"
    )
    page.key_figure(
        "latency p50", f"{report.latency_ms['p50']:.2f} ms", f"{report.requests} requests of one row"
    )
    page.key_figure("latency p99", f"{report.latency_ms['p99']:.2f} ms", "one connection, after a warm-up")
    page.key_figure("ready after", f"{report.ready_seconds:.1f} s", "process start to first answer")

    page.section("What was served")
    rows = [
        [kind, tensor["name"], tensor["datatype"], str(tensor["shape"])]
        for kind, tensors in (("input", input_tensors(config)), ("output", output_tensors(config)))
        for tensor in tensors
    ]
    page.table(["", "tensor", "type", "shape"], rows, caption="-1 is any number of rows")
    kept = (
        f"It is still running as process {report.pid}."
        if report.pid
        else "It was stopped at the end of the step."
    )
    page.text(f"The server answered at {report.url} and was asked about rows of the test split. {kept}")

    page.section("A real request and its answer")
    page.code(
        _shown(report.example_request),
        f"POST /v2/models/{report.name}/infer, one row of the test split, numbers rounded and long lists shortened",
    )
    page.code(_shown(report.example_response), "answer, likewise")

    page.section("How to call it")
    page.text(
        "Start it from the packaged folder, then send rows. Features are expected as they are stored in the "
        "dataset, which means normalised with the statistics of its manifest."
    )
    page.code(f"python -m elastic_runtime.serving --model FOLDER --name {report.name} --port 8080")
    page.code(_curl(report, "http://127.0.0.1:8080"))

    page.section("Files")
    page.table(["file", "sha256"], sorted(package.files.items()))
    page.text(
        "Nothing was deployed to a cluster. SERVING.md in the packaged folder says what an InferenceService "
        "needs."
    )
    return page.render()


def _curl(report: ServeReport, url: str) -> str:
    body = json.dumps(report.example_request, ensure_ascii=False)
    lines = [
        f"curl -s {url}/v2/models/{report.name}/infer",
        "-H 'Content-Type: application/json'",
        f"-d {shlex.quote(body)}",
    ]
    return " \\\n  ".join(lines)


def _shown(document: dict[str, Any]) -> str:
    """Return the document as JSON with lists on one line, long ones cut and numbers rounded, to show its form.

    What was cut off is said beside the list, under a name that no document has, and not in it: there it would look
    like a value.
    """

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            shown = {}
            for key, part in value.items():
                shown[key] = cut(part)
                if isinstance(part, list) and len(part) > _SHOWN_VALUES:
                    shown[f"… {key}"] = f"{len(part) - _SHOWN_VALUES:,} more"
            return shown
        if isinstance(value, list):
            return [cut(part) for part in value[:_SHOWN_VALUES]]
        return round(value, 4) if isinstance(value, float) else value

    text = json.dumps(cut(document), indent=2, ensure_ascii=False)
    return _FLAT_LIST.sub(lambda found: f"[{_LINE.sub(' ', found.group()[1:-1]).strip()}]", text)
