from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from elastic_runtime.agent.requests import Program, receive, send_message

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (Program(script="a b.py", arguments=["--x", ""], environment={}, cwd="/"), ["a b.py", "--x", ""]),
        (Program(module="pkg.mod", arguments=["ü"], environment={"A": "1"}, cwd="/"), ["-m", "pkg.mod", "ü"]),
        # A file name that is no valid text, and an environment of a megabyte.
        (Program(script=os.fsdecode(b"\xff.py"), environment={"A": "x" * (1 << 20)}, cwd="/"), [os.fsdecode(b"\xff.py")]),
    ],
)  # fmt: skip
def test_a_program_survives_the_way_to_the_zygote(program: Program, words: list[str]) -> None:
    back = Program.from_bytes(program.to_bytes())
    assert back.words() == words
    assert (dict(back.environment), back.cwd) == (dict(program.environment), program.cwd)


def test_descriptors_arrive_and_are_not_passed_on_to_programs(pair: Pair) -> None:
    read, write = os.pipe()
    send_message(pair[0], "fork", [write], id=3)
    os.close(write)
    message, (arrived,) = receive(pair[1])
    assert message == {"kind": "fork", "id": 3}
    assert not os.get_inheritable(arrived)
    os.write(arrived, b"through")
    os.close(arrived)
    assert os.read(read, 16) == b"through"
    os.close(read)


def test_nothing_there_and_nobody_there_are_told_apart_without_waiting(pair: Pair) -> None:
    with pytest.raises(BlockingIOError):
        receive(pair[1])
    send_message(pair[0], "last")
    pair[0].close()
    assert receive(pair[1]) == ({"kind": "last"}, [])
    with pytest.raises(EOFError):
        receive(pair[1])
    with pytest.raises(OSError):
        send_message(pair[1], "to nobody")


def test_a_reader_that_does_not_read_holds_nobody_up(pair: Pair) -> None:
    def send_many() -> None:
        for _ in range(100_000):
            send_message(pair[0], "ping")

    with pytest.raises(BlockingIOError):
        send_many()
