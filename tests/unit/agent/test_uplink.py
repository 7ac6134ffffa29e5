"""The agent's connection against a real server: made again whenever it is lost, never to a coordinator of before."""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elastic_runtime.agent.uplink import Uplink
from elastic_runtime.membership.server import Server
from elastic_runtime.membership.sockets import listen


class Coordinator:
    """A server in a thread that greets with its term and keeps what it is told."""

    def __init__(self, secret: bytes, term: int, port: int = 0) -> None:
        self.term = term
        self.got: list[dict[str, Any]] = []
        self.peers: list[tuple[str, dict[str, Any]]] = []
        self.ends: list[str] = []
        self._open: list[int] = []
        self._loop = asyncio.new_event_loop()
        self._server = Server(listen(port=port), secret, self)
        self.address = self._server.address[:2]
        self._loop.call_soon_threadsafe(self._server.start)
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def on_open(self, connection: int, peer: Any) -> None:
        self._open.append(connection)
        self.peers.append((peer.role, dict(peer.info)))
        self._server.send(connection, {"kind": "welcome", "term": self.term})

    def on_message(self, connection: int, message: dict[str, Any]) -> None:
        self.got.append(message)

    def on_close(self, connection: int, why: str) -> None:
        self._open.remove(connection)
        self.ends.append(why)

    def tell(self, message: dict[str, Any]) -> None:
        def send() -> None:
            for connection in self._open:
                self._server.send(connection, message)

        self._loop.call_soon_threadsafe(send)

    def hang_up(self) -> None:
        self._loop.call_soon_threadsafe(lambda: [self._server.close(c) for c in list(self._open)])

    def end(self) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(30)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(30)
            self._loop.close()


class Agent:
    """An uplink in its own loop."""

    def __init__(self, address: tuple[str, int], secret: bytes, **options: Any) -> None:
        self.selector = selectors.DefaultSelector()
        self.opened: list[int] = []
        self.got: list[dict[str, Any]] = []
        self.uplink = Uplink(
            address,
            secret,
            node="n7",
            selector=self.selector,
            on_open=self._on_open,
            on_message=self.got.append, **options,
        )  # fmt: skip

    def _on_open(self) -> None:
        self.opened.append(self.uplink.term)
        self.uplink.send("join", number=len(self.opened))

    def turn(self) -> None:
        self.uplink.tick()
        when = self.uplink.next_event
        patience = 0.05 if when is None else max(0.0, min(0.05, when - time.monotonic()))
        for key, _ in self.selector.select(patience):
            key.data()

    def until(self, condition: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < end, what
            self.turn()


@pytest.fixture
def secret() -> bytes:
    return os.urandom(32)


@pytest.fixture
def coordinator(secret: bytes) -> Iterator[Callable[..., Coordinator]]:
    made: list[Coordinator] = []

    def start(term: int = 1, port: int = 0, key: bytes = secret) -> Coordinator:
        made.append(Coordinator(key, term, port))
        return made[-1]

    yield start
    for each in made:
        each.end()


@pytest.fixture
def agent(secret: bytes) -> Iterator[Callable[[tuple[str, int]], Agent]]:
    made: list[Agent] = []

    def start(address: tuple[str, int], **options: Any) -> Agent:
        made.append(Agent(address, secret, **options))
        return made[-1]

    yield start
    for each in made:
        each.uplink.close()
        assert not each.selector.get_map(), "nothing is left in the selector"
        each.selector.close()


def test_it_tells_who_it_is_and_everything_once_it_was_greeted(coordinator: Any, agent: Any) -> None:
    boss = coordinator(term=3)
    mine = agent(boss.address)
    mine.uplink.send("too early")
    assert not mine.uplink.is_open
    mine.until(lambda: boss.got, "the join arrives")
    assert boss.peers == [("agent", {"node": "n7"})]
    assert (mine.opened, mine.uplink.term, mine.uplink.is_open) == ([3], 3, True)
    mine.uplink.send("pong", text="ü" * 1000)
    boss.tell({"kind": "change", "round": 4})
    mine.until(lambda: mine.got and len(boss.got) == 2, "both ways")
    assert boss.got == [{"kind": "join", "number": 1}, {"kind": "pong", "text": "ü" * 1000}]
    assert mine.got == [{"kind": "change", "round": 4}]


def test_many_messages_keep_their_order(coordinator: Any, agent: Any) -> None:
    boss = coordinator()
    mine = agent(boss.address)
    mine.until(lambda: mine.uplink.is_open, "open")
    for number in range(3000):
        mine.uplink.send("exited", number=number, message="x" * 300)
    mine.until(lambda: len(boss.got) == 3001, "all arrive")
    assert [message["number"] for message in boss.got[1:]] == list(range(3000))


def test_a_connection_that_is_lost_is_made_again_and_all_is_told_anew(coordinator: Any, agent: Any) -> None:
    boss = coordinator()
    mine = agent(boss.address)
    for times in range(1, 6):
        mine.until(lambda n=times: len(boss.got) == n, "joined")
        assert mine.opened == [1] * times
        boss.hang_up()
        mine.until(lambda n=times: len(boss.ends) == n, "hung up")
    mine.until(lambda: len(mine.opened) == 6, "back again")


def test_while_there_is_no_coordinator_messages_are_dropped_and_the_next_one_is_found(
    coordinator: Any, agent: Any
) -> None:
    boss = coordinator(term=1)
    mine = agent(boss.address)
    mine.until(lambda: boss.got, "joined")
    boss.end()
    mine.until(lambda: not mine.uplink.is_open, "the end is seen")
    for _ in range(100):
        mine.uplink.send("ready")
    until = time.monotonic() + 0.3
    mine.until(lambda: time.monotonic() > until, "some tries in vain")
    following = coordinator(term=2, port=boss.address[1])
    mine.until(lambda: following.got, "found again")
    assert following.got == [{"kind": "join", "number": 2}]
    assert mine.opened == [1, 2]


def test_a_coordinator_of_an_older_term_is_told_nothing(coordinator: Any, agent: Any) -> None:
    boss = coordinator(term=5)
    mine = agent(boss.address)
    mine.until(lambda: boss.got, "joined")
    boss.end()
    stale = coordinator(term=4, port=boss.address[1])
    mine.until(lambda: len(stale.ends) >= 3, "hung up on, each time")
    assert (stale.got, mine.opened, mine.uplink.term) == ([], [5], 5)
    assert not mine.uplink.is_open
    stale.tell({"kind": "stop", "slots": [0]})
    stale.end()
    newer = coordinator(term=6, port=boss.address[1])
    mine.until(lambda: newer.got, "joined")
    assert mine.got == [], "nothing of a stale term was obeyed"
    assert mine.opened == [5, 6]


def test_the_same_term_again_is_the_same_coordinator(coordinator: Any, agent: Any) -> None:
    boss = coordinator(term=5)
    mine = agent(boss.address)
    mine.until(lambda: boss.got, "joined")
    boss.end()
    again = coordinator(term=5, port=boss.address[1])
    mine.until(lambda: again.got, "joined")
    assert mine.opened == [5, 5]


def test_one_who_does_not_know_the_secret_is_never_open(coordinator: Any, agent: Any) -> None:
    other = coordinator(key=os.urandom(32))
    mine = agent(other.address)
    until = time.monotonic() + 0.5
    mine.until(lambda: time.monotonic() > until, "some tries")
    assert (mine.opened, mine.uplink.is_open, other.got, other.peers) == ([], False, [], [])


def test_tries_in_vain_become_rare_and_cost_nothing(agent: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()[:2]
    mine = agent(address)
    waits = []
    for _ in range(9):
        mine.until(lambda: mine.uplink.next_event and mine.uplink.next_event > time.monotonic(), "waits")
        waits.append(mine.uplink.next_event - time.monotonic())
        mine.uplink._next_try = 0.0  # Now.
    assert waits[-1] > 0.5
    assert all(wait <= 1.0 for wait in waits)


def test_flush_gets_the_last_words_out(coordinator: Any, agent: Any) -> None:
    boss = coordinator()
    mine = agent(boss.address)
    mine.until(lambda: mine.uplink.is_open, "open")
    for number in range(2000):
        mine.uplink.send("exited", number=number, message="x" * 2000)
    mine.uplink.flush(20.0)
    mine.uplink.close()
    end = time.monotonic() + 20
    while len(boss.got) < 2001:
        assert time.monotonic() < end, f"{len(boss.got)} of 2001"
        time.sleep(0.01)
    assert not mine.uplink.is_open


def test_a_coordinator_that_says_nothing_is_asked_on_another_connection(coordinator: Any, agent: Any) -> None:
    boss = coordinator(term=3)
    closed: list[float] = []
    mine = agent(boss.address, silence=0.5, on_close=lambda: closed.append(time.monotonic()))
    mine.until(lambda: boss.got, "the join arrives")
    begin = time.monotonic()
    while time.monotonic() < begin + 1.5:  # As long as it says something, nothing changes.
        boss.tell({"kind": "ping"})
        mine.turn()
    if len(boss.peers) == 1:  # On a machine that stood still meanwhile it may have been asked already.
        assert (closed, mine.opened) == ([], [3])
    before = len(boss.peers)
    mine.until(lambda: len(boss.got) > before, "the join on another connection")
    assert mine.uplink.is_open
    assert len(closed) >= 1
    # The old connection ends only now: its end would else be taken for this agent's.
    mine.until(lambda: "eof" in boss.ends, "the end of the old connection")
    assert len(boss.ends) < len(boss.peers)
