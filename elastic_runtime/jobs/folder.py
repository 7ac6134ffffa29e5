"""The folder of a job.

job.json        what was asked for, and the supervisor's pid
lock            held (flock) as long as the job lives
events.jsonl    what happened, one JSON object a line
metrics.jsonl   one line a step, written by rank 0
logs/           rank-N.log, everything that rank printed; agent-N.log; launcher.log of a detached launcher
checkpoints/    output/
record.json     how it ended
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_runtime.errors import InputError, IntegrityError, NameInUseError
from elastic_runtime.jobs import locks

__all__ = ["JobFolder", "default_folder", "is_report", "tail", "write_json"]

SCHEMA = 1
_FILES = ("events.jsonl", "metrics.jsonl", "record.json")


def default_folder(name: str) -> Path:
    """Return the folder of the job `name`: below `XDG_STATE_HOME`, else `~/.local/state`."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111 - no HOME is fine
    return Path(base) / "kfp-elastic" / "jobs" / name


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write `document` so that a reader sees the old content or the new, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump({"schema": SCHEMA, **document}, file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def tail(path: Path, limit: int = 1 << 16) -> str:
    """Return the last `limit` bytes of a log as text; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - limit))
            return file.read(limit).replace(b"\0", b"").decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


@dataclass(frozen=True)
class JobFolder:
    """Paths of a job's folder, and reading and writing what is in it."""

    path: Path

    @property
    def logs(self) -> Path:
        """Folder of the log files."""
        return self.path / "logs"

    @property
    def record_file(self) -> Path:
        """The file that says how the job ended."""
        return self.path / "record.json"

    def log_of(self, rank: int) -> Path:
        """Return the file of everything that `rank` printed."""
        return self.logs / f"rank-{rank}.log"

    @property
    def launcher_log(self) -> Path:
        """The file of what a detached launcher says, which it locks as long as it lives."""
        return self.logs / "launcher.log"

    def create(self) -> None:
        """Make the folder and what belongs in it. Raises `InputError` if this is not possible."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            (self.path / ".writable").touch()
            (self.path / ".writable").unlink(missing_ok=True)
        except OSError as error:
            raise InputError(
                f"state folder {str(self.path)!r}: {error.strerror} ({error.filename}): "
                "choose a folder that can be written (--state-dir, or XDG_STATE_HOME for all jobs)"
            ) from error

    def check_usable(self) -> None:
        """Raise `InputError` if the folder holds what a job would replace and that no job of ours has written."""
        try:
            ours = self.description() is not None
            self.record()
            replaced = (*(self.path / name for name in _FILES), *self._stale_logs())
            foreign = [path for path in replaced if path.exists()]
            lock = self.path / "lock"
            if lock.exists() and not lock.is_file():
                raise IntegrityError(f"{lock}: is not a file")
        except (IntegrityError, OSError) as error:
            raise InputError(
                f"state folder {str(self.path)!r}: {error}: remove the folder or choose another (--state-dir)"
            ) from error
        if foreign and not ours:
            raise InputError(
                f"state folder {str(self.path)!r}: {foreign[0].relative_to(self.path)} there is not of a job of ours "
                "(no job.json): choose an empty folder (--state-dir)"
            )

    def supervisor_of(self, app_id: str) -> int | None:
        """Return the pid of the supervisor that runs the job `app_id` here now, or None."""
        try:
            earlier = self.description()
            if earlier is None or not app_id or earlier.get("app_id") != app_id or not self.is_live():
                return None
        except (IntegrityError, OSError):
            return None
        pid = earlier.get("pid")
        return pid if isinstance(pid, int) else None

    def lock(self, name: str) -> int:
        """Take the job's lock and return its descriptor; it is held until that is closed.

        Raises `NameInUseError` if a live job has it.
        """
        try:
            descriptor = locks.take(self.path / "lock")
        except OSError as error:
            raise InputError(
                f"{error.filename}: {error.strerror}: choose another folder (--state-dir)"
            ) from error
        if descriptor is None:
            owner = self.owner()
            raise NameInUseError(
                f"job {name!r} is running (pid {owner or 'unknown'}, {self.path}): stop it or choose another name"
            )
        locks.write(descriptor, str(os.getpid()))
        return descriptor

    def owner(self) -> int | None:
        """Return the pid of the process that holds the lock, or held it last; None if that is not known."""
        text = locks.read(self.path / "lock")
        return int(text) if text.isascii() and text.isdigit() else None

    def is_live(self) -> bool:
        """Return whether a job holds the lock now."""
        return locks.is_held(self.path / "lock")

    def begin(self, document: dict[str, Any]) -> str:
        """Start a job here: write `job.json`, remove an earlier job's traces, and say what becomes of its checkpoints.

        They are kept, so that the new job goes on from them, if the earlier one ran the same program with the same
        arguments and did not succeed. Returns a sentence, empty if there was no earlier job.
        """
        earlier, record = self.description(), self.record()
        same = earlier is not None and all(
            earlier.get(key) == document.get(key) for key in ("program", "arguments")
        )
        finished = record is not None and record["state"] == "succeeded"
        for name in _FILES:
            (self.path / name).unlink(missing_ok=True)
        for stale in [*self.path.glob("fault-*"), *self._stale_logs()]:
            stale.unlink(missing_ok=True)
        said = ""
        if earlier is not None:
            how = "succeeded" if finished else "did not succeed"
            kept = same and not finished
            if kept:
                said = f"an earlier job here {how}: going on from its checkpoints"
            else:
                shutil.rmtree(self.path / "checkpoints", ignore_errors=True)
                why = how if same else "had another program or arguments"
                said = f"an earlier job here {why}: starting anew"
        write_json(self.path / "job.json", document)
        return said

    def _stale_logs(self) -> list[Path]:
        """Return the logs of an earlier job: all but that of the launcher, which is there before its job."""
        return [log for log in self.logs.glob("*.log") if log != self.launcher_log]

    def description(self) -> dict[str, Any] | None:
        """Return what `job.json` says, or None if there is none. Raises `IntegrityError` for an unknown version."""
        try:
            return _document(self.path / "job.json")
        except FileNotFoundError:
            return None

    def event(self, kind: str, **details: Any) -> dict[str, Any]:
        """Append an event and return it."""
        event = {"time": time.time(), "kind": kind, **details}
        with (self.path / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(event, ensure_ascii=False) + "\n")
        return event

    def events(self) -> list[dict[str, Any]]:
        """Return every event so far, oldest first."""
        return list(_lines(self.path / "events.jsonl"))

    def metrics(self) -> list[dict[str, Any]]:
        """Return every reported step so far, in the order in which they were finished.

        Whatever else a program wrote there is left out.
        """
        return [line for line in _lines(self.path / "metrics.jsonl") if is_report(line)]

    def record(self) -> dict[str, Any] | None:
        """Return how the job ended, or None while it has not. Raises `IntegrityError` for an unknown version."""
        try:
            return _document(self.record_file)
        except FileNotFoundError:
            return None


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise IntegrityError(f"{path}: {error}") from error
    if not isinstance(document, dict):
        raise IntegrityError(f"{path}: is no JSON object")
    if document.get("schema") != SCHEMA:
        raise IntegrityError(f"{path}: schema {document.get('schema')!r} is not the {SCHEMA} known here")
    return document


def is_report(line: Any) -> bool:
    """Return whether `line` is the report of a finished step, as `worker.log` writes it."""
    return (
        isinstance(line, dict)
        and all(type(line.get(key)) is int for key in ("step", "round", "world_size"))
        and type(line.get("time")) in (int, float)
        and all(isinstance(value, int | float | str) for value in line.values())
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            # The last line may still be in the writing.
            with contextlib.suppress(ValueError):
                document = json.loads(line)
                if isinstance(document, dict):
                    yield document
