from __future__ import annotations

from pathlib import Path

import pytest

from elastic_runtime.worker import context


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT", "ELASTIC_JOB_DIR",
                 "ELASTIC_OUTPUT_DIR", "ELASTIC_CHECKPOINT_DIR"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)


def test_a_plain_run_is_one_worker_that_saves_no_checkpoint() -> None:
    here = context()
    assert (here.rank, here.local_rank, here.world_size, here.round) == (0, 0, 1, 0)
    assert not here.distributed
    assert here.job_dir is None
    assert here.checkpoint_dir is None
    assert here.output_dir == Path("output")


def test_under_torchrun_it_is_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h",
                        "TORCHELASTIC_RESTART_COUNT": "2"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    here = context()
    assert (here.rank, here.local_rank, here.world_size, here.round, here.distributed) == (3, 1, 4, 2, True)


def test_a_job_says_where_its_folders_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JOB", "OUTPUT", "CHECKPOINT"):
        monkeypatch.setenv(f"ELASTIC_{name}_DIR", f"/x/{name}")
    here = context()
    assert (here.job_dir, here.output_dir, here.checkpoint_dir) == (
        Path("/x/JOB"),
        Path("/x/OUTPUT"),
        Path("/x/CHECKPOINT"),
    )
