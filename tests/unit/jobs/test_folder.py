from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from elastic_runtime.errors import IntegrityError, NameInUseError
from elastic_runtime.jobs.folder import JobFolder, default_folder, write_json


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    made = JobFolder(tmp_path / "job")
    made.create()
    return made


def test_a_lock_is_held_by_one_and_free_afterwards(folder: JobFolder) -> None:
    assert not folder.is_live()
    held = folder.lock("a")
    assert folder.is_live()
    with pytest.raises(NameInUseError, match=rf"job 'a' is running \(pid {os.getpid()}"):
        folder.lock("a")
    os.close(held)
    assert not folder.is_live()


def test_events_and_metrics_come_back_in_order_and_a_half_line_is_left_out(folder: JobFolder) -> None:
    folder.event("round", round=0)
    folder.event("ended", text="ü")
    with (folder.path / "events.jsonl").open("a") as file:
        file.write('{"kind": "ha')
    assert [event["kind"] for event in folder.events()] == ["round", "ended"]
    assert folder.metrics() == []


def test_a_record_of_an_unknown_version_is_refused(folder: JobFolder) -> None:
    assert folder.record() is None
    write_json(folder.record_file, {"state": "succeeded"})
    assert folder.record() == {"schema": 1, "state": "succeeded"}
    for text in (json.dumps({"schema": 2}), "{", "{}"):
        folder.record_file.write_text(text)
        with pytest.raises(IntegrityError, match=r"record\.json"):
            folder.record()


@pytest.mark.parametrize(
    ("state", "changed", "kept"),
    [("failed", False, True), ("stopped", False, True), (None, False, True), ("succeeded", False, False),
     ("failed", True, False)],
)  # fmt: skip
def test_checkpoints_stay_only_for_the_same_job_that_did_not_succeed(
    folder: JobFolder, state: str | None, changed: bool, kept: bool
) -> None:
    document = {"program": {"script": "a.py", "sha256": "1"}, "arguments": []}
    assert folder.begin(document) == ""
    (folder.path / "checkpoints").mkdir()
    (folder.path / "checkpoints" / "one").touch()
    folder.event("round")
    if state is not None:
        write_json(folder.record_file, {"state": state})
    said = folder.begin({**document, "arguments": ["--x"]} if changed else document)
    assert (folder.path / "checkpoints" / "one").exists() is kept
    assert ("going on" if kept else "starting anew") in said
    assert folder.events() == []
    assert folder.record() is None


def test_the_default_place_follows_the_state_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/x")
    assert default_folder("a") == Path("/x/kfp-elastic/jobs/a")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert default_folder("a") == Path("/h/.local/state/kfp-elastic/jobs/a")


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"schema": 1, "a": 1}
    assert list(tmp_path.iterdir()) == [path]
