"""Frames and messages on the wire, without I/O.

A frame is a length (4 bytes, big-endian) and as many bytes. A message is a JSON object with a string under `kind`.
Both are bounded before anything is stored: a length above the limit is refused when its four bytes are there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from elastic_runtime.errors import InputError

__all__ = [
    "MAX_MESSAGE",
    "PROTOCOL_VERSION",
    "FrameReader",
    "ProtocolError",
    "decode_message",
    "encode_message",
    "frame",
]

PROTOCOL_VERSION = 1
MAX_MESSAGE = 64 * 1024
"""Bytes of the longest message, as JSON."""

_LENGTH = 4


class ProtocolError(Exception):
    """What came does not follow the protocol; `reason` is a short word to count it by. Never leaves this package."""

    def __init__(self, reason: str) -> None:
        """Note the reason."""
        super().__init__(reason)
        self.reason = reason


def frame(body: bytes) -> bytes:
    """Return `body` as a frame."""
    return len(body).to_bytes(_LENGTH, "big") + body


class FrameReader:
    """Cuts a stream of bytes into frames; holds at most one unfinished frame and what was fed last."""

    def __init__(self, limit: int) -> None:
        """Refuse frames of more than `limit` bytes (it may be changed between frames)."""
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Take bytes in. Take the frames out with `next` before more is fed."""
        self._buffer += data

    def next(self) -> bytes | None:
        """Return the next whole frame, or None. Raises `ProtocolError` for a frame that is empty or too long."""
        buffer = self._buffer
        if len(buffer) < _LENGTH:
            return None
        length = int.from_bytes(buffer[:_LENGTH], "big")
        if length > self.limit:
            raise ProtocolError("oversized")
        if length == 0:
            raise ProtocolError("malformed")
        end = _LENGTH + length
        if len(buffer) < end:
            return None
        body = bytes(memoryview(buffer)[_LENGTH:end])
        del buffer[:end]
        return body

    def clear(self) -> None:
        """Forget what is stored."""
        self._buffer.clear()


def _no_constant(text: str) -> Any:
    raise ValueError(text)


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_decode = json.JSONDecoder(parse_constant=_no_constant).decode


def encode_message(message: Mapping[str, Any]) -> bytes:
    """Return a message as JSON. Raises `InputError` if it has no `kind`, is no JSON, or is too long."""
    kind = message.get("kind")
    if not isinstance(kind, str):
        raise InputError(f"message: kind {kind!r} is not a string: name the kind of the message")
    try:
        body = _encode(message).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"message {kind!r}: {error}: send only what JSON has") from error
    if len(body) > MAX_MESSAGE:
        raise InputError(
            f"message {kind!r}: {len(body):,} bytes are more than the {MAX_MESSAGE:,} allowed: send it in parts"
        )
    return body


def decode_message(body: bytes) -> dict[str, Any]:
    """Return the message in `body`. Raises `ProtocolError` if it is none."""
    if len(body) > MAX_MESSAGE:
        raise ProtocolError("oversized")
    try:
        message = _decode(body.decode("ascii"))
    except (ValueError, RecursionError):
        raise ProtocolError("malformed") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ProtocolError("malformed")
    return message
