"""Progress of a worker: one JSON line a step, which the supervisor and the report read."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from functools import cache

from elastic_runtime.testing import faults
from elastic_runtime.worker.context import Context, context

__all__ = ["log", "report"]

_OWN = frozenset(["time", "round", "world_size"])


@cache
def _place() -> Context:
    return context()


@cache
def _metrics() -> int | None:
    job_dir = context().job_dir
    if job_dir is None:
        return None
    # Appending a short line is atomic, and the descriptor is closed with the process.
    return os.open(job_dir / "metrics.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def log(*, step: int, **scalars: float) -> None:
    """Report that `step` optimizer steps are done, with figures such as `loss` and `samples` (seen so far).

    Call it on every rank once a step: only rank 0 writes, but injected faults act on any rank. In a plain run
    nothing is written. A value that is not finite is kept as text, for JSON has no number for it.

    Raises `ValueError` for a figure called time, round or world_size, which every line has already.
    """
    taken = _OWN.intersection(scalars)
    if taken:
        raise ValueError(f"worker.log: {min(taken)!r} is a name of its own: give your figure another one")
    place = _place()
    report(rank=place.rank, world_size=place.world_size, round_=place.round, step=step, figures=scalars)


def report(
    *, rank: int, world_size: int, round_: int, step: int, figures: Mapping[str, float], fault: bool = True
) -> None:
    """Do what `log` does, for a worker whose place changes from round to round.

    With `fault` false, planned faults do not act: for a line beside the one that reports the step.
    """
    descriptor = _metrics() if rank == 0 else None
    if descriptor is not None:
        values = {
            name: value if math.isfinite(value) else str(value)
            for name, value in ((name, float(value)) for name, value in figures.items())
        }
        line = {"time": time.time(), "round": round_, "world_size": world_size, "step": int(step), **values}
        os.write(descriptor, json.dumps(line).encode() + b"\n")
    if fault:
        faults.check(rank=rank, step=step)
