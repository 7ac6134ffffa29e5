"""Jobs are found by name, handle and path; names are kept to the jobs that live."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_runtime.errors import InputError, MissingFileError, NameInUseError, UnknownNameError
from elastic_runtime.jobs import locks, lookup
from elastic_runtime.jobs.folder import JobFolder, default_folder, write_json
from elastic_runtime.jobs.lookup import check_free, claim, find_job


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., JobFolder]:
    """Make the folder of a job that is over: by its name, or elsewhere."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)

    def made(name: str, path: Path | None = None) -> JobFolder:
        folder = JobFolder(path or default_folder(name))
        folder.create()
        held = claim(name, folder.path)
        assert held is not None
        write_json(folder.path / "job.json", {"name": name, "app_id": f"{name}-id", "pid": 1})
        os.close(held)
        return folder

    return made


def test_a_job_is_found_by_name_handle_and_path(make: Callable[..., JobFolder], tmp_path: Path) -> None:
    near = make("near")
    far = make("far", tmp_path / "elsewhere")
    words = {
        "near": near, "local_cwd://torchx/near-id": near, str(near.path): near,
        "far": far, "local_cwd://torchx/far-id": far, "./elsewhere": far, "elsewhere": far,
    }  # fmt: skip
    assert {word: find_job(word).folder.path for word in words} == {
        word: folder.path for word, folder in words.items()
    }
    assert find_job("elsewhere").name == "far"


def test_the_newest_job_of_a_name_is_the_one(make: Callable[..., JobFolder], tmp_path: Path) -> None:
    make("twice", tmp_path / "first")
    assert find_job("twice").folder.path == tmp_path / "first"
    second = make("twice")
    assert find_job("twice").folder.path == second.path
    make("twice", tmp_path / "third")
    assert find_job("twice").folder.path == tmp_path / "third"


@pytest.mark.parametrize(
    ("job", "error", "told"),
    [
        ("tain", UnknownNameError, "unknown job 'tain'; did you mean 'train'?"),
        ("../etc", MissingFileError, "not found"),
        ("Not A Name", UnknownNameError, "unknown job 'Not A Name'"),
        ("", UnknownNameError, "unknown job ''"),
        ("./empty", InputError, "has no job.json"),
        ("local_cwd://torchx/train-di", UnknownNameError, "did you mean 'train-id'?"),
        ("local_cwd://torchx/", UnknownNameError, "unknown job handle ''"),
        ("kubernetes://torchx/default:x", InputError, "torchx status kubernetes://torchx/default:x"),
    ],
)
def test_an_unknown_job_is_one_clear_error(
    make: Callable[..., JobFolder], tmp_path: Path, job: str, error: type[InputError], told: str
) -> None:
    make("train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(error) as caught:
        find_job(job)
    assert told in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_name_whose_folder_is_gone_or_anothers_is_unknown(
    make: Callable[..., JobFolder], tmp_path: Path
) -> None:
    folder = make("gone", tmp_path / "gone")
    (folder.path / "job.json").unlink()
    (folder.path / "logs").rmdir()
    folder.path.rmdir()
    with pytest.raises(UnknownNameError, match=r"was in .*/gone, which is gone"):
        find_job("gone")
    make("before", tmp_path / "shared")
    make("after", tmp_path / "shared")
    assert find_job("after").folder.path == tmp_path / "shared"
    with pytest.raises(UnknownNameError, match="unknown job 'before'"):
        find_job("before")


def test_a_folder_whose_job_has_not_started_is_said_so(make: Callable[..., JobFolder]) -> None:
    make("other")
    JobFolder(default_folder("fresh")).create()
    with pytest.raises(UnknownNameError, match="job 'fresh' has not started yet"):
        find_job("fresh")
    held = JobFolder(default_folder("fresh")).lock("fresh")
    assert find_job("fresh").description == {}, "it is just starting"
    os.close(held)


def test_a_living_job_keeps_its_name_wherever_it_is(make: Callable[..., JobFolder], tmp_path: Path) -> None:
    make("kept")
    held = claim("kept", tmp_path / "a")
    assert held is not None
    for attempt in (lambda: claim("kept", tmp_path / "b"), lambda: check_free("kept", tmp_path / "b")):
        with pytest.raises(NameInUseError, match=r"job 'kept' is running \(.*/a\)"):
            attempt()
    check_free("kept", tmp_path / "a")
    os.close(held)
    check_free("kept", tmp_path / "b")
    again = claim("kept", tmp_path / "b")
    assert again is not None
    os.close(again)


def test_without_a_home_a_job_runs_unnamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert claim("any", tmp_path / "job") is None
    check_free("any", tmp_path / "job")


def test_names_of_jobs_that_are_gone_do_not_pile_up(
    make: Callable[..., JobFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "_MANY", 3)
    kept = make("kept", tmp_path / "kept")
    starting = claim("starting", tmp_path / "starting")
    assert starting is not None
    for number in range(8):
        held = claim(f"gone-{number}", tmp_path / f"gone-{number}")
        assert held is not None
        os.close(held)
    names = {path.name for path in (tmp_path / "state" / "kfp-elastic" / "names").iterdir()}
    os.close(starting)
    assert {"kept", "starting"} <= names
    assert len(names) <= 4
    assert find_job("kept").folder.path == kept.path


def test_looking_is_not_holding(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not locks.is_held(path)
    held = locks.take(path)
    assert held is not None
    locks.write(held, "a long first line")
    locks.write(held, "short")
    assert locks.read(path) == "short"
    assert locks.is_held(path)
    assert locks.take(path, patience=0.0) is None
    os.close(held)
    assert not locks.is_held(path)
    assert locks.read(path) == "short", "who held it last"


def test_a_lock_on_a_file_that_was_removed_is_none(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first: Any = locks.take(path)
    path.unlink()
    second: Any = locks.take(path, patience=0.0)
    assert second is not None
    assert os.fstat(first).st_ino != os.fstat(second).st_ino
    os.close(first)
    assert locks.is_held(path)
    os.close(second)
