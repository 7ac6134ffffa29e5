"""The authenticated session, without I/O: bytes in, events and bytes out. One class for either side.

    server                                   client
    challenge: version, nonce        ──▶
                                     ◀──     hello: version, nonce, {role, info}, proof
    welcome: verdict, version, proof ──▶
    message, message …               ◀─▶     message, message …

Both proofs are HMAC-SHA256 with the job's secret over everything that was said before (so over both nonces, the role
and both versions), each with a label of its own, so that neither can be sent back as the other. The client proves
itself first: who does not know the secret gets a random number from the server and nothing else. Nothing of a peer
is parsed before its proof holds. The two directions have keys of their own, derived in the same way; a message frame
is a sequence number (8 bytes), the first 16 bytes of the HMAC over number and message, and the message. A frame that
is changed, repeated, left out, reordered or put in ends the session. Messages are authentic but not secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from elastic_runtime.errors import InputError
from elastic_runtime.membership.secret import SECRET_BYTES
from elastic_runtime.membership.wire import (
    MAX_MESSAGE,
    PROTOCOL_VERSION,
    FrameReader,
    ProtocolError,
    decode_message,
    encode_message,
    frame,
)

__all__ = ["ClientSession", "Event", "Opened", "Peer", "Received", "Refused", "ServerSession"]

_MAGIC = b"kfpelast"
_NONCE = 32
_PROOF = 32
_VERSION = 2
_NUMBER = 8
_MAC = 16
_CHALLENGE = len(_MAGIC) + _VERSION + _NONCE
_WELCOME = 1 + _VERSION + _PROOF
_MAX_HELLO = 4096
_OPEN, _OTHER_VERSION = 0, 1


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Who a client says it is; the secret vouches that it belongs to the job, not that the rest is true."""

    role: str
    """What it is: `agent`, `control`, `candidate` …"""
    info: Mapping[str, Any] = field(default_factory=dict)
    """What else it tells about itself: JSON, at most about 3 KiB."""

    def encoded(self) -> bytes:
        """Return it as JSON. Raises `InputError` if it is too long or no JSON."""
        try:
            body = json.dumps({"role": self.role, "info": dict(self.info)}, allow_nan=False).encode("ascii")
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"info {self.info!r}: {error}: give only what JSON has") from error
        limit = _MAX_HELLO - len(_MAGIC) - _VERSION - _NONCE - _PROOF
        if len(body) > limit:
            raise InputError(
                f"info: {len(body):,} bytes are more than the {limit:,} allowed: send it as a message"
            )
        return body

    @classmethod
    def decoded(cls, body: bytes) -> Peer:
        """Return the peer in `body`. Raises `ProtocolError` if it is none."""
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            raise ProtocolError("malformed") from None
        if not isinstance(document, dict):
            raise ProtocolError("malformed")
        role, info = document.get("role"), document.get("info")
        if not isinstance(role, str) or not isinstance(info, dict):
            raise ProtocolError("malformed")
        return cls(role=role, info=info)


class Opened(NamedTuple):
    """Both sides have proved that they know the secret."""

    peer: Peer
    """The client, on the server's side; the client itself on its own side."""


class Received(NamedTuple):
    """An authentic message."""

    message: dict[str, Any]


class Refused(NamedTuple):
    """The session is over, nothing follows; close the connection.

    `reason` is `malformed`, `oversized`, `unauthentic` (wrong secret, or a handshake that was replayed), `version`,
    `tampered` (a message that was changed) or `replayed` (a message repeated, reordered or left out).
    """

    reason: str


Event = Opened | Received | Refused


def _mac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def _proof(secret: bytes, label: bytes, *said: bytes) -> bytes:
    transcript = hashlib.sha256()
    for part in said:
        transcript.update(frame(part))
    return _mac(secret, label + b"\0" + transcript.digest())


class _Session:
    """What both sides share: messages in and out once the handshake is through."""

    def __init__(self, secret: bytes, handshake_limit: int) -> None:
        if len(secret) != SECRET_BYTES:
            raise InputError(
                f"secret: {len(secret)} bytes instead of {SECRET_BYTES}: read it with read_secret"
            )
        self._secret = secret
        self._reader = FrameReader(handshake_limit)
        self._output: list[bytes] = []
        self._key_in = self._key_out = b""
        self._next_in = self._next_out = 0
        self.is_open = False
        """Whether messages may be sent."""
        self.refused: str | None = None
        """Why the session is over; None while it is not."""

    def receive(self, data: bytes) -> list[Event]:
        """Take bytes in and return what they complete; `Refused` is the last event ever."""
        events: list[Event] = []
        if self.refused is not None:
            return events
        self._reader.feed(data)
        try:
            while (body := self._reader.next()) is not None:
                event = Received(self._open(body)) if self.is_open else self._shake(body)
                if event is not None:
                    events.append(event)
        except ProtocolError as error:
            self.is_open = False
            self.refused = error.reason
            self._reader.clear()
            events.append(Refused(error.reason))
        return events

    def output(self) -> bytes:
        """Return the bytes of the handshake that are to be sent now, once."""
        data = b"".join(self._output)
        self._output.clear()
        return data

    def seal(self, message: Mapping[str, Any]) -> bytes:
        """Return the frame of a message; send frames in the order in which they were sealed.

        Raises `InputError` for what is no message. Only while `is_open`.
        """
        assert self.is_open, "a message before the handshake, or after the end"
        numbered = self._next_out.to_bytes(_NUMBER, "big") + encode_message(message)
        self._next_out += 1
        mac = _mac(self._key_out, numbered)[:_MAC]
        return (len(numbered) + _MAC).to_bytes(4, "big") + mac + numbered

    def _open(self, body: bytes) -> dict[str, Any]:
        mac, numbered = body[:_MAC], body[_MAC:]
        if not hmac.compare_digest(_mac(self._key_in, numbered)[:_MAC], mac):
            raise ProtocolError("tampered")
        if int.from_bytes(numbered[:_NUMBER], "big") != self._next_in:
            raise ProtocolError("replayed")
        self._next_in += 1
        return decode_message(numbered[_NUMBER:])

    def _agree(self, ours: bytes, theirs: bytes, *said: bytes) -> None:
        self._key_out = _proof(self._secret, ours, *said)
        self._key_in = _proof(self._secret, theirs, *said)
        self._reader.limit = _MAC + _NUMBER + MAX_MESSAGE
        self.is_open = True

    def _shake(self, body: bytes) -> Opened | None:
        raise NotImplementedError


class ServerSession(_Session):
    """The server's side. `output` holds the challenge from the start."""

    def __init__(self, secret: bytes, *, nonce: bytes | None = None, version: int = PROTOCOL_VERSION) -> None:
        """Begin with a new nonce. `nonce` and `version` are for tests: a nonce used twice permits replay."""
        super().__init__(secret, _MAX_HELLO)
        self._version = version.to_bytes(_VERSION, "big")
        self._challenge = _MAGIC + self._version + (nonce or os.urandom(_NONCE))
        self._output.append(frame(self._challenge))

    def _shake(self, body: bytes) -> Opened:
        fixed = len(_MAGIC) + _VERSION + _NONCE
        if len(body) < fixed + _PROOF or not body.startswith(_MAGIC):
            raise ProtocolError("malformed")
        hello, proof = body[:-_PROOF], body[-_PROOF:]
        if not hmac.compare_digest(_proof(self._secret, b"client", self._challenge, hello), proof):
            raise ProtocolError("unauthentic")
        same = hello[len(_MAGIC) : len(_MAGIC) + _VERSION] == self._version
        verdict = bytes([_OPEN if same else _OTHER_VERSION]) + self._version
        said = (self._challenge, hello, verdict)
        if same:
            peer = Peer.decoded(hello[fixed:])
        self._output.append(frame(verdict + _proof(self._secret, b"server", *said)))
        if not same:
            raise ProtocolError("version")
        self._agree(b"to client", b"to server", *said)
        return Opened(peer)


class ClientSession(_Session):
    """The client's side: it answers the server's challenge."""

    def __init__(
        self, secret: bytes, peer: Peer, *, nonce: bytes | None = None, version: int = PROTOCOL_VERSION
    ) -> None:
        """Begin as `peer`. Raises `InputError` if it is too long. `nonce` and `version` are for tests."""
        super().__init__(secret, _CHALLENGE)
        self.peer = peer
        self._hello = (
            _MAGIC + version.to_bytes(_VERSION, "big") + (nonce or os.urandom(_NONCE)) + peer.encoded()
        )
        self._challenge: bytes | None = None

    @property
    def has_answered(self) -> bool:
        """Whether the challenge came and was answered: a server that then hangs up did not like the answer."""
        return self._challenge is not None

    def _shake(self, body: bytes) -> Opened | None:
        if self._challenge is None:
            if len(body) != _CHALLENGE or not body.startswith(_MAGIC):
                raise ProtocolError("malformed")
            self._challenge = body
            self._reader.limit = _WELCOME
            self._output.append(frame(self._hello + _proof(self._secret, b"client", body, self._hello)))
            return None
        verdict, proof = body[:-_PROOF], body[-_PROOF:]
        said = (self._challenge, self._hello, verdict)
        if len(body) != _WELCOME or not hmac.compare_digest(_proof(self._secret, b"server", *said), proof):
            raise ProtocolError("unauthentic")
        if verdict[0] != _OPEN:
            raise ProtocolError("version")
        self._agree(b"to server", b"to client", *said)
        return Opened(self.peer)
