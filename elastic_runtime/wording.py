"""Small pieces of sentences that several parts say."""

from __future__ import annotations

import signal

__all__ = ["counted", "killed_by"]


def counted(number: int, noun: str) -> str:
    """Return `number` and `noun`, in the plural where there is not one."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def killed_by(number: int) -> str:
    """Say which signal ended a process, by its name if it has one."""
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"killed by signal {number}"
