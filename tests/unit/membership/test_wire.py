"""Frames, messages and the authenticated session: any split of bytes, any change of any byte."""

from __future__ import annotations

import json
import os
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_runtime.errors import InputError
from elastic_runtime.membership.session import (
    ClientSession,
    Opened,
    Peer,
    Received,
    Refused,
    ServerSession,
)
from elastic_runtime.membership.wire import (
    MAX_MESSAGE,
    FrameReader,
    ProtocolError,
    decode_message,
    encode_message,
)

SECRET, OTHER = bytes(range(32)), bytes(range(1, 33))
PEER = Peer(role="agent", info={"node": "n0"})

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
messages = st.builds(
    lambda rest, kind: {**rest, "kind": kind}, st.dictionaries(st.text(max_size=8), json_values, max_size=4), st.text(max_size=10)
)  # fmt: skip


def feed(session, data, cuts=()):
    """Feed `data`, cut at the given places; return all events."""
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [event for start, end in pairwise(edges) for event in session.receive(data[start:end])]


def open_pair(secret=SECRET, **options):
    """Return (server, client), both open."""
    server, client = ServerSession(secret, **options), ClientSession(secret, PEER)
    assert client.receive(server.output()) == []
    assert server.receive(client.output()) == [Opened(PEER)]
    assert client.receive(server.output()) == [Opened(PEER)]
    return server, client


@given(st.lists(messages, max_size=6), st.lists(st.integers(0, 10_000), max_size=12), st.booleans())
def test_any_split_of_the_stream_gives_the_same_messages_in_both_directions(sent, cuts, to_server):
    server, client = open_pair()
    source, sink = (client, server) if to_server else (server, client)
    stream = b"".join(source.seal(message) for message in sent)
    assert feed(sink, stream, cuts) == [Received(message) for message in sent]


@given(st.lists(st.integers(0, 10_000), max_size=8), st.lists(st.integers(0, 10_000), max_size=8))
def test_any_split_of_the_handshake_opens(server_cuts, client_cuts):
    server, client = ServerSession(SECRET), ClientSession(SECRET, PEER)
    assert feed(client, server.output(), client_cuts) == []
    assert feed(server, client.output(), server_cuts) == [Opened(PEER)]
    assert feed(client, server.output(), client_cuts) == [Opened(PEER)]


@given(st.lists(messages, min_size=1, max_size=4), st.data())
def test_a_changed_byte_ends_the_session_and_no_wrong_message_comes_out(sent, data):
    server, client = open_pair()
    stream = bytearray(b"".join(client.seal(message) for message in sent))
    stream[data.draw(st.integers(0, len(stream) - 1))] ^= data.draw(st.integers(1, 255))
    # What follows completes a frame whose length was made larger.
    events = feed(
        server, bytes(stream) + bytes(2 * MAX_MESSAGE), data.draw(st.lists(st.integers(0, len(stream))))
    )
    assert isinstance(events[-1], Refused)
    good = [event.message for event in events[:-1]]
    assert good == sent[: len(good)]
    assert len(good) < len(sent)
    assert server.receive(client.seal({"kind": "after"})) == []


@given(st.sampled_from(["challenge", "hello", "welcome"]), st.data())
def test_a_changed_byte_of_the_handshake_never_opens_the_changed_side(which, data):
    server, client = ServerSession(SECRET), ClientSession(SECRET, PEER)

    def changed(name, sent):
        if name == which:
            sent = bytearray(sent)
            sent[data.draw(st.integers(0, len(sent) - 1))] ^= data.draw(st.integers(1, 255))
        return bytes(sent)

    events = client.receive(changed("challenge", server.output()))
    events = server.receive(changed("hello", client.output()) + bytes(5000) * (which == "hello"))
    if which != "welcome":
        assert not any(isinstance(event, Opened) for event in events)
        assert not server.is_open
    events = client.receive(changed("welcome", server.output()) + bytes(100))
    assert not any(isinstance(event, Opened) for event in events)
    assert not client.is_open


@given(st.permutations(range(5)), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 5))
def test_frames_repeated_reordered_or_left_out_end_the_session(order, repeats, keep):
    server, client = open_pair()
    frames = [client.seal({"kind": "n", "n": number}) for number in range(5)]
    played = [*order[:keep], *repeats]
    events = [event for number in played for event in server.receive(frames[number])]
    inorder = 0
    while inorder < len(played) and played[inorder] == inorder:
        inorder += 1
    expected = [Received({"kind": "n", "n": number}) for number in range(inorder)]
    if inorder < len(played):
        expected.append(Refused("replayed"))
    assert events == expected


def test_a_recorded_client_cannot_be_replayed_to_another_session():
    first = ServerSession(SECRET)
    client = ClientSession(SECRET, PEER)
    client.receive(first.output())
    recorded = client.output()
    assert first.receive(recorded) == [Opened(PEER)]
    second = ServerSession(SECRET)
    second.output()
    assert second.receive(recorded) == [Refused("unauthentic")]
    assert second.output() == b""


def test_messages_of_one_session_or_direction_are_refused_in_another():
    server, client = open_pair()
    other_server, _ = open_pair()
    frame = client.seal({"kind": "x"})
    assert other_server.receive(frame) == [Refused("tampered")]
    assert client.receive(frame) == [Refused("tampered")]
    assert server.receive(frame) == [Received({"kind": "x"})]


def test_a_server_cannot_send_back_the_clients_proof():
    server, client = ServerSession(SECRET), ClientSession(SECRET, PEER)
    client.receive(server.output())
    hello = client.output()
    verdict = bytes([0, 0, 1])
    assert client.receive((35).to_bytes(4, "big") + verdict + hello[-32:]) == [Refused("unauthentic")]


def test_who_does_not_know_the_secret_gets_nothing_and_is_told_nothing():
    server, client = ServerSession(SECRET), ClientSession(OTHER, PEER)
    client.receive(server.output())
    assert server.receive(client.output()) == [Refused("unauthentic")]
    assert server.output() == b""
    assert server.refused == "unauthentic"


def test_a_server_without_the_secret_is_refused_by_the_client():
    server, client = ServerSession(SECRET), ClientSession(SECRET, PEER)
    client.receive(server.output())
    client.output()
    imposter, helper = ServerSession(OTHER), ClientSession(OTHER, PEER)
    helper.receive(imposter.output())
    imposter.receive(helper.output())
    assert client.receive(imposter.output()) == [Refused("unauthentic")]


def test_another_version_is_named_to_both_only_when_the_secret_is_right():
    server, client = ServerSession(SECRET), ClientSession(SECRET, PEER, version=7)
    client.receive(server.output())
    assert server.receive(client.output()) == [Refused("version")]
    assert client.receive(server.output()) == [Refused("version")]
    server, client = ServerSession(SECRET), ClientSession(OTHER, PEER, version=7)
    client.receive(server.output())
    assert server.receive(client.output()) == [Refused("unauthentic")]


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("TLS hello", bytes.fromhex("16030100c8010000c40303") + bytes(189), "oversized"),
        ("HTTP", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "oversized"),
        ("a length that is just too much", (4097).to_bytes(4, "big"), "oversized"),
        ("nothing in a frame", bytes(4), "malformed"),
        ("a frame of zeros", (200).to_bytes(4, "big") + bytes(200), "malformed"),
        ("our first word, then zeros", (200).to_bytes(4, "big") + b"kfpelast" + bytes(192), "unauthentic"),
        ("our first word alone", (8).to_bytes(4, "big") + b"kfpelast", "malformed"),
    ],
)
def test_what_is_no_hello_is_refused_without_an_answer(name, data, reason):
    server = ServerSession(SECRET)
    server.output()
    assert server.receive(data) == [Refused(reason)]
    assert server.output() == b""
    assert server.receive(data) == []


@settings(max_examples=200)
@given(st.binary(max_size=6000), st.lists(st.integers(0, 6000), max_size=4))
def test_random_bytes_never_open(data, cuts):
    server, client = ServerSession(SECRET), ClientSession(SECRET, PEER)
    assert not any(not isinstance(event, Refused) for event in feed(server, data, cuts))
    assert not any(not isinstance(event, Refused) for event in feed(client, data, cuts))


def test_a_reader_holds_no_more_than_one_frame():
    reader = FrameReader(100)
    reader.feed((100).to_bytes(4, "big") + bytes(99))
    assert reader.next() is None
    reader.feed(b"\1" + (101).to_bytes(4, "big"))
    assert reader.next() == bytes(99) + b"\1"
    with pytest.raises(ProtocolError, match="oversized"):
        reader.next()


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b'"kind"', b"{}", b'{"kind":1}', b'{"kind":null}', b'{"kind":"x"', b'{"kind":"x"} x', b'{"kind":"x","a":NaN}',
        b'{"kind":"x","a":-Infinity}', b"\xff\xfe", '{"kind":"ü"}'.encode(), b'{"kind":"x","a":' + b"[" * 50_000, b'{"kind":"x","a":' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused(body):
    with pytest.raises(ProtocolError, match="malformed"):
        decode_message(body)


def test_the_longest_message_passes_and_one_byte_more_does_not():
    longest = {"kind": "x", "a": ""}
    longest["a"] = "y" * (MAX_MESSAGE - len(encode_message(longest)))
    server, client = open_pair()
    assert server.receive(client.seal(longest)) == [Received(longest)]
    longest["a"] += "y"
    with pytest.raises(InputError, match=r"message 'x': 65,537 bytes are more than the 65,536 allowed"):
        client.seal(longest)
    # What could not be sealed used no number.
    assert server.receive(client.seal({"kind": "z"})) == [Received({"kind": "z"})]
    with pytest.raises(ProtocolError, match="oversized"):
        decode_message(json.dumps(longest).encode())


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({}, "kind None is not a string"),
        ({"kind": 3}, "kind 3 is not a string"),
        ({"kind": "x", "a": float("nan")}, "send only what JSON has"),
        ({"kind": "x", "a": {1, 2}}, "send only what JSON has"),
    ],
)
def test_what_cannot_be_sent_is_named(message, said):
    with pytest.raises(InputError, match=said):
        encode_message(message)


def test_a_secret_or_a_peer_that_cannot_be_is_named():
    with pytest.raises(InputError, match="5 bytes instead of 32"):
        ServerSession(b"short")
    with pytest.raises(InputError, match=r"info: 5,0.. bytes are more than"):
        ClientSession(SECRET, Peer(role="x", info={"a": "y" * 5000}))
    with pytest.raises(InputError, match="give only what JSON has"):
        ClientSession(SECRET, Peer(role="x", info={"a": object()}))


def test_nonces_differ():
    assert ServerSession(os.urandom(32)).output() != ServerSession(os.urandom(32)).output()
