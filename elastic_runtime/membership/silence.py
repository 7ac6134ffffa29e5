"""Who has said nothing for too long, and whether that is its own fault: pure, the clock is passed in.

A coordinator on a host of its own cannot tell a lost node from a cut cable of its own by looking at that node alone.
It asks the others: a node is lost when it said nothing for the heartbeat and somebody else was heard after that. When
nobody was heard, the cable that is cut may well be the coordinator's: it waits, and the workers train on.
"""

from __future__ import annotations

__all__ = ["Silence"]

_RETURN = 5.0
"""Seconds beyond the heartbeat that agents have to connect again after nobody was heard for a while."""


class Silence:
    """When each node was heard."""

    def __init__(self, heartbeat: float, *, apart: bool) -> None:
        """Take nodes that say nothing for `heartbeat` seconds for lost.

        `apart` nodes may be cut off from the coordinator by a network; others are on the same machine, and one that
        says nothing is lost also when none of them does.
        """
        self._heartbeat = heartbeat
        self._apart = apart
        self._heard: dict[str, float] = {}
        self._newest: float | None = None
        self._excused_until = float("-inf")

    def heard(self, node: str, now: float) -> None:
        """Note a word of `node`. It is asked several times a heartbeat, so half of one without a word is a gap."""
        if self._apart and self._newest is not None and now - self._newest > self._heartbeat / 2:
            # Nobody could reach this process: those that still have to come back get the time for it.
            self.excuse(now, _RETURN)
        self._heard[node] = now
        self._newest = now

    def forget(self, node: str) -> None:
        """Forget a node that is lost."""
        self._heard.pop(node, None)
        if not self._heard:
            self._newest = None

    def excuse(self, now: float, more: float = 0.0) -> None:
        """Hold no silence against anybody for the heartbeat and `more` seconds: it was this process's own fault."""
        self._excused_until = max(self._excused_until, now + self._heartbeat + more)

    def lost(self, now: float) -> list[str]:
        """Return the nodes that are to be taken for lost."""
        if now <= self._excused_until or self._newest is None:
            return []
        return [
            node for node, heard in self._heard.items()
            if now - heard > self._heartbeat and (not self._apart or self._newest > heard + self._heartbeat)
        ]  # fmt: skip

    def deaf(self, now: float) -> float:
        """Return for how many seconds nobody has been heard; 0 if that is nothing unusual, or nobody is there."""
        if not self._apart or self._newest is None or now - self._newest <= self._heartbeat:
            return 0.0
        return now - self._newest
