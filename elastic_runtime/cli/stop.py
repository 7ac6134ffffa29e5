"""`kfp-elastic stop`: end a running job, and return when nothing of it is left."""

from __future__ import annotations

import argparse
import sys

from elastic_runtime.cli.control import JOB_HELP
from elastic_runtime.errors import EXIT_OK, InputError

__all__ = ["StopCommand"]


class StopCommand:
    """Stops a job. One that is over already is as good as stopped: that is no error, so it may be told twice."""

    name = "stop"
    help = "stop a running job; returns when nothing of it is left"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("job", metavar="JOB", help=JOB_HELP)
        parser.add_argument("--grace", type=float, metavar="S",
                            help="seconds that workers get at most between SIGTERM and SIGKILL, from 1 "
                            "(default: the job's own)")  # fmt: skip
        parser.add_argument("--json", action="store_true", help="print one JSON document")

    def run(self, arguments: argparse.Namespace) -> int:
        """Stop the job: 0 when nothing of it is left, also if it was over before; 3 if something would not end."""
        from elastic_runtime.cli import print_json
        from elastic_runtime.jobs.account import look
        from elastic_runtime.jobs.ending import end
        from elastic_runtime.jobs.lookup import find_job

        grace: float | None = arguments.grace
        if grace is not None and not 0 <= grace <= 3600:
            raise InputError(f"--grace {grace}: takes seconds from 0 to 3600")
        job = find_job(arguments.job)
        stopped = end(job, grace=grace)
        account = look(job)
        if arguments.json:
            print_json(
                {"name": job.name, "state": account.state, "was_running": stopped, "reason": account.reason}
            )
        elif stopped:
            sys.stdout.write(f"job {job.name} {account.state}: nothing of it is left running\n")
        else:
            sys.stdout.write(f"job {job.name} was over already: {account.state}\n")
        return EXIT_OK
