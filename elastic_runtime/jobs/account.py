"""What the folder of a job says about it: whether it lives, its events, and a record for a job that wrote none."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_runtime.errors import InputError, IntegrityError
from elastic_runtime.jobs.folder import JobFolder, is_report
from elastic_runtime.jobs.lookup import FoundJob

__all__ = ["Account", "look", "public_events"]

_FAILURES = frozenset(
    ["coordinator_lost", "meeting_failed", "node_excluded", "node_hung", "node_leaving", "node_lost", "node_refused",
     "state_lost", "store_lost", "worker_failed", "worker_late", "zygote"]
)  # fmt: skip
_TAIL = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Account:
    """One look at the folder of a job."""

    job: FoundJob
    live: bool
    """Whether its supervisor lives."""
    supervisor: int | None
    """Pid of the supervisor; None if it is not known, or the job is over."""
    record: dict[str, Any] | None
    """How it ended; None while it lives, or if its supervisor was killed."""
    events: list[dict[str, Any]]
    """What happened so far, oldest first."""

    @property
    def starting(self) -> bool:
        """Whether the supervisor has the folder, but has written nothing yet."""
        return self.live and (not self.job.description or self.supervisor != self.job.description.get("pid"))

    @property
    def state(self) -> str:
        """One word of those that `status` uses, as far as the folder tells."""
        if self.record is not None:
            return str(self.record["state"])
        if not self.live:
            return "failed"
        if self.starting:
            return "pending"
        newest = ""
        for event in self.events:
            if event["kind"] in ("round", "worker_failed", "node_lost", "node_leaving", "recovered"):
                newest = event["kind"]
        if not newest:
            return "forming"
        return "running" if newest in ("round", "recovered") else "recovering"

    @property
    def reason(self) -> str:
        """Why the job is in this state, for one that ended."""
        if self.record is not None:
            return str(self.record["reason"])
        if not self.live:
            pid = self.job.description.get("pid")
            return f"its supervisor (pid {pid}) was killed, and left no record"
        return ""

    def newest(self, kind: str, key: str) -> Any:
        """Return what the last event of a kind says under `key`; None if there is none."""
        return next((e[key] for e in reversed(self.events) if e["kind"] == kind and key in e), None)

    @property
    def restarts(self) -> int:
        """Restarts used: as recorded, or one for each round that the failure of a worker ended."""
        if self.record is not None:
            return int(self.record["restarts"])
        rounds = {
            event.get("round")
            for event in self.events
            if event["kind"] == "worker_failed" and not event.get("consequence")
        }
        return min(len(rounds), int(self.job.description.get("max_restarts", len(rounds))))

    @property
    def global_step(self) -> int:
        """Finished steps, as recorded or as the newest lines of the metrics say."""
        return int(self.record["global_step"]) if self.record is not None else _last_step(self.job.folder)

    def as_record(self, *, state: str | None = None, reason: str | None = None) -> dict[str, Any]:
        """Return the record; for a job that has none, one made of what is known, as of now.

        `state` and `reason` stand in it instead of those found.
        """
        if self.record is not None:
            return self.record
        description = self.job.description
        times = [event["time"] for event in self.events]
        ended = time.time() if self.live else max(times, default=time.time())
        started = float(description.get("started", min(times, default=ended)))
        sizes = [event["world_size"] for event in self.events if event["kind"] == "round"]
        state = state or self.state
        return {
            "name": self.job.name,
            "app_id": description.get("app_id", ""),
            "state": state,
            "reason": reason or self.reason or f"still {state}",
            "exit_code": {"succeeded": 0, "stopped": 130}.get(state, 1),
            "global_step": self.global_step,
            "world_size": max(sizes, default=0),
            "restarts": self.restarts,
            "max_restarts": int(description.get("max_restarts", 0)),
            "started": started,
            "ended": max(started, ended),
            "seconds": max(0.0, ended - started),
            "recoveries": _recoveries(self.events),
            "events": self.events,
        }


def look(job: FoundJob) -> Account:
    """Return what the folder of `job` says now. Raises `InputError` if it cannot be read."""
    folder = job.folder
    try:
        # Before the record: a job that ends in between has written it. And again: one may have just begun.
        live = folder.is_live()
        description = folder.description() or {}
        record = folder.record()
        live = live or (record is None and folder.is_live())
        supervisor = folder.owner() if live else None
        events = [event for event in folder.events() if _is_event(event)]
    except (IntegrityError, OSError) as error:
        raise InputError(f"job {job.name!r}: its folder cannot be read: {error}") from error
    starting = live and supervisor != description.get("pid")
    if record is not None and (starting or record.get("app_id") != description.get("app_id")):
        record = None  # An earlier job's.
    return Account(
        job=FoundJob(job.name, folder, description), live=live, supervisor=supervisor, record=record,
        events=[] if starting else events,
    )  # fmt: skip


def public_events(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return events as `status` shows them: time, kind, cause, verdict and seconds in each, null where unknown."""
    shown = []
    for event in events:
        cause = event.get("cause")
        if cause is None and event["kind"] in _FAILURES:
            cause = event.get("text")
        first = {"time": event["time"], "kind": event["kind"], "cause": cause}
        shown.append({**first, "verdict": None, "seconds": None, **event, "cause": cause})
    return shown


def _recoveries(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    open_cause: str | None = None
    for event in events:
        if event["kind"] == "recovered":
            found.append({key: event.get(key) for key in ("cause", "seconds", "steps_lost")})
            open_cause = None
        elif event["kind"] in ("worker_failed", "node_lost") and event.get("member"):
            open_cause = open_cause or str(event.get("text"))
    if open_cause is not None:
        found.append({"cause": open_cause, "seconds": None, "steps_lost": None})
    return found


def _is_event(event: Mapping[str, Any]) -> bool:
    return isinstance(event.get("kind"), str) and type(event.get("time")) in (int, float)


def _last_step(folder: JobFolder) -> int:
    """Return the highest step among the last lines of the metrics; steps only go back over a failure."""
    highest = 0
    for line in _last_lines(folder.path / "metrics.jsonl"):
        try:
            report = json.loads(line)
        except ValueError:
            continue
        if is_report(report):
            highest = max(highest, report["step"])
    return highest


def _last_lines(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            return file.read(_TAIL).split(b"\n")
    except FileNotFoundError:
        return []
