"""The server as a process of its own: clients, attackers, and what each may cost."""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from elastic_runtime.membership.channel_errors import ChannelError, ChannelTimeout, WrongSecretError
from elastic_runtime.membership.connection import Connection, request, resolve
from elastic_runtime.membership.secret import create_secret
from elastic_runtime.membership.session import ClientSession, Peer, ServerSession

HERE = Path(__file__).parent
PATIENCE = 30.0


@pytest.fixture
def secret(tmp_path):
    return create_secret(tmp_path / "secret")


@pytest.fixture
def start(sandbox, secret, tmp_path):
    """Start a server; gives (host, port). Ending it politely is checked at the end."""
    started = []

    def begin(**options):
        process = sandbox.start(
            sys.executable, HERE / "echo_server.py", tmp_path / "secret", json.dumps(options)
        )
        started.append(process)
        line = process.stdout.readline()
        assert line, process.stderr.read()
        return tuple(json.loads(line))

    begin.processes = started
    yield begin
    for process in started:
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors


def drive(connection, until, timeout=PATIENCE):
    """Run the connection until `until(messages so far)` is true or it is closed; return the messages."""
    got, end = [], time.monotonic() + timeout
    while connection.closed is None and not until(got):
        assert time.monotonic() < end, got[-3:]
        with selectors.DefaultSelector() as selector:
            selector.register(
                connection, selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_write else 0)
            )
            for _, ready in selector.select(0.05):
                if ready & selectors.EVENT_WRITE:
                    connection.on_writable()
                if ready & selectors.EVENT_READ:
                    connection.on_readable()
        connection.tick()
        got += connection.messages()
    return got


def call(connection, message):
    connection.send(message)
    return drive(connection, bool)[0]


@pytest.fixture
def connect(secret):
    """Open authenticated connections; gives those that have been greeted."""
    made = []

    def begin(address, **options):
        connection = Connection(address, secret, **{"role": "agent", "info": {"node": "n0"}, **options})
        made.append(connection)
        assert drive(connection, bool) == [{"kind": "hello", "role": "agent", "info": {"node": "n0"}}], (
            connection.closed
        )
        return connection

    yield begin
    for connection in made:
        connection.close()


def stats(address, connect):
    connection = connect(address)
    try:
        return call(connection, {"kind": "stats"})
    finally:
        connection.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
def test_messages_go_both_ways(start, connect, secret, host):
    address = ("127.0.0.1" if host == "::" else host, start(host=host)[1])
    before = time.monotonic()
    first, second = connect(address), connect(address)
    for text in ("", "ü" * 1000, "x" * 60_000):
        assert call(first, {"kind": "echo", "text": text}) == {"kind": "echo", "text": text}
    many = [{"kind": "echo", "n": number} for number in range(3000)]
    for message in many:
        second.send(message)
    assert drive(second, lambda got: len(got) == 3000) == many
    assert before < call(second, {"kind": "stats"})["heard"] < time.monotonic()
    assert before < second.last_heard < time.monotonic()
    assert request(address, secret, {"kind": "echo"}, role="x")["kind"] == "hello"


def _closed(connection, timeout=PATIENCE):
    """Return what a raw socket still gets before its end."""
    connection.settimeout(timeout)
    got = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(4096):
            got += data
    return got


def test_attackers_are_refused_and_counted_and_hurt_nobody(start, connect, secret, wait):
    address = start()
    honest = connect(address)
    base = call(honest, {"kind": "stats"})["rss"]
    challenge = 4 + 8 + 2 + 32

    def attack(data):
        with socket.create_connection(address) as raw:
            with contextlib.suppress(ConnectionError):
                raw.sendall(data)
            assert len(_closed(raw)) in (0, challenge)

    for _ in range(50):
        attack(b"\xff" + os.urandom(5000))
        attack(bytes.fromhex("16030100c8010000c40303") + bytes(189))
        attack((64).to_bytes(4, "big") + bytes(64))
    assert call(honest, {"kind": "echo"}) == {"kind": "echo"}
    # 1 GiB without a newline, as far as it gets.
    with socket.create_connection(address) as raw:
        chunk, sent = b"a" * (1 << 20), 0
        with contextlib.suppress(ConnectionError):
            while sent < 1 << 30:
                sent += raw.send(chunk)
        assert sent < 1 << 30
    # A gibibyte in a frame that is never complete, by a client that may speak.
    for _ in range(20):
        with pytest.raises(WrongSecretError):
            request(address, bytes(32), {"kind": "echo"}, timeout=PATIENCE)
    # Another one's handshake and messages, played again.
    session = ClientSession(secret, Peer(role="agent"))
    with socket.create_connection(address) as raw:
        raw.settimeout(PATIENCE)
        session.receive(raw.recv(challenge))
        recorded = session.output()
        raw.sendall(recorded)
        session.receive(raw.recv(4096))
        recorded += session.seal({"kind": "echo"})
    for _ in range(20):
        attack(recorded)
    found = wait(
        lambda: (now := call(honest, {"kind": "stats"}))["open"] == 1 and now, what="everybody else is gone"
    )
    counters = found["counters"]
    assert counters["oversized"] == 101
    assert counters["malformed"] == 50
    assert counters["unauthentic"] == 40
    assert counters["opened"] == 2
    assert found["unauthenticated"] == 0
    assert found["rss"] - base < 8 << 20


def test_a_message_that_is_changed_or_repeated_ends_an_authenticated_connection(start, connect, secret, wait):
    address = start()
    for number, spoil in enumerate(
        [lambda frame: frame + frame, lambda frame: frame[:-1] + bytes([frame[-1] ^ 1])]
    ):
        session = ClientSession(secret, Peer(role="agent"))
        with socket.create_connection(address) as raw:
            raw.settimeout(PATIENCE)
            session.receive(raw.recv(4096))
            raw.sendall(session.output())
            session.receive(raw.recv(4096))
            assert session.is_open
            raw.sendall(spoil(session.seal({"kind": "echo"})))
            session.receive(_closed(raw))
        ends = ["replayed", "tampered"][: number + 1]
        wait(
            lambda ends=ends: [end for end in stats(address, connect)["ends"] if end != "eof"] == ends,
            timeout=PATIENCE,
        )


def test_ten_thousand_half_open_connections_hurt_nobody(start, connect, wait):
    address = start(limits={"handshake": 600})
    honest = connect(address)
    base = call(honest, {"kind": "stats"})
    crowd, worst = [], 0.0
    try:
        for number in range(10_000):
            crowd.append(socket.create_connection(address, timeout=PATIENCE))
            if number % 500 == 0:
                begun = time.monotonic()
                assert call(honest, {"kind": "echo"}) == {"kind": "echo"}
                worst = max(worst, time.monotonic() - begun)
        newcomer = connect(address)
        assert call(newcomer, {"kind": "echo"}) == {"kind": "echo"}
        found = wait(
            lambda: (now := call(honest, {"kind": "stats"}))["counters"]["accepted"] == 10_002 and now,
            what="all accepted",
        )
        assert found["unauthenticated"] <= 2048
        assert found["counters"]["displaced"] >= 10_000 - 2048
        assert found["descriptors"] < base["descriptors"] + 2048 + 10
        assert found["rss"] - base["rss"] < 32 << 20
        assert worst < 2.0
    finally:
        for raw in crowd:
            raw.close()
    wait(
        lambda: call(honest, {"kind": "stats"})["descriptors"] <= base["descriptors"] + 1,
        what="all given back",
    )


def test_who_does_not_prove_itself_in_time_is_dropped(start, connect, wait):
    address = start(limits={"handshake": 0.3})
    honest = connect(address)
    silent, slow = socket.create_connection(address), socket.create_connection(address)
    with silent, slow:
        slow.sendall((200).to_bytes(4, "big"))
        assert len(_closed(silent)) == 46
        ended = False
        while not ended:  # a byte at a time does not buy more time
            with contextlib.suppress(BlockingIOError):
                try:
                    slow.send(b"k", socket.MSG_DONTWAIT)
                except ConnectionError:
                    ended = True
            select.select([], [], [], 0.02)
    found = wait(lambda: (now := call(honest, {"kind": "stats"}))["unauthenticated"] == 0 and now)
    assert found["counters"]["late"] == 2
    assert call(honest, {"kind": "echo"}) == {"kind": "echo"}


def test_a_slow_reader_is_dropped_and_costs_a_bounded_buffer(start, connect, wait):
    address = start()
    honest, slow = connect(address), connect(address)
    base = call(honest, {"kind": "stats"})["rss"]
    slow.send({"kind": "flood", "count": 2000, "size": 60_000})  # 120 MB, none of it read
    found = wait(lambda: (now := call(honest, {"kind": "stats"}))["ends"] and now)
    assert (found["ends"], found["open"]) == (["slow reader"], 1)
    assert found["rss"] - base < 32 << 20
    parts = drive(slow, lambda _: False)
    assert isinstance(slow.closed, ChannelError)
    assert [part["number"] for part in parts] == list(range(len(parts)))
    assert len(parts) < 2000


def test_what_was_sent_before_close_arrives_even_if_the_client_goes_on_sending(start, connect, wait):
    address = start()
    connection = connect(address)
    connection.send({"kind": "flood and close", "count": 15, "size": 60_000})
    for number in range(50):
        connection.send({"kind": "echo", "n": number})
    parts = drive(connection, lambda _: False)
    assert [(part["kind"], part["number"]) for part in parts] == [("part", number) for number in range(15)]
    wait(lambda: stats(address, connect)["ends"][:1] == ["closed"])


def test_a_handler_that_fails_costs_that_connection_only(start, connect, wait):
    address = start()
    honest, other = connect(address), connect(address)
    other.send({"kind": "fail"})
    drive(other, lambda _: False)
    assert call(honest, {"kind": "stats"})["ends"] == ["handler failed"]
    assert call(honest, {"kind": "echo"}) == {"kind": "echo"}


def test_without_descriptors_left_the_oldest_stranger_goes_and_the_clients_stay(start, connect, wait):
    address = start(descriptors=64, limits={"handshake": 600})  # 32 for clients
    clients = [connect(address) for _ in range(24)]
    crowd = []
    try:
        crowd.extend(socket.create_connection(address, timeout=PATIENCE) for _ in range(200))
        for client in clients:
            assert call(client, {"kind": "echo"}) == {"kind": "echo"}
        found = wait(
            lambda: (now := call(clients[0], {"kind": "stats"}))["counters"]["accepted"] == 224 and now
        )
        assert found["open"] == 24
        assert found["unauthenticated"] == 8
        assert found["counters"]["no descriptors"] == 192
        newcomer = connect(address)
        assert call(newcomer, {"kind": "echo"}) == {"kind": "echo"}
    finally:
        for raw in crowd:
            raw.close()


def test_full_of_clients_it_turns_the_next_away_until_one_leaves(start, connect, secret, wait):
    address = start(descriptors=36)  # 18 for clients
    clients = [connect(address) for _ in range(18)]
    with pytest.raises(ChannelError, match=r"it closed the connection|reset by peer") as caught:
        request(address, secret, {"kind": "echo"}, timeout=PATIENCE)
    assert not isinstance(caught.value, WrongSecretError)
    assert call(clients[0], {"kind": "stats"})["counters"]["no descriptors"] == 1
    clients.pop().close()
    wait(lambda: call(clients[0], {"kind": "stats"})["open"] == 17)
    newcomer = connect(address)
    assert call(newcomer, {"kind": "echo"}) == {"kind": "echo"}
    for client in clients:
        assert call(client, {"kind": "echo"}) == {"kind": "echo"}


def test_a_server_that_stops_says_so(start, connect):
    address = start()
    connection = connect(address)
    start.processes[0].terminate()
    out, _ = start.processes[0].communicate(timeout=PATIENCE)
    assert json.loads(out) == {"ends": ["closed"]}
    drive(connection, lambda _: False)
    assert "it closed the connection" in str(connection.closed)
    start.processes.clear()


def test_what_a_request_can_meet_is_one_clear_error(start, secret, tmp_path):
    address = start()
    with pytest.raises(
        WrongSecretError, match=r"coordinator at 127.0.0.1:\d+: refused: the secret is not this job's"
    ):
        request(address, bytes(32), {"kind": "echo"}, timeout=PATIENCE)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(ChannelError, match=rf"coordinator at 127.0.0.1:{port}: Connection refused"):
            request(("127.0.0.1", port), secret, {"kind": "echo"}, timeout=PATIENCE)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(ChannelTimeout, match=r"no answer in 0\.2 s"):
            request(silent.getsockname(), secret, {"kind": "echo"}, timeout=0.2)
    with pytest.raises(ChannelError, match="check the name"):
        request(("no-such-host.invalid", 80), secret, {"kind": "echo"}, timeout=PATIENCE)
    with pytest.raises(ChannelTimeout, match=r"no answer in 0\.3 s: try again"):
        request(handshake_only(secret), secret, {"kind": "silence"}, timeout=0.3)
    with pytest.raises(
        ChannelError, match="speaks another version of the protocol: use the same kfp-elastic"
    ):
        request(handshake_only(secret, version=7), secret, {"kind": "echo"}, timeout=PATIENCE)


def handshake_only(secret, **options):
    """Listen for one client, shake hands, and say nothing ever after; return the address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with listener, listener.accept()[0] as raw:
            session = ServerSession(secret, **options)
            raw.sendall(session.output())
            while data := raw.recv(4096):
                session.receive(data)
                raw.sendall(session.output())
                if session.refused:
                    return

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()


def test_a_port_that_is_no_coordinators_is_named(secret):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with listener.accept()[0] as raw:
                raw.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                raw.recv(100)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ChannelError, match="what answers there is no coordinator"):
            request(listener.getsockname(), secret, {"kind": "echo"}, timeout=PATIENCE)
        thread.join(PATIENCE)


def test_of_a_name_with_several_addresses_each_is_tried(start, secret):
    address = ("localhost", start(host="127.0.0.1")[1])
    assert len({address for _, address in resolve(address)}) >= 1
    assert request(address, secret, {"kind": "echo"}, timeout=PATIENCE)["kind"] == "hello"
