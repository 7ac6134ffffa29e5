"""`kfp-elastic run`: one script as an elastic job, in the foreground."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from elastic_runtime.errors import EXIT_OK, InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_runtime.jobs.spec import JobSpec
    from elastic_runtime.launching.launcher import JobResult

__all__ = ["RunCommand"]


class RunCommand:
    """Runs a script or module on one machine or through any torchx scheduler."""

    name = "run"
    help = "run a training script as an elastic job"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        parser.usage = "kfp-elastic run [options] (SCRIPT | -m MODULE) [-- ARG …]"
        parser.add_argument("--name", help="job name (default: the script's name and a short id)")
        parser.add_argument(
            "--nodes", default="1", metavar="MIN:MAX", help="nodes: MIN:MAX, N, or sizes such as 1,2,4"
        )
        parser.add_argument(
            "--nproc-per-node", default="1", metavar="K", help="workers of a node: a number or auto"
        )
        parser.add_argument("--max-restarts", type=int, default=10, metavar="R",
                            help="worker failures after which the job stops (default 10)")  # fmt: skip
        parser.add_argument("--preload", default="", metavar="A,B",
                            help="modules to import once, before workers are forked")  # fmt: skip
        parser.add_argument("--grace", type=float, default=3.0, metavar="S",
                            help="seconds between SIGTERM and SIGKILL for workers (default 3)")  # fmt: skip
        parser.add_argument("--heartbeat", type=float, default=5.0, metavar="S",
                            help="seconds after which an agent that says nothing is lost (default 5)")  # fmt: skip
        parser.add_argument("--wait-limit", type=float, default=600.0, metavar="S",
                            help="seconds below the minimum after which the job fails (default 600)")  # fmt: skip
        parser.add_argument(
            "--state-dir", metavar="DIR", help="folder for logs, events, checkpoints and the record"
        )
        parser.add_argument("--output-dir", metavar="DIR", help="folder for what the script produces")
        parser.add_argument(
            "--env", action="append", default=[], metavar="NAME=VALUE", help="environment of the workers"
        )
        parser.add_argument(
            "--scheduler", default="local_cwd", metavar="S", help="torchx scheduler (default local_cwd)"
        )
        parser.add_argument("--scheduler-arg", action="append", default=[], metavar="NAME=VALUE",
                            help="option of the scheduler")  # fmt: skip
        parser.add_argument("--detach", action="store_true",
                            help="return as soon as the job runs; see kfp-elastic status, logs, stop")  # fmt: skip
        parser.add_argument(
            "--json", action="store_true", help="print the job record as JSON; the log goes to stderr"
        )
        parser.add_argument("-m", "--module", metavar="MODULE", help="module to run, as python -m")
        parser.add_argument(
            "program", nargs=argparse.REMAINDER, metavar="SCRIPT [-- ARG …]", help="script and its arguments"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the job and return its exit code; with `--detach` start it, and return 0."""
        from elastic_runtime.cli import print_json
        from elastic_runtime.launching.launcher import launch, write_line

        spec, scheduler_args = self._spec(arguments)
        if arguments.detach:
            return _detach(spec, arguments, scheduler_args)
        sys.stderr.write(f"job {spec.name}\n")
        stream = sys.stderr if arguments.json else sys.stdout
        result = launch(
            spec,
            scheduler=arguments.scheduler,
            scheduler_args=scheduler_args,
            write=lambda line: write_line(stream, line),
        )
        page = _write_report(result)
        if arguments.json:
            record = dict(
                result.record or {"name": result.name, "state": result.state, "reason": result.reason}
            )
            record.pop("schema", None)
            print_json({**record, "handle": result.handle, "folder": str(result.folder.path), "report": page})
        else:
            why = "" if result.record is not None else f": {result.reason}"
            sys.stderr.write(f"job {result.name} {result.state}{why}: {result.folder.path}\n")
            if page:
                sys.stderr.write(f"report: {page}\n")
        return result.exit_code

    def _spec(self, arguments: argparse.Namespace) -> tuple[Any, dict[str, str]]:
        from pathlib import Path

        from elastic_runtime import names
        from elastic_runtime.jobs.nodes import parse_nodes, parse_workers
        from elastic_runtime.jobs.spec import JobSpec, environment_of, preload_of, program_of

        words = list(arguments.program)
        script = None
        if arguments.module is None:
            if not words or words[0] == "--":
                raise InputError(
                    "no program given: kfp-elastic run [options] (SCRIPT | -m MODULE) [-- ARG …]"
                )
            script = words.pop(0)
            if script.startswith("-"):
                raise InputError(f"unknown option {script!r} (see kfp-elastic run --help)")
        if words[:1] == ["--"]:
            words = words[1:]
        elif words:
            raise InputError(
                f"{words[0]!r}: arguments of the program come after --, options of run before it"
            )
        program = program_of(script, arguments.module)
        if arguments.name is not None and not names.is_valid(arguments.name):
            raise InputError(
                f"--name {arguments.name!r}: lower-case letters, digits and '-', at most {names.MAX_LENGTH}, "
                f"a letter first; for example {names.valid_name(arguments.name)!r}"
            )
        spec = JobSpec(
            program=program,
            arguments=words,
            nodes=parse_nodes(arguments.nodes, parse_workers(arguments.nproc_per_node)),
            name=arguments.name or names.unique_name(program.label),
            max_restarts=arguments.max_restarts,
            grace=arguments.grace,
            heartbeat=arguments.heartbeat,
            wait_limit=arguments.wait_limit,
            state_dir=_local_folder("--state-dir", arguments.state_dir),
            output_dir=_local_folder("--output-dir", arguments.output_dir),
            environment=environment_of(_pairs("--env", arguments.env)),
            preload=preload_of(arguments.preload),
        )
        if spec.output_dir:
            Path(spec.output_dir).mkdir(parents=True, exist_ok=True)
        return spec, _pairs("--scheduler-arg", arguments.scheduler_arg)


def _detach(spec: JobSpec, arguments: argparse.Namespace, scheduler_args: dict[str, str]) -> int:
    """Start the job with a launcher in the background; print its name, or one document."""
    from elastic_runtime.cli import print_json
    from elastic_runtime.cli.detached import start_detached
    from elastic_runtime.launching.launcher import launch, write_line

    def write(line: str) -> None:
        # What the ranks print is in their own files, which are kept in bounds.
        if not line.startswith("[rank"):
            write_line(sys.stdout, line)

    def follow(submitted: Callable[[str], object]) -> int:
        result = launch(
            spec,
            scheduler=arguments.scheduler,
            scheduler_args=scheduler_args,
            write=write,
            submitted=submitted,
        )
        sys.stderr.write(f"job {result.name} {result.state}: {result.reason}: {result.folder.path}\n")
        _write_report(result)
        return result.exit_code

    handle, folder = start_detached(spec, follow, scheduler=arguments.scheduler)
    if arguments.json:
        print_json({"name": spec.name, "handle": handle, "folder": str(folder.path)})
    else:
        sys.stdout.write(f"{spec.name}\n")
    return EXIT_OK


def _write_report(result: JobResult) -> str | None:
    """Write the job's HTML report into its folder and return its path; None if there is no record or no room."""
    if result.record is None:
        return None
    from elastic_runtime.jobs import report

    page = result.folder.path / "report.html"
    try:
        page.write_text(report.render(result.folder, result.record), encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"warning: no report: {error}\n")
        return None
    return str(page)


def _pairs(option: str, given: list[str]) -> dict[str, str]:
    pairs = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"{option} {text!r}: takes NAME=VALUE")
        pairs[name] = value
    return pairs


def _local_folder(option: str, given: str | None) -> str | None:
    from pathlib import Path

    if given is None:
        return None
    if "://" in given and not given.startswith("file://"):
        raise InputError(f"{option} {given!r}: only a folder of this machine is supported so far")
    folder = Path(given.removeprefix("file://")).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{option} {given!r}: {error.strerror}") from error
    return str(folder)
