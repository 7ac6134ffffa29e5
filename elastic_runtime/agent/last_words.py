"""What a worker said last: the line that ends its traceback, and the step that was finished last."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

from elastic_runtime.jobs.folder import is_report, tail

__all__ = ["last_error", "last_report"]

_RANK_PREFIX = re.compile(r"^\[rank\d+\]:\s?", re.MULTILINE)
_LAST_LINE = re.compile(r"[A-Za-z_][\w.]*(: .*)?$")
_WAYS_OUT = (1, 2)
"""Exit codes of `sys.exit("text")` and argparse: they explain themselves in the last line instead of a traceback."""
_LONGEST = 500
_REPORTS = 1 << 13


def last_error(log: Path, start: int, code: int) -> str:
    """Return the last line of the traceback that ends the log from byte `start` on, if there is one.

    Without one, a worker that ended by `sys.exit` is taken to have said why in its last line. Empty for neither.
    """
    try:
        size = log.stat().st_size
    except OSError:
        return ""
    text = tail(log, min(1 << 16, max(0, size - start)))
    # torch puts the rank before each line of a traceback once a process group exists.
    text = _RANK_PREFIX.sub("", text)
    trace = text.rfind("Traceback (most recent call last):")
    if trace < 0:
        words = text.split("\n") if code in _WAYS_OUT else []
        last = next((line.strip()[-_LONGEST:] for line in reversed(words) if line.strip()), "")
        return f"exit code {code}, last line: {last}" if last else ""
    lines = [line for line in text[trace:].splitlines()[1:] if _LAST_LINE.match(line)]
    return lines[-1].strip()[:_LONGEST] if lines else ""


def last_report(metrics: Path) -> tuple[int, int]:
    """Return the newest finished step that was reported, and its round; (0, -1) if there is none."""
    for line in reversed(tail(metrics, _REPORTS).splitlines()):
        with suppress(ValueError):
            report = json.loads(line)
            if is_report(report):
                return report["step"], report["round"]
    return 0, -1
