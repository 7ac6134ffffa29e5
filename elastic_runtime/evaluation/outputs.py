"""Writing an evaluation down: the HTML report, the Markdown summary and the JSON documents."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_runtime.errors import ElasticError
from elastic_runtime.evaluation.report import render_report
from elastic_runtime.evaluation.result import Evaluation
from elastic_runtime.evaluation.summary import render_summary

__all__ = ["PathLike", "write_outputs"]

PathLike = str | os.PathLike[str]


def write_outputs(
    evaluation: Evaluation,
    *,
    report: PathLike,
    summary: PathLike,
    document: PathLike,
    metrics: PathLike | None = None,
    classification: PathLike | None = None,
) -> None:
    """Write the HTML `report`, the Markdown `summary` and the JSON `document` (evaluation.json).

    `metrics` gets the flat metrics as JSON, and `classification` the confusion matrix, the scores per class
    and the curves as JSON (an empty object for regression).

    Everything is rendered before the first file is written, each file appears whole or not at all, and each
    is read back: kfp takes an output that nobody wrote for a success. Raises `ElasticError` if one is not as
    it was written.
    """
    content = evaluation.to_dict()
    texts = {
        Path(report): render_report(evaluation),
        Path(summary): render_summary(evaluation),
        Path(document): _as_json(content),
    }
    if metrics is not None:
        texts[Path(metrics)] = _as_json(content["metrics"])
    if classification is not None:
        texts[Path(classification)] = _as_json(content.get("classification", {}))
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.part")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    for path, text in texts.items():
        if path.read_text(encoding="utf-8") != text:
            raise ElasticError(f"output {path.name!r} changed while it was written: give it its own path")


def _as_json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
