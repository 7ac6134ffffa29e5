"""Progress of a worker: one JSON line a step, which the supervisor and the report read."""

from __future__ import annotations

import json
import math
import os
import time
from functools import cache

from elastic_runtime.testing import faults
from elastic_runtime.worker.context import Context, context

__all__ = ["log"]

_OWN = frozenset(["time", "round", "world_size"])


@cache
def _place() -> tuple[Context, int | None]:
    place = context()
    if place.rank != 0 or place.job_dir is None:
        return place, None
    # Appending a short line is atomic, and the descriptor is closed with the process.
    path = place.job_dir / "metrics.jsonl"
    return place, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def log(*, step: int, **scalars: float) -> None:
    """Report that `step` optimizer steps are done, with figures such as `loss` and `samples` (seen so far).

    Call it on every rank once a step: only rank 0 writes, but injected faults act on any rank. In a plain run
    nothing is written. A value that is not finite is kept as text, for JSON has no number for it.

    Raises `ValueError` for a figure called time, round or world_size, which every line has already.
    """
    taken = _OWN.intersection(scalars)
    if taken:
        raise ValueError(f"worker.log: {min(taken)!r} is a name of its own: give your figure another one")
    place, descriptor = _place()
    if descriptor is not None:
        figures = {
            name: value if math.isfinite(value) else str(value)
            for name, value in ((name, float(value)) for name, value in scalars.items())
        }
        line = {
            "time": time.time(),
            "round": place.round,
            "world_size": place.world_size,
            "step": int(step),
            **figures,
        }
        os.write(descriptor, json.dumps(line).encode() + b"\n")
    faults.check(rank=place.rank, step=step)
