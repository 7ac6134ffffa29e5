"""How the recovery benchmark reads steps, and what its last line holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _recovery_jobs

    yield _recovery_jobs
    for name in ("_recovery_jobs", "_harness"):
        sys.modules.pop(name, None)


def written(jobs: Any, base: Path, *lines: str) -> Any:
    job = jobs.Try(base, "try")
    (job.folder / "steps").write_text("\n".join(lines) + "\n")
    return job


def test_a_step_under_way_at_the_event_is_no_recovery(jobs: Any, tmp_path: Path) -> None:
    job = written(jobs, tmp_path,
                  "10.0 1 0 2 0", "10.0 2 1 2 0", "10.4 1 0 2 0", "12.5 1 0 1 1", "14.0 3 1 2 2")  # fmt: skip
    assert job.next_step(10.2, "same process, next round") == pytest.approx(2.3)
    assert job.next_step(10.2, "whole world", world=2) == pytest.approx(3.8)


def test_a_new_process_in_the_same_round_is_a_recovery(jobs: Any, tmp_path: Path) -> None:
    job = written(jobs, tmp_path, "10.0 1 0 2 0", "10.4 1 0 2 0", "11.0 7 0 2 0")
    assert job.next_step(10.2, "other process") == pytest.approx(0.8)


def test_the_first_step_by_time_counts_not_by_line(jobs: Any, tmp_path: Path) -> None:
    job = written(jobs, tmp_path, "10.0 1 0 2 0", "11.5 8 1 2 1", "11.2 7 0 2 1")
    assert job.next_step(10.2, "two new ones") == pytest.approx(1.0)


def test_a_line_in_the_writing_is_left_for_later(jobs: Any, tmp_path: Path) -> None:
    job = written(jobs, tmp_path, "10.0 1 0 2 0")
    with (job.folder / "steps").open("a") as file:
        file.write("10.5 1 0")
        file.flush()
        assert [mark.time for mark in job.look()] == [10.0]
        file.write(" 2 0\n")
    assert [mark.time for mark in job.look()] == [10.0, 10.5]


def test_the_longest_gap_counts_the_edges(jobs: Any, tmp_path: Path) -> None:
    job = written(jobs, tmp_path, "10.0 1 0 1 0", "10.1 1 0 1 0", "10.7 1 0 1 0")
    assert job.longest_gap(10.0, 10.8) == pytest.approx(0.6)
    assert job.longest_gap(10.0, 12.0) == pytest.approx(1.3)


def test_what_does_not_come_is_told_with_the_logs(jobs: Any, tmp_path: Path) -> None:
    job = written(jobs, tmp_path, "10.0 1 0 2 0")
    (job.folder / "job" / "logs").mkdir(parents=True)
    (job.folder / "job" / "logs" / "rank-0.log").write_text("the last words\n")
    with pytest.raises(jobs.NotRecovered, match=r"four workers: not within 0 s\n(.|\n)*the last words"):
        job.wait(lambda mark: mark.world == 4, "four workers", limit=0.0)


def test_only_the_living_are_steady(jobs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(60)
    own, gone = os.getpid(), dead.pid
    lines = [
        f"10.0 {own} 0 2 0",
        f"10.0 {gone} 1 2 0",
        f"10.1 {own} 0 2 0",
        f"10.1 {gone} 1 2 0",
        f"10.2 {own} 0 1 1",
    ]
    job = written(jobs, tmp_path, *lines)
    monkeypatch.setattr(jobs, "LIMIT", 0.0)
    with pytest.raises(jobs.NotRecovered, match="2 workers do not train"):
        job.steady(2, steps=2)
    with pytest.raises(jobs.NotRecovered):
        job.steady(1, steps=2)  # one step of the new round only
    with (job.folder / "steps").open("a") as file:
        file.write(f"10.3 {own} 0 1 1\n")
    job.steady(1, steps=2)
    assert job.pids() == {0: own}


def test_every_process_of_a_try_is_ended_wherever_it_went(jobs: Any, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    # A grandchild with a session of its own, orphaned at once and deaf to SIGTERM.
    script = (
        "import os, signal, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"        open({str(pid_file)!r} + '.new', 'w').write(str(os.getpid()))\n"
        f"        os.replace({str(pid_file)!r} + '.new', {str(pid_file)!r})\n"
        "        time.sleep(300)\n"
    )
    with jobs.Try(tmp_path, "try") as job:
        job.start([sys.executable, "-c", script]).wait(60)
        while not pid_file.exists():
            os.sched_yield()
        pid = int(pid_file.read_text())
        assert jobs._is_alive(pid)
    assert not jobs._is_alive(pid)
    assert not job.folder.exists()


def test_only_the_promised_ratios_and_every_figure(jobs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import _harness

    result = _harness.Result("recovery", rival_name="torchrun", ratios=("node",))
    for ours, rival in ((0.1, 30.0), (0.3, 10.0), (0.2, 20.0)):
        result.add("node", ours=ours, rival=rival)
    result.add("full_world", ours=1.0, rival=2.0)
    result.add("store_host_lost", ours=0.25)
    result.notes["store_host_lost"] = "dies"
    result.figures["torchrun_unrecovered"] = 1
    result.show(as_json=True, repeats=3)
    *table, last = capsys.readouterr().out.splitlines()
    document = json.loads(last)
    assert document["ratios"] == {"node": pytest.approx(100.0)}
    assert document["figures"] == {
        "node_s": 0.2, "node_torchrun_s": 20.0, "full_world_s": 1.0, "full_world_torchrun_s": 2.0,
        "store_host_lost_s": 0.25, "torchrun_unrecovered": 1,
    }  # fmt: skip
    assert any("store_host_lost" in line and "dies" in line for line in table)
