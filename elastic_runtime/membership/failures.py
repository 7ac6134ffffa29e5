"""What a failure is, which one was the cause of the others, and what it costs: pure, the clock is passed in."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_runtime.wording import killed_by

__all__ = ["Budget", "Failure", "Losses", "Verdict", "early_exit", "root_cause"]

_LARGEST_DELAY = 30.0
_CONSEQUENCE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|recv(alue)? failed|timed? ?out|socket|gloo|nccl|"
    r"DistBackendError|DistNetworkError|DistStoreError",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A worker that ended without success."""

    node: str
    rank: int
    code: int
    """Exit code, or minus the number of the signal that ended it."""
    message: str = ""
    """Last line of its traceback; empty if it left none."""
    step: int = 0
    """Steps that were finished when it ended."""
    uptime: float = 0.0
    """Seconds from its start to its end."""
    contributed: bool = False
    """Whether a step was finished in its round."""

    @property
    def is_consequence(self) -> bool:
        """Whether it is what a worker shows when a peer or the store has gone: a broken connection, or an abort."""
        return self.code == -signal.SIGABRT or (
            self.code >= 0 and _CONSEQUENCE.search(self.message) is not None
        )

    @property
    def cause(self) -> str:
        """What happened, in a few words."""
        return self.message or (killed_by(-self.code) if self.code < 0 else f"exit code {self.code}")


def root_cause(failures: list[Failure]) -> Failure:
    """Return the failure that the others followed from: a signal first, then an error of the worker's own.

    `failures` is in the order in which they were seen. A broken connection is what a worker reports when its
    peer has gone, so it counts only when nothing else is there.
    """
    own = [failure for failure in failures if not failure.is_consequence]
    signals = [failure for failure in own if failure.code < 0]
    return (signals or own or failures)[0]


@dataclass(frozen=True)
class Verdict:
    """What follows from a charged failure."""

    fatal: str = ""
    """Why the job cannot go on; empty if it can."""
    delay: float = 0.0
    """Seconds to wait before the next try, because the same cause repeated without progress."""


@dataclass
class Budget:
    """The job's restarts: one for all nodes, so that no node starts counting anew."""

    maximum: int
    used: int = 0
    step: int = 0
    """Highest finished step."""
    _last: Failure | None = None
    _repeats: int = 0
    _step_at_failure: int = -1

    def charge(self, failure: Failure, *, places_known: bool) -> Verdict:
        """Charge one failure and return what follows.

        `places_known` says whether the script reports its steps: one that does not is taken to fail at the same
        place if it ran for about as long both times.
        """
        last, self._last = self._last, failure
        if _is_users_bug(last, failure, places_known=places_known):
            return Verdict(
                f"rank {failure.rank} failed twice at step {failure.step} with the same error: {failure.cause}"
            )
        self.used += 1
        if self.used > self.maximum:
            return Verdict(
                f"rank {failure.rank}: {failure.cause}; "
                f"{self.used} failures are more than the {self.maximum} restarts allowed"
            )
        advanced = self.step > self._step_at_failure
        self._step_at_failure = self.step
        same = last is not None and (last.code, last.message) == (failure.code, failure.message)
        self._repeats = self._repeats + 1 if same and not advanced else 0
        return Verdict(delay=min(2.0 ** (self._repeats - 1), _LARGEST_DELAY) if self._repeats else 0.0)

    def copy(self) -> dict[str, Any]:
        """Return what a later coordinator needs, as JSON."""
        last = None if self._last is None else dict(vars(self._last))
        return {
            "used": self.used,
            "step": self.step,
            "last": last,
            "repeats": self._repeats,
            "step_at_failure": self._step_at_failure,
        }

    def resume(self, copy: dict[str, Any]) -> None:
        """Go on from the copy of an earlier coordinator; the copy that is further on wins."""
        if copy["used"] < self.used or (copy["used"] == self.used and self._last is not None):
            self.step = max(self.step, copy["step"])
            return
        self.used, self.step = copy["used"], max(self.step, copy["step"])
        self._last = None if copy["last"] is None else Failure(**copy["last"])
        self._repeats, self._step_at_failure = copy["repeats"], copy["step_at_failure"]


def _is_users_bug(last: Failure | None, now: Failure, *, places_known: bool) -> bool:
    """The same exception at the same step twice cannot be bad luck."""
    if last is None or not now.message or now.code < 0 or now.is_consequence:
        return False
    if not places_known and abs(last.uptime - now.uptime) > max(5.0, 0.25 * now.uptime):
        return False
    return (last.code, last.message, last.step) == (now.code, now.message, now.step)


@dataclass
class Losses:
    """Nodes that were lost again and again: each waits longer, then is left out for a time that grows."""

    allowed: int
    """Losses in a row after which a node is left out."""
    cool_down: float = 60.0
    """Seconds for which it is left out the first time; twice as long each further time."""
    _in_a_row: dict[str, int] = field(default_factory=dict)
    _exclusions: dict[str, int] = field(default_factory=dict)
    _until: dict[str, float] = field(default_factory=dict)
    _excluded: set[str] = field(default_factory=set)

    def lost(self, node: str, now: float) -> bool:
        """Note a loss; return whether the node is left out from now on."""
        count = self._in_a_row[node] = self._in_a_row.get(node, 0) + 1
        if count > self.allowed:
            self.exclude(node, now)
            return True
        wait = 0.0 if count == 1 else min(2.0 ** (count - 2), _LARGEST_DELAY)
        self._until[node] = max(self._until.get(node, now), now + wait)
        return False

    def exclude(self, node: str, now: float) -> None:
        """Leave the node out: twice as long each further time."""
        times = self._exclusions[node] = self._exclusions.get(node, 0) + 1
        self._until[node] = now + self.cool_down * 2.0 ** (times - 1)
        self._excluded.add(node)
        self._in_a_row[node] = 0

    def progressed(self) -> None:
        """A step was finished: losses before it are forgotten, exclusions stay."""
        self._in_a_row.clear()

    def usable(self, node: str, now: float) -> bool:
        """Return whether the node may be (re)started now."""
        if now < self._until.get(node, now):
            return False
        self._until.pop(node, None)
        self._excluded.discard(node)
        return True

    def is_excluded(self, node: str) -> bool:
        """Return whether the node is left out for a time."""
        return node in self._excluded

    def until(self, node: str) -> float:
        """Return when the node may be used again."""
        return self._until.get(node, 0.0)

    def copy(self, now: float) -> dict[str, Any]:
        """Return what a later coordinator needs, as JSON; times as seconds from `now`, for clocks differ."""
        return {
            "excluded": {node: max(0.0, self._until.get(node, now) - now) for node in sorted(self._excluded)},
            "exclusions": dict(self._exclusions),
        }

    def resume(self, copy: dict[str, Any], now: float) -> None:
        """Take over the exclusions of an earlier coordinator."""
        for node, seconds in copy["excluded"].items():
            self._excluded.add(node)
            self._until[node] = max(self._until.get(node, 0.0), now + seconds)
        for node, times in copy["exclusions"].items():
            self._exclusions[node] = max(times, self._exclusions.get(node, 0))


def early_exit(failure: Failure, rank: int) -> Failure:
    """Return the failure as what it is when `rank` had ended with exit code 0 while the others went on."""
    return replace(failure, rank=rank, code=0, message="ended with exit code 0 while the others went on")
