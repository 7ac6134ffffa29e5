from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from elastic_runtime.worker import checkpoint


def state(value: float) -> dict[str, object]:
    return {"weights": torch.full((1000,), value), "nested": {"lr": value, "names": ["a", "b"]}}


def test_the_newest_is_loaded_and_old_ones_go(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path / "none") is None
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, state(step), step=step, keep=2)
    loaded = checkpoint.load(tmp_path)
    assert loaded is not None
    assert loaded[1] == 3
    assert torch.equal(loaded[0]["weights"], torch.full((1000,), 3.0))
    assert loaded[0]["nested"] == {"lr": 3, "names": ["a", "b"]}
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_one_is_passed_over_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.save(tmp_path, state(1), step=1)
    newest = checkpoint.save(tmp_path, state(2), step=2)
    assert newest is not None
    content = bytearray(newest.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    newest.write_bytes({"flip": bytes(content), "cut": bytes(content[:-10]), "empty": b""}[damage])
    with caplog.at_level(logging.WARNING):
        loaded = checkpoint.load(tmp_path)
    assert loaded is not None
    assert loaded[1] == 1
    assert newest.name in caplog.text


def test_nothing_valid_is_no_checkpoint(tmp_path: Path) -> None:
    only = checkpoint.save(tmp_path, state(1), step=1)
    assert only is not None
    only.write_bytes(b"x")
    (tmp_path / "step-x.pt").touch()
    (tmp_path / ".step-0000000009-0000000000000000.pt.1").write_bytes(b"half")
    assert checkpoint.load(tmp_path) is None


def test_without_a_folder_nothing_is_saved_or_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert checkpoint.save(None, state(1), step=1) is None
    assert checkpoint.load(None) is None
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_old_ones(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, state(1), step=1)
    with pytest.raises(Exception, match=r"."):
        checkpoint.save(tmp_path, {"bad": lambda: 0}, step=2)
    loaded = checkpoint.load(tmp_path)
    assert loaded is not None
    assert loaded[1] == 1
    assert len(list(tmp_path.iterdir())) == 1


def _save_forever(folder: str) -> None:
    for step in range(1, 10_000):
        checkpoint.save(folder, state(step), step=step)


def test_killed_at_any_instant_of_a_save_a_valid_one_is_there(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for _ in range(10):
        process = context.Process(target=_save_forever, args=(str(tmp_path),))
        process.start()
        while checkpoint.load(tmp_path) is None:
            time.sleep(0.001)
        # A random instant is the input.
        time.sleep(random.uniform(0, 0.03))
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        loaded = checkpoint.load(tmp_path)
        assert loaded is not None
        assert torch.equal(loaded[0]["weights"], torch.full((1000,), float(loaded[1])))
