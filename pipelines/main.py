"""The `kfp-elastic` command: every command of this distribution under one name."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code (see `elastic_runtime.errors`)."""
    try:
        from elastic_runtime import cli
        from elastic_runtime.cli.logs import LogsCommand
        from elastic_runtime.cli.report import ReportCommand
        from elastic_runtime.cli.run import RunCommand
        from elastic_runtime.cli.scale import ScaleCommand
        from elastic_runtime.cli.status import StatusCommand
        from elastic_runtime.cli.stop import StopCommand
        from kfp_elastic.pipelines.command import PipelineCommand

        commands: list[cli.Command] = [
            PipelineCommand(),
            RunCommand(),
            StatusCommand(),
            ScaleCommand(),
            StopCommand(),
            LogsCommand(),
            ReportCommand(),
        ]
        return cli.main(commands, argv)
    except KeyboardInterrupt:
        # A Ctrl-C while the command itself was still being loaded: nothing has been started.
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
        # Python remembers that an import was interrupted, and would end by the signal whatever is returned here.
        os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
