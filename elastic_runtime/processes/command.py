"""How one of our modules is run as a process of its own."""

from __future__ import annotations

import sys

__all__ = ["internal_command"]


def internal_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs one of our modules.

    `-P` keeps the current folder out of the import path: a user's own `elastic_runtime/` there must not be taken
    for ours.
    """
    return [sys.executable, "-P", "-m", module, *arguments]
