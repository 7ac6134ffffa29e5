"""Logs by lines: the last ones, new ones, long ones, and those that were given back to the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_runtime.jobs import lines
from elastic_runtime.jobs.lines import LogReader


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("count", [0, 1, 2, 9, 10, 11, 500])
@pytest.mark.parametrize("block", [3, 16, 1 << 18])
def test_the_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, end: str, block: int
) -> None:
    monkeypatch.setattr(lines, "_BLOCK", block)
    everything = [f"line {number}" for number in range(10)]
    log = tmp_path / "log"
    log.write_text("\n".join(everything) + end)
    reader = LogReader(log)
    reader.skip_to_last(count)
    assert list(reader.lines(last=True)) == (everything[-count:] if count else [])


def test_a_line_comes_when_it_is_complete_or_the_last(tmp_path: Path) -> None:
    log = tmp_path / "log"
    reader = LogReader(log)
    reader.skip_to_last(3)
    assert list(reader.lines()) == [], "not there yet"
    with log.open("ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert list(reader.lines()) == ["one"]
        file.write("o\r\nd\u00e9\n\xff".encode("latin-1"))
        assert list(reader.lines()) == ["two", "d\ufffd"]
        assert list(reader.lines()) == []
    assert list(reader.lines(last=True)) == ["\ufffd"]
    assert list(reader.lines(last=True)) == []


def test_an_endless_line_comes_in_pieces(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * (1 << 20) + b"\nend\n")
    *pieces, last = LogReader(log).lines(last=True)
    assert last == "end"
    assert "".join(pieces) == "x" * (1 << 20)
    assert len(pieces) > 1


def test_what_was_given_back_to_the_disk_is_skipped(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        os.ftruncate(file.fileno(), 1 << 30)
        file.seek(1 << 30)
        file.write(b"rest of a line\nlast\n")
    assert list(LogReader(log).lines(last=True)) == ["rest of a line", "last"]
    reader = LogReader(log)
    reader.skip_to_last(5)
    assert list(reader.lines(last=True)) == ["rest of a line", "last"]
