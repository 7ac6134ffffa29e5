"""What a job's folder says: the state in every moment of its life, and the document that people and programs get."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_runtime.cli.status import duration, status_of, table
from elastic_runtime.errors import InputError
from elastic_runtime.jobs import report
from elastic_runtime.jobs.account import look, public_events
from elastic_runtime.jobs.folder import JobFolder, write_json
from elastic_runtime.jobs.lookup import FoundJob, find_job

STATES = {"pending", "forming", "running", "recovering", "succeeded", "failed", "stopped"}
KEYS = {
    "name", "state", "global_step", "world_size", "min", "max", "desired", "restarts", "term", "round", "coordinator",
    "nodes", "events",
}  # fmt: skip
EVENTS: list[dict[str, Any]] = [
    {"time": 10.0, "kind": "agent", "node": "0", "pid": os.getpid()},
    {"time": 10.1, "kind": "coordinator", "pid": 5, "term": 1},
    {"time": 11.0, "kind": "round", "text": "round 0: 2 workers", "round": 0, "world_size": 2},
    {"time": 12.0, "kind": "worker_failed", "text": "rank 1: killed", "cause": "killed by SIGKILL", "rank": 1,
     "round": 0, "member": True, "consequence": False},
    {"time": 12.0, "kind": "worker_failed", "text": "rank 0: connection", "cause": "connection", "rank": 0,
     "round": 0, "member": True, "consequence": True},
    {"time": 12.1, "kind": "round", "text": "round 1: 2 workers", "round": 1, "world_size": 2},
    {"time": 12.2, "kind": "recovered", "text": "training again", "cause": "rank 1: killed", "seconds": 0.2,
     "steps_lost": 0},
    {"time": 13.0, "kind": "scale", "text": "desired size 1", "desired": 1},
]  # fmt: skip
RECORD = {
    "name": "a", "app_id": "a-1", "state": "succeeded", "reason": "every worker ended", "exit_code": 0,
    "global_step": 7, "world_size": 2, "restarts": 1, "max_restarts": 10, "started": 9.5, "ended": 20.0,
    "seconds": 10.5, "recoveries": [{"cause": "rank 1: killed", "seconds": 0.2, "steps_lost": 0}], "events": EVENTS,
}  # fmt: skip


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., FoundJob]:
    def made(
        *, events: list[dict[str, Any]] | None = None, record: dict[str, Any] | None = None, pid: int = 0
    ) -> FoundJob:
        folder = JobFolder(tmp_path)
        folder.create()
        write_json(
            tmp_path / "job.json",
            {
                "name": "a", "app_id": "a-1", "pid": pid or os.getpid(), "coordinator": ["127.0.0.1", 9],
                "nodes": "1:2", "workers_per_node": 2, "max_restarts": 10, "started": 9.5,
            },
        )  # fmt: skip
        (tmp_path / "events.jsonl").write_text(
            "".join(json.dumps(event) + "\n" for event in events or []) + '{"time": 1'
        )
        steps = [{"time": 11.0 + n, "round": 0, "world_size": 2, "step": n} for n in range(1, 6)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        if record is not None:
            write_json(folder.record_file, record)
        return find_job(str(tmp_path))

    return made


@pytest.mark.parametrize(
    ("seen", "state"),
    [(0, "forming"), (2, "forming"), (3, "running"), (4, "recovering"), (6, "running"), (7, "running")],
)
def test_the_state_of_a_living_job_follows_its_events(
    make: Callable[..., FoundJob], seen: int, state: str
) -> None:
    job = make(events=EVENTS[:seen])
    held = job.folder.lock("a")
    assert look(job).state == state
    os.close(held)
    account = look(job)
    assert (account.state, account.live) == ("failed", False)
    assert "was killed, and left no record" in account.reason


def test_a_job_that_takes_over_a_folder_is_pending_whatever_lies_there(make: Callable[..., FoundJob]) -> None:
    job = make(events=EVENTS, record=RECORD, pid=1)
    held = job.folder.lock("a")  # by this process, which is not pid 1
    account = look(job)
    assert (account.state, account.starting, account.record, account.events) == ("pending", True, None, [])
    document = status_of(job, patience=0.1)
    os.close(held)
    assert document.keys() >= KEYS
    assert (document["state"], document["nodes"], document["coordinator"], document["global_step"]) == (
        "pending", [], None, 0,
    )  # fmt: skip


def test_a_record_of_another_run_is_not_this_ones(make: Callable[..., FoundJob]) -> None:
    assert look(make(record={**RECORD, "app_id": "a-0"})).state == "failed"
    assert look(make(record=RECORD)).state == "succeeded"


def test_a_job_that_is_over_is_told_from_its_record(make: Callable[..., FoundJob]) -> None:
    document = status_of(make(events=EVENTS, record=RECORD))
    assert document.keys() >= KEYS
    wanted = {
        "name": "a", "state": "succeeded", "global_step": 7, "world_size": 2, "min": 2, "max": 4, "desired": 1,
        "restarts": 1, "term": 1, "round": 1, "coordinator": None, "nodes": [], "exit_code": 0, "supervisor": None,
    }  # fmt: skip
    assert {key: document[key] for key in wanted} == wanted
    assert all(
        {"time", "kind", "cause", "verdict", "seconds"} <= event.keys() for event in document["events"]
    )


def test_a_job_whose_coordinator_is_silent_is_told_from_its_folder(make: Callable[..., FoundJob]) -> None:
    job = make(events=EVENTS)
    held = job.folder.lock("a")
    started = time.monotonic()
    document = status_of(job, patience=0.2)
    os.close(held)
    assert time.monotonic() - started < 5
    assert document["state"] in STATES
    assert "no coordinator answers" in document["reason"]
    assert (document["global_step"], document["world_size"], document["restarts"]) == (5, 2, 1)
    assert [node["id"] for node in document["nodes"]] == ["0"]


def test_every_event_has_the_five_keys() -> None:
    shown = public_events(EVENTS)
    assert [(event["kind"], event["cause"], event["seconds"]) for event in shown if event["kind"] != "agent"] == [
        ("coordinator", None, None), ("round", None, None), ("worker_failed", "killed by SIGKILL", None),
        ("worker_failed", "connection", None), ("round", None, None), ("recovered", "rank 1: killed", 0.2),
        ("scale", None, None),
    ]  # fmt: skip
    lost = {"time": 1.0, "kind": "node_lost", "text": "node 1 lost", "verdict": "retry"}
    (event,) = public_events([lost])
    assert (event["cause"], event["verdict"]) == ("node 1 lost", "retry")


@pytest.mark.parametrize("seen", [0, 3, 4, 8])
def test_a_job_without_a_record_has_a_report_too(make: Callable[..., FoundJob], seen: int) -> None:
    job = make(events=EVENTS[:seen])
    record = look(job).as_record()
    html = report.render(job.folder, record)
    assert "left no record" in html
    assert (record["exit_code"], record["global_step"]) == (1, 5)
    unfinished = [recovery for recovery in record["recoveries"] if recovery["seconds"] is None]
    assert len(unfinished) == (seen == 4)


@pytest.mark.parametrize("broken", ["job.json", "record.json"])
def test_a_folder_of_another_version_is_refused(
    make: Callable[..., FoundJob], tmp_path: Path, broken: str
) -> None:
    job = make(record=RECORD)
    (tmp_path / broken).write_text('{"schema": 99}')
    with pytest.raises(InputError, match="schema 99"):
        look(job)


def test_the_table_says_what_the_document_says(make: Callable[..., FoundJob]) -> None:
    document = status_of(make(events=EVENTS, record=RECORD))
    document["coordinator"] = {"host": "h", "pid": 77}
    document["nodes"] = [
        {"id": "0", "agent_pid": 5, "workers": [{"rank": 0, "pid": 6}, {"rank": None, "pid": None}]}
    ]
    text = "\n".join(table(document, now=73.0, events=2))
    for part in (
        "job a: succeeded after 10 s, 7 steps", "2 (2 to 4 allowed, 1 desired), round 1, term 1", "1 of 10",
        "pid 77 on h", "agent pid 5; rank 0 pid 6, starting pid -", "next step after 0.200 s, 0 steps done again",
        "1 min ago        desired size 1",
    ):  # fmt: skip
        assert part in text
    assert "round 0" not in text, "only the last two events"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0.0 s"), (0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.6, "1 min"), (185, "3 min 5 s"),
     (3600, "1 h"), (7627, "2 h 7 min"), (273_600, "3 d 4 h")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
