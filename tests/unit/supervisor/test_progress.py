from __future__ import annotations

import json
from pathlib import Path

from elastic_runtime.supervisor.progress import Progress


def report(path: Path, *lines: tuple[float, int, int]) -> None:
    with path.open("a") as file:
        for when, step, round_ in lines:
            line = {
                "time": when,
                "step": step,
                "round": round_,
                "world_size": 2,
                "loss": 0.5,
                "samples": step * 10,
            }
            file.write(json.dumps(line) + "\n")


def test_a_recovery_lasts_from_the_failure_to_the_next_finished_step(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "metrics.jsonl")
    assert not progress.read()
    report(progress.path, (1.0, 1, 0), (2.0, 2, 0))
    assert progress.read()
    progress.failed("rank 1: killed by SIGKILL", 3.0)
    report(progress.path, (2.9, 3, 0))
    progress.read()
    assert progress.recoveries[0].seconds is None, (
        "a step that was finished before the failure ends no recovery"
    )
    report(progress.path, (5.5, 2, 1))
    progress.read()
    assert progress.recoveries[0].as_dict() == {
        "cause": "rank 1: killed by SIGKILL",
        "seconds": 2.5,
        "steps_lost": 2,
    }
    assert progress.step == 3


def test_failures_in_a_recovery_are_one_recovery_and_the_real_cause_wins(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "metrics.jsonl")
    progress.failed("rank 0: Connection closed by peer", 1.0, consequence=True)
    progress.failed("node 1 lost", 1.1)
    progress.failed("rank 0: ValueError", 2.0)
    assert [recovery.cause for recovery in progress.recoveries] == ["node 1 lost"]
    assert progress.recoveries[0].since == 1.0


def test_the_progress_line_has_a_rate_only_within_a_round(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "metrics.jsonl")
    assert progress.show(0, round_=0) is None
    assert progress.show(0, round_=-1) is None, "before the first round"
    report(progress.path, (1.0, 1, 0))
    progress.read()
    assert progress.show(0, round_=0, every=0) == "[progress] step 1, loss 0.5, 2 workers, 0 restarts"
    assert progress.show(0, round_=0, every=0) is None, "nothing new"
    report(progress.path, (2.0, 11, 0))
    progress.read()
    assert (
        progress.show(1, round_=0, every=0)
        == "[progress] step 11, loss 0.5, 100 samples/s, 2 workers, 1 restart"
    )
    assert progress.show(1, round_=1, every=0) is None, "a line of the round before says nothing of this one"
    report(progress.path, (3.0, 12, 1))
    progress.read()
    assert progress.show(1, round_=1, every=0) == "[progress] step 12, loss 0.5, 2 workers, 1 restart"


def test_a_half_line_and_a_broken_one_are_no_step(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "metrics.jsonl")
    progress.path.write_text('{"step": 1}\nnonsense\n{"time": 1, "step": 2, "ro')
    progress.read()
    assert progress.step in (0, 1)
    assert progress.line.get("step") != 2


def test_only_a_step_of_a_later_round_ends_a_recovery(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "metrics.jsonl")
    report(progress.path, (1.0, 3, 0))
    progress.read()
    progress.failed("rank 1: killed by SIGKILL", 1.1, round_=0)
    report(progress.path, (1.2, 4, 0))
    progress.read()
    assert progress.recoveries[0].seconds is None
    report(progress.path, (3.1, 2, 1))
    progress.read()
    assert progress.recoveries[0].as_dict() == {
        "cause": "rank 1: killed by SIGKILL",
        "seconds": 2.0,
        "steps_lost": 3,
    }


def test_steps_that_were_lost_and_done_again_are_lost_once(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "metrics.jsonl")
    report(progress.path, (1.0, 100, 0))
    progress.read()
    progress.failed("rank 0: killed by SIGKILL", 1.1, round_=0)
    report(progress.path, (2.0, 61, 1), (3.0, 62, 1))
    progress.read()
    assert (progress.step, progress.now) == (100, 62)
    progress.failed("rank 0: killed by SIGKILL", 3.1, round_=1)
    report(progress.path, (4.0, 62, 2))
    progress.read()
    assert [recovery.steps_lost for recovery in progress.recoveries] == [40, 1]


def test_what_is_no_report_is_left_out(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "metrics.jsonl")
    lines = ["[1]", '"x"', '{"step": [2], "time": 1}', '{"step": 1e999, "time": 1, "round": 0, "world_size": 1}',
             '{"step": 3, "time": "now", "round": 0, "world_size": 1}', '{"step": 9, "time": 1, "round": 0}']  # fmt: skip
    progress.path.write_text("\n".join(lines) + "\n")
    assert not progress.read()
    assert (progress.step, progress.line) == (0, {})
