"""Names that every scheduler accepts: DNS labels of at most 63 characters, stable for the same input."""

from __future__ import annotations

import hashlib
import re
import secrets
import unicodedata

__all__ = ["MAX_LENGTH", "is_valid", "unique_name", "valid_name"]

MAX_LENGTH = 63
"""Longest DNS label (RFC 1123), and so the longest Kubernetes object name that can be a host name."""

_VALID = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_ID_LENGTH = 6


def is_valid(name: str) -> bool:
    """Return whether `name` is a DNS label that starts with a letter."""
    return _VALID.fullmatch(name) is not None


def valid_name(text: str, *, limit: int = MAX_LENGTH) -> str:
    """Return a valid name for any `text`: itself if valid, else its letters with a hash that keeps it unique.

    The same text gives the same name on every machine, and two texts that look alike after cleaning
    (`my_job`, `my-job`) give different ones.
    """
    if is_valid(text) and len(text) <= limit:
        return text
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    slug = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_ID_LENGTH]
    if not slug or not slug[0].isalpha():
        slug = f"j-{slug}".strip("-")
    return f"{slug[: limit - _ID_LENGTH - 1].rstrip('-')}-{digest}"


def unique_name(text: str) -> str:
    """Return a valid name made of `text` and a short random id."""
    stem = valid_name(text, limit=MAX_LENGTH - _ID_LENGTH - 1)
    return f"{stem}-{secrets.token_hex(_ID_LENGTH // 2)}"
