"""One worker as its agent knows it, with the real channel to it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_runtime.agent.requests import Program
from elastic_runtime.agent.worker import Slot
from elastic_runtime.membership.members import Worker


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[tuple[Slot, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = Slot(
        known=Worker(node="0", slot=1, spawn=7), program=Program(script="t.py", environment={}, cwd="/"),
        log=tmp_path / "log", log_start=0, channel=ours,
    )  # fmt: skip
    yield made, theirs
    made.close()
    theirs.close()


def test_what_is_told_arrives_as_one_packet_each(slot: tuple[Slot, socket.socket]) -> None:
    mine, worker = slot
    mine.tell("change", round=3, planned=True)
    mine.tell("leave")
    assert json.loads(worker.recv(65536)) == {"kind": "change", "round": 3, "planned": True}
    assert json.loads(worker.recv(65536)) == {"kind": "leave"}
    assert (mine.slot, mine.identity) == (1, {"slot": 1, "spawn": 7})


def test_a_worker_that_never_reads_does_not_hold_its_agent_up(slot: tuple[Slot, socket.socket]) -> None:
    mine, worker = slot
    for number in range(20_000):
        mine.tell("change", round=number, planned=False)
    assert json.loads(worker.recv(65536))["round"] == 0


def test_telling_one_that_is_gone_is_no_error(slot: tuple[Slot, socket.socket]) -> None:
    mine, worker = slot
    worker.close()
    mine.tell("leave")
    mine.close()
    mine.tell("leave")
    assert list(mine.hear()) == []


def test_what_is_no_message_is_passed_over(slot: tuple[Slot, socket.socket]) -> None:
    mine, worker = slot
    assert list(mine.hear()) == [], "nothing was said, and nobody waits"
    for packet in (
        b"\xff\xfe",
        b"{",
        b"[1]",
        b"7",
        b"null",
        b'"x"',
        b'{"kind": "hello"}',
        b"NaN",
        b'{"kind": 3}',
    ):
        worker.send(packet)
    assert list(mine.hear()) == [{"kind": "hello"}, {"kind": 3}]


def test_a_flood_is_heard_in_parts_so_that_others_get_their_turn(slot: tuple[Slot, socket.socket]) -> None:
    mine, worker = slot
    worker.setblocking(False)
    sent, heard = 0, 0
    try:
        while sent < 1000:
            worker.send(json.dumps({"kind": "x", "n": sent}).encode())
            sent += 1
    except BlockingIOError:
        pass
    assert sent > 64
    while heard < sent:
        part = [message["n"] for message in mine.hear()]
        assert part == list(range(heard, heard + len(part)))
        assert 0 < len(part) <= 64
        heard += len(part)


def test_the_end_of_a_worker_shows_after_its_last_words(slot: tuple[Slot, socket.socket]) -> None:
    mine, worker = slot
    worker.send(b'{"kind": "finished", "step": 3}')
    worker.close()
    hearing = mine.hear()
    assert next(hearing) == {"kind": "finished", "step": 3}
    with pytest.raises(EOFError):
        next(hearing)


def test_closing_twice_is_closing_once(slot: tuple[Slot, socket.socket]) -> None:
    mine, worker = slot
    mine.theirs = worker.dup()
    theirs = mine.theirs
    mine.close()
    mine.close()
    assert theirs.fileno() == -1
    assert worker.recv(10) == b""
