"""`kfp-elastic scale`: change how many workers a running job should have."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from elastic_runtime.cli.control import JOB_HELP, PATIENCE, ask, over
from elastic_runtime.errors import EXIT_OK, EXIT_TRY_AGAIN, InputError, JobFailed, JobPreempted

__all__ = ["ScaleCommand"]

_POLL = 0.1


class ScaleCommand:
    """Sets the desired number of workers; the job goes there at a step boundary."""

    name = "scale"
    help = "change how many workers a running job should have"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("job", metavar="JOB", help=JOB_HELP)
        parser.add_argument(
            "workers", metavar="N", type=int, help="workers, as min and max of status count them"
        )
        parser.add_argument("--wait", type=float, default=0.0, metavar="S",
                            help="wait up to S seconds until N workers train (default 0)")  # fmt: skip
        parser.add_argument("--json", action="store_true", help="print one JSON document")

    def run(self, arguments: argparse.Namespace) -> int:
        """Scale: 0; with `--wait` 3 if the world has not that size in time; 2 for a wrong number or a job that is over.

        Raises `InputError`, and `JobPreempted` (exit code 3) if no coordinator answers.
        """
        from elastic_runtime.cli import print_json
        from elastic_runtime.jobs.lookup import find_job

        workers, wait = arguments.workers, arguments.wait
        if workers < 1:
            raise InputError(f"{workers} workers: a job has at least one: choose a number from 1")
        if not 0 <= wait <= 86400:
            raise InputError(f"--wait {wait}: takes seconds from 0 to 86400")
        job = find_job(arguments.job)
        status = _scale(job, workers)
        deadline = time.monotonic() + wait
        while not (reached := _has(status, workers)) and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(_POLL, left))
            status = _watch(job, workers, status)
        text = f"job {job.name}: {workers} workers desired, {status['world_size']} are there"
        if arguments.json:
            keys = ("name", "state", "desired", "world_size", "min", "max", "round", "term")
            print_json({**{key: status[key] for key in keys}, "reached": reached})
        else:
            sys.stdout.write(f"{text}\n")
        if wait and not reached:
            sys.stderr.write(f"{text} after {wait:g} s; the job goes on towards it\n")
            return EXIT_TRY_AGAIN
        return EXIT_OK


def _has(status: dict[str, Any], workers: int) -> bool:
    return bool(status["state"] == "running" and status["world_size"] == workers)


def _ask(job: Any, message: dict[str, Any]) -> dict[str, Any]:
    from elastic_runtime.jobs.account import look

    account = look(job)
    if account.record is not None or not account.live:
        raise over(account)
    answer = ask(job, message)
    if answer is not None:
        return answer
    account = look(job)
    if account.record is not None or not account.live:
        raise over(account)
    raise JobPreempted(
        f"job {job.name!r}: its coordinator has not answered for {PATIENCE:.0f} s: try again (see kfp-elastic status)"
    )


def _scale(job: Any, workers: int) -> dict[str, Any]:
    """Tell the coordinator and return the status after that."""
    # A coordinator that has just taken over would forget it again when the agents tell what they know.
    _ask(job, {"kind": "status"})
    answer = _ask(job, {"kind": "scale", "workers": workers})
    if answer["kind"] == "error":
        raise InputError(f"job {job.name!r}: {answer['text']}")
    return _ask(job, {"kind": "status"})


def _watch(job: Any, workers: int, before: dict[str, Any]) -> dict[str, Any]:
    """Return the status now. A coordinator that died before it could pass the size on is told again."""
    from elastic_runtime.jobs.account import look

    try:
        status = _ask(job, {"kind": "status"})
    except InputError:
        raise JobFailed(
            f"job {job.name!r} is over ({look(job).state}), before it had {workers} workers"
        ) from None
    if status["desired"] == workers:
        return status
    if status["term"] == before["term"]:
        raise InputError(
            f"job {job.name!r}: somebody else scaled it to {status['desired']} workers meanwhile"
        )
    return _scale(job, workers)
