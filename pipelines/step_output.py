"""What steps print, made readable: with the step's name, without kfp's noise, and kept whole in a file."""

from __future__ import annotations

import io
import re
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

__all__ = ["StepLog", "StepOutput", "readable"]

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
_OURS = "elastic_runtime.errors."
_LONGEST_HELD = 1000
_SEPARATORS = ("During handling of the above exception", "The above exception was the direct cause")


def readable(lines: Iterable[str]) -> list[str]:
    """Return the lines of a step's log file as people should see them."""
    quiet, tracebacks = _Quiet(), _Tracebacks()
    shown = [line for line in map(quiet.read, lines) if line is not None]
    return [out for line in shown for out in tracebacks.read(line)] + tracebacks.end()


class _Quiet:
    """Leaves out what kfp prints for itself."""

    def __init__(self) -> None:
        self._in_dump = False

    def read(self, line: str) -> str | None:
        """Return `line` as people should see it, or None to leave it out."""
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
        return line if line.strip() else None


class _Tracebacks:
    """Leaves out the tracebacks of this package's own errors, whose message says everything; keeps all others.

    A traceback is held back until it is known what raised it, with those that it was raised from.
    """

    def __init__(self) -> None:
        self._held: list[str] = []
        self._error = ""
        """Last line of the traceback that is held back; empty while it goes on."""

    def read(self, line: str) -> list[str]:
        """Take the next line; return those that can be shown now."""
        starts = line.rstrip() == _TRACEBACK
        if not self._held:
            if starts:
                self._held = [line]
                return []
            return [line]
        linked = self._held[-1].startswith(_SEPARATORS)
        if self._error and line.startswith(_SEPARATORS):
            self._error = ""
            self._held.append(line)
            return []
        if (
            not self._error
            and (line.startswith(" ") or (starts and linked))
            and len(self._held) < _LONGEST_HELD
        ):
            self._held.append(line)
            return []
        if not self._error and not linked and not starts and _ERROR_LINE.match(line):
            self._error = line
            self._held.append(line)
            return []
        return [*self.end(), *self.read(line)]

    def end(self) -> list[str]:
        """Return what is still held back, as it should be shown."""
        held, error = self._held, self._error
        self._held, self._error = [], ""
        return [error.removeprefix(_OURS)] if error.startswith(_OURS) else held


class StepLog:
    """The output of one step: every line goes to `file`, the readable ones are returned by `read` and `end`."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._tail: deque[str] = deque(maxlen=400)
        self._quiet = _Quiet()
        self._tracebacks = _Tracebacks()

    def read(self, line: str) -> list[str]:
        """Record one line without its newline; return the lines that people should see now."""
        self._file.write(line + "\n")
        self._file.flush()
        shown = self._quiet.read(line)
        if shown is None:
            return []
        self._tail.append(shown)
        return self._tracebacks.read(shown)

    def end(self) -> list[str]:
        """Return the lines that were held back, when no more come."""
        return self._tracebacks.end()

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
                self._show(self._state.log.end())
                self._state.name = self._state.log = None

    def step_line(self, line: str) -> None:
        """Take one line, without its newline, of the step that this thread is in."""
        self._show(self._state.log.read(line))

    def _show(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.say(f"{self._state.name} | {line}")

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
