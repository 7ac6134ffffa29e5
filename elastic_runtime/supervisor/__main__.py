"""The supervisor process of a job on one machine: what the AppDef's only replica runs, under the guard."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic_runtime.errors import ElasticError, InputError
from elastic_runtime.jobs.folder import JobFolder, default_folder
from elastic_runtime.jobs.lookup import claim
from elastic_runtime.jobs.nodes import parse_nodes, parse_workers
from elastic_runtime.jobs.spec import JobSpec, preload_of, program_of
from elastic_runtime.names import is_valid
from elastic_runtime.supervisor.job import LocalJob

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job that the command line describes; return its exit code."""
    parser = argparse.ArgumentParser(prog="supervisor", description="Run an elastic job on this machine.")
    parser.add_argument("--name", required=True)
    parser.add_argument(
        "--app-id", default="", help="torchx's id of this run, kept in job.json and record.json"
    )
    parser.add_argument("--nodes", required=True)
    parser.add_argument("--nproc-per-node", default="1")
    parser.add_argument("--max-restarts", type=int, default=10)
    parser.add_argument("--grace", type=float, default=3.0)
    parser.add_argument("--heartbeat", type=float, default=5.0)
    parser.add_argument("--wait-limit", type=float, default=600.0)
    parser.add_argument("--state-dir")
    parser.add_argument("--output-dir")
    parser.add_argument("--preload", default="")
    parser.add_argument("--log-limit-mb", type=int, default=1024)
    parser.add_argument("--script")
    parser.add_argument("--module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args(argv)
    try:
        return _run(given)
    except (ElasticError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code if isinstance(error, ElasticError) else 1


def _run(given: argparse.Namespace) -> int:
    if not is_valid(given.name):
        raise InputError(
            f"--name {given.name!r}: lower-case letters, digits and '-', at most 63, a letter first"
        )
    if given.log_limit_mb < 1:
        raise InputError(f"--log-limit-mb {given.log_limit_mb}: takes a number of megabytes from 1")
    arguments = given.arguments[1:] if given.arguments[:1] == ["--"] else given.arguments
    folder = JobFolder(Path(given.state_dir).absolute() if given.state_dir else default_folder(given.name))
    spec = JobSpec(
        program=program_of(given.script, given.module),
        arguments=arguments,
        nodes=parse_nodes(given.nodes, parse_workers(given.nproc_per_node)),
        name=given.name,
        max_restarts=given.max_restarts,
        grace=given.grace,
        heartbeat=given.heartbeat,
        wait_limit=given.wait_limit,
        state_dir=str(folder.path),
        output_dir=str(Path(given.output_dir).absolute()) if given.output_dir else None,
        preload=preload_of(given.preload),
    )
    folder.check_usable()
    folder.create()
    held = [folder.lock(given.name)]
    try:
        name = claim(given.name, folder.path)
        held += [name] if name is not None else []
        job = LocalJob(spec, folder, name=given.name, app_id=given.app_id, log_limit=given.log_limit_mb << 20)
        return job.run()
    finally:
        # The folder last: who gets it next must find the name free as well.
        for descriptor in reversed(held):
            os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
