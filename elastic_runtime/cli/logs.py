"""`kfp-elastic logs`: what the workers of a job printed, also while it runs and after its end."""

from __future__ import annotations

import argparse
import os
import re
import select
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from elastic_runtime.cli.control import JOB_HELP
from elastic_runtime.errors import EXIT_OK, InputError

if TYPE_CHECKING:
    from elastic_runtime.jobs.lines import LogReader
    from elastic_runtime.jobs.lookup import FoundJob

__all__ = ["LogsCommand"]

_POLL = 0.1
_LOG = re.compile(r"rank-([0-9]+)\.log")


class LogsCommand:
    """Prints the logs of all ranks, each line with its rank."""

    name = "logs"
    help = "print what the workers of a job printed"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("job", metavar="JOB", help=JOB_HELP)
        parser.add_argument("--rank", type=int, metavar="R", help="only the log of rank R")
        parser.add_argument(
            "--grep", metavar="RE", help="only lines in which this regular expression is found"
        )
        parser.add_argument(
            "--tail", type=int, metavar="N", help="only the last N (found) lines of each rank"
        )
        parser.add_argument(
            "-f", "--follow", action="store_true", help="go on with new lines until the job ends"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON document (not with --follow)")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the lines; 0 also if the reader goes away.

        Lines carry no time, so those of one rank stay together; with `--follow` new ones come as they are printed.
        """
        from elastic_runtime.cli import print_json
        from elastic_runtime.jobs.lookup import find_job

        if arguments.json and arguments.follow:
            raise InputError("--json prints one document, and --follow has no end: leave one of them out")
        for option, value in (("--tail", arguments.tail), ("--rank", arguments.rank)):
            if value is not None and value < 0:
                raise InputError(f"{option} {value}: takes a number from 0")
        logs = _Logs(find_job(arguments.job), arguments.rank, _search(arguments.grep), arguments.tail)
        if arguments.json:
            lines = [{"rank": rank, "text": text} for rank, text in logs.read(follow=False)]
            print_json({"name": logs.name, "lines": lines})
            return EXIT_OK
        try:
            logs.print(follow=arguments.follow)
        except BrokenPipeError:
            # The reader has seen enough. The interpreter flushes once more at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def _search(pattern: str | None) -> Callable[[str], object] | None:
    if pattern is None:
        return None
    try:
        return re.compile(pattern).search
    except re.error as error:
        raise InputError(
            f"--grep {pattern!r}: {error}: give a regular expression as Python's re takes it"
        ) from error


def _is_reader_gone(seconds: float) -> bool:
    """Wait `seconds`, but not longer than somebody reads our output: a log that is silent would never tell."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(seconds * 1000))


class _Logs:
    """The log files of a job's ranks; new ones may come."""

    def __init__(
        self, job: FoundJob, rank: int | None, search: Callable[[str], object] | None, tail: int | None
    ) -> None:
        self.name = job.name
        self._job = job
        self._rank = rank
        self._search = search
        self._tail = tail
        self._readers: dict[int, LogReader] = {}
        self._first = True

    def print(self, *, follow: bool) -> None:
        """Write what is there, and with `follow` what comes until the job ends."""
        while True:
            # Asked first: what was written before the end must still be read.
            live = follow and self._is_live()
            for rank, line in self.read(follow=live):
                sys.stdout.buffer.write(f"[rank{rank}] {line}\n".encode())
            sys.stdout.buffer.flush()
            if not live or _is_reader_gone(_POLL):
                return

    def read(self, *, follow: bool) -> Iterator[tuple[int, str]]:
        """Yield the new lines with their ranks; a last one that has no end yet only if there is nothing to `follow`."""
        first, self._first = self._first, False
        for rank, reader in self._look(expected=follow or not first):
            if first and self._tail is not None and self._search is None:
                reader.skip_to_last(self._tail)
            lines: Iterable[str] = reader.lines(last=not follow)
            if self._search is not None:
                lines = filter(self._search, lines)
            if first and self._tail is not None:
                lines = deque(lines, maxlen=self._tail)
            yield from ((rank, line) for line in lines)

    def _is_live(self) -> bool:
        """Return whether the job that was found still runs, and not a later one in the same folder."""
        folder, known = self._job.folder, self._job.description.get("app_id")
        now = (folder.description() or {}).get("app_id")
        return folder.is_live() and known in (None, now)

    def _look(self, *, expected: bool) -> list[tuple[int, LogReader]]:
        """Return a reader for each log; if a rank is `expected` its log may still be missing."""
        from elastic_runtime.jobs.lines import LogReader

        logs = self._job.folder.logs
        there = {
            int(match[1]): path for path in logs.glob("rank-*.log") if (match := _LOG.fullmatch(path.name))
        }
        if self._rank is not None:
            if self._rank not in there and not expected:
                ranks = ", ".join(map(str, sorted(there))) or "none"
                raise InputError(
                    f"--rank {self._rank}: job {self.name!r} has no log of that rank (there are: {ranks})"
                )
            there = {rank: path for rank, path in there.items() if rank == self._rank}
        for rank, path in there.items():
            self._readers.setdefault(rank, LogReader(path))
        return sorted(self._readers.items())
