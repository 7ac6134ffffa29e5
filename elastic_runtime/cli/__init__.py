"""The command line's frame: commands, errors, exit codes. Commands import what they need when they run."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from elastic_runtime import __version__
from elastic_runtime.errors import EXIT_INPUT, EXIT_INTERRUPTED, ElasticError

__all__ = ["Command", "main", "print_json"]


class Command(Protocol):
    """One sub-command of `kfp-elastic`."""

    name: str
    help: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's options. Called at every start: import nothing heavy here."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do the work and return the exit code; may raise `ElasticError`, whose exit code is used."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_INPUT, f"error: {message}\n(see {self.prog} --help)\n")


def print_json(document: dict[str, Any]) -> None:
    """Print the one JSON document of a command with `--json`."""
    plain = (sys.stdout.encoding or "ascii").lower().replace("-", "") != "utf8"
    sys.stdout.write(json.dumps({"schema": 1, **document}, ensure_ascii=plain) + "\n")
    sys.stdout.flush()


def main(commands: Sequence[Command], argv: Sequence[str] | None = None) -> int:
    """Parse `argv`, run the chosen command and return the exit code (see `elastic_runtime.errors`)."""
    parser = _Parser(prog="kfp-elastic", description="Elastic training for Kubeflow Pipelines.")
    parser.add_argument("--version", action="version", version=f"kfp-elastic {__version__}")
    choices = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in commands:
        sub = choices.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except ElasticError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        # Another one, while the interpreter ends, must not change the exit code.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader went away; keep the interpreter from complaining at its own last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_INTERRUPTED
    return code
