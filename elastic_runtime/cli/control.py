"""Talking with the coordinator of a running job on behalf of a command."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from elastic_runtime.errors import ElasticError, InputError
from elastic_runtime.jobs.account import Account, look
from elastic_runtime.jobs.lookup import FoundJob

__all__ = ["JOB_HELP", "PATIENCE", "ask", "over"]

JOB_HELP = "a job's name, torchx handle or folder"
PATIENCE = 10.0
"""Seconds for an answer: a coordinator that hangs is replaced after 5, and its successor hears the agents first."""
_PAUSE = 0.05


def ask(job: FoundJob, message: Mapping[str, Any], *, patience: float = PATIENCE) -> dict[str, Any] | None:
    """Send `message` to the coordinator of `job` and return the answer; None if none comes, or the job ends.

    A coordinator that dies meanwhile is replaced by another one on the same port, and asked again, so `message` must
    be one that may be told twice.
    """
    from elastic_runtime.membership.connection import request
    from elastic_runtime.membership.secret import read_secret

    deadline = time.monotonic() + patience
    answer: dict[str, Any] | None = None
    while (left := deadline - time.monotonic()) > 0:
        try:
            description = job.folder.description() or {}
            host, port = description["coordinator"]
            secret = read_secret(job.folder.path / "secret")
            answer = request((host, int(port)), secret, message, timeout=left)
            if not answer.get("taking_over"):
                return answer
        except (ElasticError, OSError, KeyError, TypeError, ValueError):
            # Being replaced, or not there yet, or the job is ending.
            answer = None
        if not look(job).live:
            return None
        time.sleep(min(_PAUSE, max(0.0, deadline - time.monotonic())))
    return answer


def over(account: Account) -> InputError:
    """Return the error for a command that needs a running job."""
    how = account.state if account.record is not None else f"{account.state}: {account.reason}"
    return InputError(f"job {account.job.name!r} is over ({how}): start it again first (kfp-elastic run)")
