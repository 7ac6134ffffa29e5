"""What the `serve` step of a pipeline does, without kfp: package, serve, check, report."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from elastic_runtime.errors import InputError
from elastic_runtime.models.config import read_config
from elastic_runtime.serving.local import ServeReport, serve_locally
from elastic_runtime.serving.package import PackagedModel, package_model
from elastic_runtime.serving.report import render_report

__all__ = ["REPORT_FILE", "ServedStep", "run_serve_step"]

REPORT_FILE = "serving.json"


@dataclass(frozen=True, kw_only=True)
class ServedStep:
    """What the step made."""

    report: ServeReport
    """How the server answered."""

    package: PackagedModel
    """The folder that was served from."""

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics by name, flat."""
        return {
            "matches_offline": float(self.report.matches_offline),
            "max_difference": self.report.max_difference,
            "latency_p50_ms": self.report.latency_ms["p50"],
            "latency_p99_ms": self.report.latency_ms["p99"],
            "ready_seconds": self.report.ready_seconds,
        }


def run_serve_step(
    model_folder: str | os.PathLike[str],
    dataset_folder: str | os.PathLike[str],
    *,
    serving_folder: str | os.PathLike[str],
    report_file: str | os.PathLike[str],
    name: str = "model",
    port: int = 0,
    samples: int = 16,
) -> ServedStep:
    """Package the model into `serving_folder`, serve it from there, and write `serving.json` and the report.

    `serving.json` is written last, so that it stands for a step that went well. Raises as `package_model` and
    `serve_locally` do.
    """
    place = Path(serving_folder)
    if place.is_file():
        raise InputError(f"serving_folder={os.fspath(serving_folder)!r} is a file: give a folder")
    package = package_model(model_folder, place, name=name)
    report = serve_locally(place, dataset_folder, name=name, port=port, samples=samples)
    page = render_report(report, read_config(place), package)
    target = Path(report_file)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, encoding="utf-8")
    (place / REPORT_FILE).write_text(report.to_json(), encoding="utf-8")
    return ServedStep(report=report, package=package)
