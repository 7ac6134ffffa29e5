"""`kfp-elastic report`: write the HTML report of a job, also of one that failed or still runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

from elastic_runtime.cli.control import JOB_HELP
from elastic_runtime.errors import EXIT_OK, InputError

__all__ = ["ReportCommand"]


class ReportCommand:
    """Writes the run report anew and prints where it is."""

    name = "report"
    help = "write the HTML report of a job and print its path"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("job", metavar="JOB", help=JOB_HELP)
        parser.add_argument(
            "--out", metavar="FILE", help="file to write (default: report.html in the job's folder)"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON document")

    def run(self, arguments: argparse.Namespace) -> int:
        """Write the report. Raises `InputError` if there is nothing to report yet, or the file cannot be written."""
        from elastic_runtime.cli import print_json
        from elastic_runtime.jobs.account import look
        from elastic_runtime.jobs.lookup import find_job

        account = look(find_job(arguments.job))
        name, folder = account.job.name, account.job.folder
        if account.starting:
            raise InputError(f"job {name!r} is just starting: there is nothing to report yet: try again")
        record = account.as_record()
        out = folder.path / "report.html" if arguments.out is None else Path(arguments.out).absolute()
        if not out.parent.is_dir():
            raise InputError(f"--out {str(out)!r}: there is no folder {str(out.parent)!r}: make it first")
        # Only now: the charts take a second to load.
        from elastic_runtime.jobs import report

        page = report.render(folder, record)
        # A reader, or a second `report`, sees a whole page.
        temporary = out.with_name(f".{out.name}.{os.getpid()}")
        try:
            temporary.write_text(page, encoding="utf-8")
            temporary.replace(out)
        except OSError as error:
            raise InputError(f"--out {str(out)!r}: {error.strerror}: choose another file") from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        if arguments.json:
            print_json({"name": name, "state": record["state"], "report": str(out)})
        else:
            sys.stdout.write(f"{out}\n")
        return EXIT_OK
