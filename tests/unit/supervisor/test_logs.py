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


def test_what_was_given_back_before_it_was_shown_is_said(tmp_path: Path) -> None:
    output, log = io.BytesIO(), tmp_path / "log"
    stream = LogStream(limit=1 << 20, output=output)
    stream.follow(0, log)
    log.write_bytes(b"old line\n" * 500_000)
    assert stream.pump()
    stream.drain()
    shown = output.getvalue()
    assert b"bytes were over the log limit before they could be shown)\n" in shown
    assert b"\0" not in shown
    assert shown.endswith(b"[rank0] old line\n")
    assert not stream.pump()


def test_torchxs_copies_of_the_stream_are_bounded_too(tmp_path: Path) -> None:
    folder = tmp_path / "elastic" / "0"
    folder.mkdir(parents=True)
    log = tmp_path / "log"
    with (folder / "stdout.log").open("ab") as output, (folder / "combined.log").open("ab") as combined:
        stream = LogStream(limit=1 << 20, output=output)
        stream.follow(0, log)
        with log.open("ab") as file:
            for _ in range(64):
                file.write(b"line\n" * 20_000)
                file.flush()
                combined.write(b"line\n" * 20_000)
                combined.flush()
                stream.pump()
    for name in ("stdout.log", "combined.log"):
        status = (folder / name).stat()
        assert status.st_size > 5 << 20
        assert status.st_blocks * 512 <= 2 << 20
