from __future__ import annotations

import io
from pathlib import Path

from elastic_runtime.jobs.folder import tail
from elastic_runtime.supervisor.logs import LogStream


def test_lines_are_prefixed_and_a_half_line_waits_for_its_end(tmp_path: Path) -> None:
    output, log = io.BytesIO(), tmp_path / "rank-3.log"
    stream = LogStream(limit=1 << 30, output=output)
    stream.follow(3, log)
    stream.pump()
    log.write_bytes(b"one\ntw")
    stream.pump()
    assert output.getvalue() == b"[rank3] one\n"
    with log.open("ab") as file:
        file.write(b"o\nthree")
    stream.pump()
    stream.drain()
    assert output.getvalue() == b"[rank3] one\n[rank3] two\n[rank3] three\n"


def test_bytes_that_are_no_text_pass_through(tmp_path: Path) -> None:
    output, log = io.BytesIO(), tmp_path / "log"
    stream = LogStream(limit=1 << 30, output=output)
    stream.follow(0, log)
    log.write_bytes(b"\xff\xfe\r\n")
    stream.drain()
    assert output.getvalue() == b"[rank0] \xff\xfe\r\n"


def test_a_line_without_end_does_not_grow_without_bound(tmp_path: Path) -> None:
    output, log = io.BytesIO(), tmp_path / "log"
    stream = LogStream(limit=1 << 30, output=output)
    stream.follow(0, log)
    log.write_bytes(b"x" * (1 << 20))
    stream.drain()
    assert output.getvalue().count(b"x") == 1 << 20
    assert max(map(len, output.getvalue().split(b"\n"))) <= (1 << 18) + 20


def test_a_log_over_the_limit_gives_its_oldest_blocks_back_and_keeps_its_newest(tmp_path: Path) -> None:
    log, limit = tmp_path / "log", 1 << 20
    stream = LogStream(limit=limit, output=io.BytesIO())
    stream.follow(0, log)
    with log.open("ab", buffering=0) as writer:
        for number in range(64):
            writer.write(b"%015d\n" % number * 4096)
            stream.pump()
    assert log.stat().st_size == 64 * 65536, "the writer's offsets stay"
    assert log.stat().st_blocks * 512 <= limit + 2 * 65536
    assert tail(log, 16) == f"{63:015d}\n"
    assert "\0" not in tail(log, 1 << 22)


def test_a_reader_that_went_away_does_not_stop_the_stream(tmp_path: Path) -> None:
    class Closed(io.BytesIO):
        def write(self, _: object) -> int:  # type: ignore[override]
            raise BrokenPipeError

    log = tmp_path / "log"
    stream = LogStream(limit=1 << 30, output=Closed())
    stream.follow(0, log)
    log.write_bytes(b"line\n")
    stream.pump()
    stream.say("own")
    stream.drain()
