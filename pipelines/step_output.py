"""What steps print, made readable: with the step's name, without kfp's noise, and kept whole in a file."""

from __future__ import annotations

import io
import re
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

__all__ = ["StepLog", "StepOutput"]

_EXECUTOR_PREFIX = re.compile(r"\[KFP Executor [^\]]* (?P<level>[A-Z]+)\]: (?P<message>.*)", re.DOTALL)
_NOISE = (
    "--component_module_path is not specified",
    "Did not write output file",
    "Got executor_input:",
    "Loading KFP component ",
    "Looking for component ",
    "Wrote executor output file to ",
)
_TRACEBACK = "Traceback (most recent call last):"
_ERROR_LINE = re.compile(r"(?P<path>(?:[A-Za-z_]\w*\.)*)(?P<rest>[A-Za-z_]\w*(?:: .*)?$)", re.DOTALL)
_SEPARATORS = ("During handling of the above exception", "The above exception was the direct cause")


class StepLog:
    """The output of one step: every line goes to `file`, the readable ones are returned by `read`."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._tail: deque[str] = deque(maxlen=400)
        self._in_dump = False

    def read(self, line: str) -> str | None:
        """Record one line without its newline; return it as people should see it, or None to leave it out."""
        self._file.write(line + "\n")
        self._file.flush()
        if self._in_dump:
            # kfp prints the executor input as indented JSON; its last line is the only brace in column 0.
            self._in_dump = line != "}"
            return None
        matched = _EXECUTOR_PREFIX.fullmatch(line)
        if matched:
            if matched["message"].startswith(_NOISE):
                self._in_dump = matched["message"] == "Got executor_input:"
                return None
            line = (
                matched["message"]
                if matched["level"] == "INFO"
                else f"{matched['level']}: {matched['message']}"
            )
        if not line.strip():
            return None
        self._tail.append(line)
        return line

    def error(self, exit_code: int = 1) -> str:
        """Return the error that ended the step: that of its last traceback, or else how it ended.

        `exit_code` is that of the step's process, 128 plus the number of a signal.
        """
        lines = list(self._tail)
        starts = [i for i, line in enumerate(lines) if line.rstrip() == _TRACEBACK]
        if starts:
            for i in range(starts[-1] + 1, len(lines)):
                line = lines[i].rstrip()
                matched = _ERROR_LINE.match(line)
                if matched and not line.startswith((" ", *_SEPARATORS)):
                    return "\n".join([matched["rest"], *(more.rstrip() for more in lines[i + 1 : i + 4])])
        how = f"exit code {exit_code}" if exit_code <= 128 else f"killed by {_signal_name(exit_code - 128)}"
        return f"{how}; its last line: {lines[-1].strip()}" if lines else f"{how}; it printed nothing"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class StepOutput(io.TextIOBase):
    """Writes what steps print to `target`, each line with its step's name, and stands in for `sys.stdout`.

    Steps may run in parallel, each in a thread of kfp's; what a thread passes to `step_line` belongs to the step
    that this thread is in. What kfp itself prints are separators, which are left out; the rest is passed on.
    """

    def __init__(self, target: TextIO) -> None:
        super().__init__()
        self._target = target
        self._lock = threading.Lock()
        self._state = threading.local()

    @contextmanager
    def step(self, name: str, path: Path) -> Iterator[StepLog]:
        """Attribute the lines of this thread to the step `name`; all of them go to the file `path` too."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", errors="replace") as file:
            self._state.name, self._state.log = name, StepLog(file)
            try:
                yield self._state.log
            finally:
                self._state.name = self._state.log = None

    def step_line(self, line: str) -> None:
        """Take one line, without its newline, of the step that this thread is in."""
        shown = self._state.log.read(line)
        if shown is not None:
            self.say(f"{self._state.name} | {shown}")

    def say(self, line: str) -> None:
        """Write one line of our own."""
        with self._lock:
            self._target.write(line + "\n")
            self._target.flush()

    def writable(self) -> bool:
        """Return True: this is a stream for writing."""
        return True

    def write(self, text: str) -> int:
        """Take what kfp prints in this process."""
        *lines, self._state.partial = (getattr(self._state, "partial", "") + text).split("\n")
        for line in lines:
            if line.strip(" -"):
                self.say(line)
        return len(text)
