"""`kfp-elastic status`: one look at a job of this machine, running or over."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elastic_runtime.cli.control import JOB_HELP, PATIENCE, ask
from elastic_runtime.errors import EXIT_OK, InputError

__all__ = ["StatusCommand", "status_of"]

_SHOWN_EVENTS = 8


class StatusCommand:
    """Shows state, workers, nodes and what happened."""

    name = "status"
    help = "show the state of a job, its workers and what happened to it"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("job", metavar="JOB", help=JOB_HELP)
        parser.add_argument("--json", action="store_true", help="print one JSON document")
        parser.add_argument("--events", type=int, metavar="N",
                            help=f"show the last N events (default {_SHOWN_EVENTS}; all with --json)")  # fmt: skip

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the state; 0 whatever it is, 2 if there is no such job."""
        from elastic_runtime.cli import print_json
        from elastic_runtime.jobs.lookup import find_job

        count: int | None = arguments.events
        if count is not None and count < 0:
            raise InputError(f"--events {count}: takes a number from 0")
        document = status_of(find_job(arguments.job))
        if arguments.json:
            if count is not None:
                document["events"] = document["events"][len(document["events"]) - count :] if count else []
            print_json(document)
        else:
            shown = _SHOWN_EVENTS if count is None else count
            sys.stdout.writelines(f"{line}\n" for line in table(document, now=time.time(), events=shown))
        return EXIT_OK


def status_of(job: Any, *, patience: float = PATIENCE) -> dict[str, Any]:
    """Return the status document of `job` (a `FoundJob`), but for its schema; docs/control.md describes the keys.

    The coordinator is asked for up to `patience` seconds; if it does not answer, the folder has to.
    """
    from elastic_runtime.jobs.account import look, public_events

    account = look(job)
    answer = None
    if account.live and account.record is None and not account.starting:
        answer = ask(job, {"kind": "status"}, patience=patience)
        account = look(job)
    if answer is not None and (answer.get("kind") != "status" or account.record is not None):
        answer = None
    description = account.job.description
    document = {
        "name": job.name,
        "state": account.state,
        "reason": account.reason or None,
        **_size(account),
        "coordinator": None,
        "nodes": [] if account.record is not None or not account.live else _nodes_by_events(account.events),
    }
    if answer is not None:
        known = {key: value for key, value in answer.items() if key not in ("kind", "taking_over")}
        document.update(known)
    elif account.live and account.record is None and not account.starting:
        document["reason"] = "no coordinator answers; this is what the job's folder says"
    record = account.as_record()
    return {
        **document,
        "app_id": description.get("app_id"),
        "supervisor": account.supervisor if account.live else None,
        "started": description.get("started"),
        "seconds": record["seconds"],
        "exit_code": None if account.live and account.record is None else record["exit_code"],
        "folder": str(job.folder.path),
        "recoveries": record["recoveries"],
        "events": public_events(account.events),
    }


def _size(account: Any) -> dict[str, Any]:
    """Return steps and sizes as the folder knows them."""
    from elastic_runtime.jobs.nodes import parse_nodes

    description = account.job.description
    nodes = None
    if description:
        nodes = parse_nodes(description["nodes"], description["workers_per_node"])
    largest = nodes.maximum * nodes.workers if nodes else None
    term, round_ = account.newest("coordinator", "term"), account.newest("round", "round")
    desired = account.newest("scale", "desired")
    return {
        "global_step": 0 if account.starting else account.global_step,
        "world_size": account.newest("round", "world_size") or 0,
        "min": nodes.minimum * nodes.workers if nodes else None,
        "max": largest,
        "desired": largest if desired is None else desired,
        "restarts": account.restarts,
        "max_restarts": description.get("max_restarts"),
        "term": 0 if term is None else term,
        "round": -1 if round_ is None else round_,
    }


def _nodes_by_events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the nodes and workers that were started and are alive, for want of a coordinator that knows."""
    agents: dict[str, int] = {}
    workers: dict[tuple[str, int], int] = {}
    for event in events:
        if event["kind"] == "agent":
            agents[event["node"]] = event["pid"]
        elif event["kind"] == "worker":
            workers[event["node"], event["rank"]] = event["pid"]
    return [
        {
            "id": node,
            "agent_pid": pid,
            "workers": [
                {"rank": rank, "pid": worker}
                for (at, rank), worker in sorted(workers.items())
                if at == node and _is_alive(worker)
            ],
        }
        for node, pid in sorted(agents.items())
        if _is_alive(pid)
    ]


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def table(document: Mapping[str, Any], *, now: float, events: int) -> Iterator[str]:
    """Yield the lines that show a status document to people; `now` is in epoch seconds."""
    seconds = document["seconds"]
    since = f" {'for' if document['exit_code'] is None else 'after'} {duration(seconds)}" if seconds else ""
    yield f"job {document['name']}: {document['state']}{since}, {document['global_step']:,} steps"
    if document["reason"]:
        yield f"  {document['reason']}"
    allowed = f"{document['min']} to {document['max']} allowed, {document['desired']} desired"
    rows = [
        (
            "workers",
            f"{document['world_size']} ({allowed}), round {document['round']}, term {document['term']}",
        ),
        ("restarts", f"{document['restarts']} of {document['max_restarts']}"),
    ]
    coordinator = document["coordinator"]
    if coordinator is not None:
        rows.append(("coordinator", f"pid {coordinator['pid']} on {coordinator['host']}"))
    if document["supervisor"] is not None:
        rows.append(("supervisor", f"pid {document['supervisor']}"))
    rows.append(("folder", document["folder"]))
    for node in document["nodes"]:
        workers = ", ".join(
            f"{'starting' if worker['rank'] is None else 'rank {}'.format(worker['rank'])} pid {worker['pid'] or '-'}"
            for worker in node["workers"]
        )
        rows.append((f"node {node['id']}", f"agent pid {node['agent_pid']}; {workers or 'no workers'}"))
    yield from (f"  {label:<12} {text}" for label, text in rows)
    if document["recoveries"]:
        yield "recoveries"
        yield from (f"  {_recovery(recovery)}" for recovery in document["recoveries"])
    told = [event for event in document["events"] if event.get("text")]
    if told and events:
        yield "events"
        yield from (f"  {duration(now - e['time']) + ' ago':<16} {e['text']}" for e in told[-events:])


def _recovery(recovery: Mapping[str, Any]) -> str:
    if recovery["seconds"] is None:
        return f"{recovery['cause']}: no step finished since"
    again = recovery["steps_lost"] or 0
    return f"{recovery['cause']}: next step after {recovery['seconds']:.3f} s, {again} steps done again"


def duration(seconds: float) -> str:
    """Return seconds as a person says it: 0.4 s, 12 s, 3 min 5 s, 2 h 7 min, 3 d 4 h."""
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, size, lower, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {lower}" if rest else "")
    return f"{whole} s"
