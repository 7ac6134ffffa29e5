from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from elastic_runtime.jobs import report
from elastic_runtime.jobs.folder import JobFolder

RECORD: dict[str, Any] = {
    "name": "digits-1",
    "state": "succeeded",
    "reason": "every worker ended with exit code 0",
    "exit_code": 0,
    "global_step": 40,
    "world_size": 2,
    "restarts": 1,
    "max_restarts": 10,
    "started": 100.0,
    "ended": 112.0,
    "seconds": 12.0,
    "recoveries": [{"cause": "rank 1: killed by SIGKILL", "seconds": 2.25, "steps_lost": 3}],
    "events": [
        {
            "time": 100.1,
            "kind": "round",
            "text": "round 0: 2 workers on 2 nodes",
            "round": 0,
            "world_size": 2,
        },
        {"time": 104.0, "kind": "worker_failed", "text": "rank 1 <killed>", "rank": 1, "node": 1},
        {
            "time": 104.1,
            "kind": "round",
            "text": "round 1: 2 workers on 2 nodes",
            "round": 1,
            "world_size": 2,
        },
        {"time": 106.25, "kind": "recovered", "text": "training again after 2.2 s"},
        {"time": 100.0, "kind": "agent", "pid": 1},
    ],
}


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    made = JobFolder(tmp_path)
    made.create()
    lines = [
        {"time": 102 + step / 10, "round": 0 if step < 20 else 1, "world_size": 2, "step": step, "loss": 1 / step,
         "samples": step * 64}
        for step in range(1, 41)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return made


def test_the_report_tells_what_failed_and_what_it_cost(folder: JobFolder) -> None:
    html = report.render(folder, RECORD)
    for text in (
        "digits-1",
        "rank 1: killed by SIGKILL",
        "2.25 s",
        "recovered once from a failure",
        "6.25 s",
    ):
        assert text in html
    assert "rank 1 &lt;killed&gt;" in html, "text is escaped"
    assert html.count("<svg") == 1


def test_the_page_needs_nothing_from_elsewhere(folder: JobFolder) -> None:
    html = report.render(folder, RECORD)
    assert "<script" not in html
    addresses = set(re.findall(r"(?:src|href)=\"([^\"]*)\"|url\(([^)]*)\)|@import", html))
    assert all(one.startswith(("#", "data:")) or two.startswith("#") for one, two in addresses)


def test_the_same_job_gives_the_same_page(folder: JobFolder) -> None:
    assert report.render(folder, RECORD) == report.render(folder, RECORD)


def test_a_failed_job_shows_the_end_of_the_log(folder: JobFolder) -> None:
    folder.log_of(1).write_text("before\nValueError: <bad>\n")
    record = {**RECORD, "state": "failed", "reason": "rank 1 failed twice", "recoveries": [
        {"cause": "x", "seconds": None, "steps_lost": None}]}  # fmt: skip
    html = report.render(folder, record)
    assert "ValueError: &lt;bad&gt;" in html
    assert "rank 1 failed twice" in html
    assert "not recovered" in html


def test_a_job_that_did_no_step_has_a_report_too(tmp_path: Path) -> None:
    made = JobFolder(tmp_path)
    made.create()
    html = report.render(
        made, {**RECORD, "state": "failed", "recoveries": [], "events": [], "global_step": 0}
    )
    assert "<svg" not in html


def test_losses_that_are_no_numbers_are_gaps(tmp_path: Path) -> None:
    made = JobFolder(tmp_path)
    made.create()
    lines = [{"time": 101.0 + n, "round": 0, "world_size": 1, "step": n, "loss": "nan"} for n in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "<svg" in report.render(made, RECORD)
