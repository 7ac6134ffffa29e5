"""Progress of the job as the supervisor sees it: follows rank 0's metrics and accounts for recoveries."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_runtime.jobs.folder import is_report
from elastic_runtime.wording import counted

__all__ = ["Progress", "Recovery"]


@dataclass
class Recovery:
    """From a failure to the next finished step."""

    cause: str
    since: float
    """When the failure was noticed (seconds since the epoch)."""
    last_step: int
    """Steps that were finished then."""
    seconds: float | None = None
    """How long it took; None until a step was finished again."""
    steps_lost: int | None = None
    """Finished steps that had to be done again."""
    round: int = -1
    """Round that failed: only a step of a later one ends the recovery."""
    consequence: bool = False
    """Whether `cause` is only what the peers of a lost worker or node report."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as the job record has it."""
        return {"cause": self.cause, "seconds": self.seconds, "steps_lost": self.steps_lost}


@dataclass
class Progress:
    """Reads `metrics.jsonl` as it grows."""

    path: Path
    step: int = 0
    """Highest finished step."""
    line: dict[str, Any] = field(default_factory=dict)
    """The newest report."""
    recoveries: list[Recovery] = field(default_factory=list)
    _offset: int = 0
    _rest: bytes = b""
    _shown: float = 0.0
    _shown_line: dict[str, Any] = field(default_factory=dict)

    @property
    def round(self) -> int:
        """Round of the newest report; -1 if there is none."""
        return int(self.line.get("round", -1))

    @property
    def now(self) -> int:
        """Finished steps of the newest report: less than `step` while steps are done again that were lost."""
        return int(self.line.get("step", 0))

    def failed(self, cause: str, now: float, *, round_: int = -1, consequence: bool = False) -> None:
        """A failure of `round_` was noticed at `now` (epoch seconds); one that is still recovered from goes on.

        What turns out to be only the `consequence` of another failure gives way to that one as the cause.
        """
        open_one = self.recoveries[-1] if self.recoveries and self.recoveries[-1].seconds is None else None
        if open_one is None:
            self.recoveries.append(Recovery(cause, now, self.now, round=round_, consequence=consequence))
            return
        open_one.round = max(open_one.round, round_)
        if open_one.consequence and not consequence:
            open_one.cause, open_one.consequence = cause, False

    def read(self) -> bool:
        """Take in what was reported since; return whether a step was finished."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return False
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        seen = False
        for raw in lines:
            with suppress(ValueError):
                line = json.loads(raw)
                if is_report(line):
                    self._take(line)
                    seen = True
        return seen

    def _take(self, line: dict[str, Any]) -> None:
        step, when, round_ = line["step"], line["time"], line["round"]
        open_recovery = (
            self.recoveries[-1] if self.recoveries and self.recoveries[-1].seconds is None else None
        )
        if open_recovery is not None and round_ > open_recovery.round and when >= open_recovery.since:
            open_recovery.seconds = when - open_recovery.since
            open_recovery.steps_lost = max(0, open_recovery.last_step - (step - 1))
        elif open_recovery is not None:
            # Finished by the round that failed, before its end was seen or while it was stopped.
            open_recovery.last_step = max(open_recovery.last_step, step)
        self.step = max(self.step, step)
        self.line = line

    def show(self, restarts: int, *, round_: int, every: float = 2.0) -> str | None:
        """Return a progress line of the current `round_` if one is due: step, loss, rate, workers, restarts."""
        now = time.monotonic()
        if (
            not self.line
            or self.round != round_
            or now - self._shown < every
            or self.line is self._shown_line
        ):
            return None
        before, self._shown, self._shown_line = self._shown_line, now, self.line
        parts = [f"step {self.line['step']}"]
        loss = self.line.get("loss")
        if isinstance(loss, int | float):
            parts.append(f"loss {loss:.4g}")
        rate = _rate(before, self.line)
        if rate is not None:
            parts.append(f"{rate:,.0f} samples/s")
        parts += [counted(self.line["world_size"], "worker"), counted(restarts, "restart")]
        return "[progress] " + ", ".join(parts)


def _rate(before: dict[str, Any], now: dict[str, Any]) -> float | None:
    if before.get("round") != now.get("round") or "samples" not in before or "samples" not in now:
        return None
    elapsed = now["time"] - before["time"]
    return (now["samples"] - before["samples"]) / elapsed if elapsed > 0 else None
