from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_runtime.agent.last_words import last_error, last_report

TRACE = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    train()
  File "train.py", line 2, in train
    raise ValueError("no such column")
"""
CHAINED = (
    TRACE
    + "KeyError: 'x'\n\nDuring handling of the above exception, another exception occurred:\n\n"
    + TRACE
    + "ValueError: second\n"
)


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (TRACE + "ValueError: no such column\n", 1, "ValueError: no such column"),
        (TRACE + "ValueError: no such column\n", 7, "ValueError: no such column"),
        (TRACE + "my.own.Trouble: it broke\n", 1, "my.own.Trouble: it broke"),
        (TRACE + "KeyboardInterrupt\n", 1, "KeyboardInterrupt"),
        (CHAINED, 1, "ValueError: second"),
        ("before\n" + TRACE + "ValueError: no\nand something of atexit, said later\n", 1, "ValueError: no"),
        ("".join(f"[rank3]: {line}\n" for line in (TRACE + "ValueError: of rank 3").splitlines()), 1,
         "ValueError: of rank 3"),
        (TRACE, 1, ""),
        ("epoch 1\nno --data given\n\n", 1, "exit code 1, last line: no --data given"),
        ("usage: train.py\ntrain.py: error: unrecognized arguments: -x\n", 2,
         "exit code 2, last line: train.py: error: unrecognized arguments: -x"),
        ("epoch 1\n", 3, ""),
        ("", 1, ""),
        ("\n \n", 1, ""),
        ("\x00\x00\x00" + TRACE + "ValueError: after a hole\n", 1, "ValueError: after a hole"),
        ("\udcff\udcfe" + TRACE + "ValueError: ü\n", 1, "ValueError: ü"),
        (TRACE + "ValueError: " + "x" * 5000 + "\n", 1, "ValueError: " + "x" * 488),
    ],
)  # fmt: skip
def test_the_last_error_of_a_log(tmp_path: Path, text: str, code: int, words: str) -> None:
    log = tmp_path / "rank-0.log"
    log.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert last_error(log, 0, code) == words


def test_what_an_earlier_worker_wrote_into_the_log_is_not_its_successors_error(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    old = TRACE + "ValueError: of the one before\n"
    log.write_text(old)
    assert last_error(log, len(old), 9) == ""
    assert last_error(log, len(old), 1) == ""
    with log.open("a") as file:
        file.write("its only line\n")
    assert last_error(log, len(old), 1) == "exit code 1, last line: its only line"


def test_only_the_end_of_a_long_log_is_read_and_a_log_that_is_gone_says_nothing(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    assert last_error(log, 0, 1) == ""
    log.write_text(TRACE + "ValueError: long ago\n" + "a line\n" * 20_000)
    assert last_error(log, 0, 5) == ""
    log.write_text("short")
    assert last_error(log, 1000, 1) == "", "the log was made anew and is shorter than it was"


def report(step: int, round_: int, **fields: object) -> str:
    return json.dumps({"step": step, "round": round_, "world_size": 2, "time": 1.5, **fields})


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([report(1, 0), report(2, 1)], (2, 1)),
        ([report(3, 0), report(2, 1)], (2, 1)),
        ([report(4, 2), '{"step": 5, "rou'], (4, 2)),
        ([report(4, 2), "null", "[1]", "7", '"x"'], (4, 2)),
        ([report(4, 2), '{"step": "5", "round": 2, "world_size": 2, "time": 1}'], (4, 2)),
        ([report(4, 2), report(5, 2, note=[1])], (4, 2)),
        (["nonsense"], (0, -1)),
        ([], (0, -1)),
        ([report(9, 1)] + ["x" * 100] * 1000, (0, -1)),
    ],
)
def test_the_last_report_of_a_step(tmp_path: Path, lines: list[str], found: tuple[int, int]) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert last_report(metrics) == (0, -1)
    metrics.write_text("".join(f"{line}\n" for line in lines))
    assert last_report(metrics) == found
