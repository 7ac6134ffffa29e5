"""Deterministic faults: a real signal at a chosen rank and step, once a job.

    with faults.plan(faults.kill(rank=1, step=5)) as environment:
        subprocess.run([…], env=environment)

or `ELASTIC_FAULTS="kill rank=1 step=5; stop rank=0 step=9" kfp-elastic run …`. A fault acts inside the worker, when
it reports that step, and leaves a mark in the job's folder so that it does not act again after the restart.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from elastic_runtime.errors import InputError

__all__ = ["Fault", "VARIABLE", "check", "exit_with", "kill", "parse", "plan", "stop"]

VARIABLE = "ELASTIC_FAULTS"
_FORM = re.compile(
    r"(?P<action>kill|stop|exit)\s+rank=(?P<rank>\d+)\s+step=(?P<step>\d+)(?:\s+code=(?P<code>\d+))?"
)


@dataclass(frozen=True)
class Fault:
    """One fault: what happens to which rank after which step."""

    action: str
    rank: int
    step: int
    code: int = 1

    def __str__(self) -> str:
        text = f"{self.action} rank={self.rank} step={self.step}"
        return f"{text} code={self.code}" if self.action == "exit" else text

    def strike(self) -> None:
        """Do it, to the calling process."""
        if self.action == "exit":
            os._exit(self.code)
        os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)


def kill(*, rank: int, step: int) -> Fault:
    """Return the fault that sends SIGKILL to `rank` when it reports `step`."""
    return Fault("kill", rank, step)


def stop(*, rank: int, step: int) -> Fault:
    """Return the fault that sends SIGSTOP to `rank` when it reports `step`: a hang."""
    return Fault("stop", rank, step)


def exit_with(code: int, *, rank: int, step: int) -> Fault:
    """Return the fault that ends `rank` with `code` when it reports `step`."""
    return Fault("exit", rank, step, code)


def parse(text: str) -> list[Fault]:
    """Parse the form of `ELASTIC_FAULTS`. Raises `InputError` that names the part that is wrong."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        match = _FORM.fullmatch(part)
        if match is None:
            raise InputError(f"{VARIABLE}: {part!r} is not 'kill|stop|exit rank=R step=S [code=C]'")
        found.append(Fault(match["action"], int(match["rank"]), int(match["step"]), int(match["code"] or 1)))
    return found


@contextmanager
def plan(*faults: Fault, base: dict[str, str] | None = None) -> Iterator[dict[str, str]]:
    """Yield an environment (a copy of `base` or of this process's) in which `faults` will happen."""
    yield {**(os.environ if base is None else base), VARIABLE: "; ".join(map(str, faults))}


@cache
def _planned() -> Sequence[Fault]:
    return tuple(parse(os.environ.get(VARIABLE, "")))


def check(*, rank: int, step: int) -> None:
    """Let the fault planned for this rank and step happen, unless it already did in this job."""
    for fault in _planned():
        if fault.rank == rank and fault.step == step and _first_time(fault):
            fault.strike()


def _first_time(fault: Fault) -> bool:
    folder = os.environ.get("ELASTIC_JOB_DIR")
    if folder is None:
        return True
    mark = Path(folder) / f"fault-{fault.action}-{fault.rank}-{fault.step}"
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    return True
