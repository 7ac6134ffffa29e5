"""Checks of what a person gives to start a server: its name, its port, and that kserve is there."""

from __future__ import annotations

import importlib.util
import re

from elastic_runtime.errors import InputError, MissingDependencyError

__all__ = ["check_name", "check_port", "require_kserve"]

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def check_name(name: str) -> str:
    """Return `name` if it may name a model and, on a cluster, its service. Raises `InputError` otherwise."""
    if not isinstance(name, str) or not _LABEL.fullmatch(name):
        raise InputError(
            f"name={name!r:.100} is not a DNS label: use 1 to 63 lower-case letters, digits and '-', with a "
            "letter or digit first and last"
        )
    return name


def check_port(port: int) -> int:
    """Return `port` if it is a TCP port, or 0 for a free one, or raise `InputError`."""
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise InputError(f"port={port!r} is not a port: give 1 to 65535, or 0 for a free one")
    return port


def require_kserve() -> None:
    """Raise `MissingDependencyError` if kserve is not installed; does not import it, which takes seconds."""
    if importlib.util.find_spec("kserve") is None:
        raise MissingDependencyError.of("kserve", "serve")
