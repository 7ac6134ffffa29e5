"""The coordinator is attacked and lost: R18 and R19. Training goes on."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_runtime.membership.channel_errors import ChannelError
from elastic_runtime.membership.connection import request
from elastic_runtime.membership.secret import read_secret
from elastic_runtime.membership.session import ClientSession, Peer


def test_an_attack_on_the_coordinators_port_does_not_hold_up_training(job: Any) -> None:
    """R18."""
    one = job().start("--nodes", "2", "--max-restarts", "0")
    one.wait_for_world(2)
    host, port = one.folder.description()["coordinator"]
    address = (host, int(port))
    secret = read_secret(one.path / "secret")
    coordinator = one.coordinator()
    before, first = _memory(coordinator), len(one.folder.metrics())
    _attack(address, secret)
    crowd: list[socket.socket] = []
    try:
        for _ in range(3000):
            with contextlib.suppress(OSError):
                crowd.append(socket.create_connection(address, timeout=10))
        status = one.status()  # Also with 3,000 strangers at the door.
        assert _memory(coordinator) - before < 48 << 20
        step = one.step()
        one.wait(lambda: one.step() > step + 20, "training beside the crowd")
    finally:
        for each in crowd:
            each.close()
    times = [line["time"] for line in one.folder.metrics()[first:]]
    longest = max(after - earlier for earlier, after in itertools.pairwise(times))
    print(
        f"longest step in the attack: {longest:.3f} s; memory +{(_memory(coordinator) - before) >> 20} MiB; {status['refused']}"
    )
    # A step takes some hundredths of a second; a coordinator that is taken for lost costs five seconds.
    assert longest < 4
    assert (status["term"], status["round"], status["restarts"]) == (1, 0, 0)
    refused = status["refused"]
    assert refused["oversized"] >= 60
    assert refused["malformed"] >= 30
    assert refused["unauthentic"] >= 40
    assert one.coordinator() == coordinator
    record = one.finish()
    assert record["recoveries"] == []
    one.assert_whole(record)


def _attack(address: tuple[str, int], secret: bytes) -> None:
    for data in [b"\xff" + os.urandom(5000), bytes.fromhex("16030100c8010000c40303") + bytes(189),
                 (64).to_bytes(4, "big") + bytes(64)] * 30:  # fmt: skip
        _send(address, data)
    sent, chunk = 0, b"a" * (1 << 20)
    with socket.create_connection(address, timeout=30) as raw, contextlib.suppress(OSError):
        while sent < 1 << 30:
            sent += raw.send(chunk)
    assert sent < 1 << 30, "1 GiB without a newline was taken"
    for _ in range(20):
        with pytest.raises(ChannelError):
            request(address, bytes(32), {"kind": "status"}, timeout=30)
    # The handshake and the words of somebody who may speak, played again.
    session = ClientSession(secret, Peer(role="control"))
    with socket.create_connection(address, timeout=30) as raw:
        session.receive(raw.recv(4096))
        recorded = session.output()
        raw.sendall(recorded)
        session.receive(raw.recv(4096))
        assert session.is_open
        recorded += session.seal({"kind": "scale", "workers": 1})
    for _ in range(20):
        _send(address, recorded)


def _send(address: tuple[str, int], data: bytes) -> None:
    with socket.create_connection(address, timeout=30) as raw, contextlib.suppress(ConnectionError):
        raw.sendall(data)
        while raw.recv(4096):
            pass


def test_a_coordinator_that_is_killed_while_a_round_forms_twice_in_a_row_and_paused(job: Any) -> None:
    """R19."""
    one = job().start("--nodes", "2:3")
    one.wait_for_world(3)
    # With a worker, at the same moment: the round forms under its successor.
    rounds, victim = len(one.events("round")), one.worker(2)
    os.kill(victim, signal.SIGKILL)
    os.kill(one.coordinator(), signal.SIGKILL)
    one.wait(lambda: not _is_alive(victim) and len(one.events("round")) > rounds, "a round without it")
    one.wait_for_world(3)
    # Twice in a row: the second one while it takes over, with a worker gone that nobody has charged yet.
    coordinators = len(one.events("coordinator"))
    old = one.coordinator()
    rounds, victim = len(one.events("round")), one.worker(1)
    os.kill(victim, signal.SIGKILL)
    os.kill(old, signal.SIGKILL)
    successor = one.wait(lambda: _other_coordinator(one, old), "the successor")
    os.kill(successor, signal.SIGKILL)
    one.wait(lambda: len(one.events("coordinator")) > coordinators, "the third")
    one.wait(lambda: not _is_alive(victim) and len(one.events("round")) > rounds, "a round without it")
    one.wait_for_world(3)
    # Paused for less than the patience, while a worker dies: it goes on where it was.
    paused = one.coordinator()
    os.kill(paused, signal.SIGSTOP)
    waker = threading.Timer(2.0, os.kill, (paused, signal.SIGCONT))
    waker.start()
    rounds, victim = len(one.events("round")), one.worker(0)
    os.kill(victim, signal.SIGKILL)
    one.wait(lambda: not _is_alive(victim) and len(one.events("round")) > rounds, "a round without it")
    waker.join()
    assert one.coordinator() == paused
    one.wait_for_world(3)
    # Paused for longer: replaced, and what it says when it wakes is of a stale term. It is killed for that, asleep.
    os.kill(paused, signal.SIGSTOP)
    one.wait(lambda: one.coordinator() != paused, "another coordinator", timeout=30)
    step = one.step()
    one.wait(lambda: one.step() > step + 5, "training under it")
    status = one.status()
    record = one.finish()
    terms = [event["term"] for event in one.events("coordinator")]
    assert terms == sorted(set(terms))
    assert status["term"] == terms[-1] >= 4
    # What an agent says to a coordinator that is just dying is lost: such a failure is not charged.
    assert 1 <= record["restarts"] <= 3
    # A rank 0 that dies after its step and before it has said so leaves that step to be done again, and no other.
    assert all(recovery["steps_lost"] <= 1 for recovery in record["recoveries"])
    one.assert_whole(record)
    one.assert_one_master()


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _other_coordinator(one: Any, old: int) -> int | None:
    found = [pid for pid, line in one.sandbox.processes() if "elastic_runtime.membership.coordinator" in line]
    return next((pid for pid in found if pid != old), None)


def _memory(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_training_does_not_pause_while_there_is_no_coordinator(job: Any) -> None:
    """Coordinators are killed for some seconds as soon as they are there; nobody in the round notices."""
    one = job().start("--nodes", "2", "--max-restarts", "0")
    one.wait_for_world(2)
    first, rounds = len(one.folder.metrics()), len(one.events("round"))
    end, kills = time.monotonic() + 3, 0
    while time.monotonic() < end:
        for pid, line in one.sandbox.processes():
            if "elastic_runtime.membership.coordinator" in line:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    kills += 1
        time.sleep(0.2)  # The rhythm is the input.
    times = [line["time"] for line in one.folder.metrics()[first:]]
    longest = max(after - earlier for earlier, after in itertools.pairwise(times))
    print(f"{kills} kills, longest step {longest:.3f} s")
    assert kills >= 3
    assert longest < 2
    one.wait(lambda: one.status()["term"] > 1, "a coordinator that stays")
    record = one.finish()
    assert len(one.events("round")) == rounds
    assert record["recoveries"] == []
    one.assert_whole(record)
