"""The messages between the coordinator and the others, and the checks of those that it gets.

Agent to coordinator
    join        node, pid, host, workers, fingerprint, store, running: what already runs, copy: see `Roster.copy`
    store       store: [host, port] of an unused store
    leaving     the agent was told to end
    started     slot, spawn, pid
    hello, ready, joined, finished, exited    slot, spawn and what the methods of `Membership` want; exited has
                the step that was finished last and its round as well
    store_lost  how
    progress    step, round: from an agent that no supervisor watches
    pong        the agent is there
Coordinator to agent
    welcome     term: the first message of every connection
    start       round, store, places; change  round, planned, slots; go  round, term, store, source, places
    leave, release, stop, kill                slots
    dismiss     reason: the agent ends
    copy        what the agent is to keep for a later coordinator; start, go and release carry it too
    ping
Supervisor to coordinator
    progress    step, round; stop  reason; copy  what an earlier coordinator gave out; ping, answered by pong
Coordinator to supervisor
    wanted      nodes: those that should have an agent; event  kind_, text, details; done  state, reason
    state       round, restarts, phase, after each change; silent  node, pid: an agent that no longer answers
Command line to coordinator
    status      answered by a status document; scale  workers, answered by scaled or error
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_runtime.membership import actions as act
from elastic_runtime.membership.members import Node, Worker

__all__ = ["address", "flag", "integer", "joining", "text", "to_node"]

_LARGEST = 1 << 53
"""Numbers up to this are the same in every JSON reader."""
_STATES = ("starting", "ready", "training", "finished", "ending")
_COPY: Mapping[str, type | tuple[type, ...]] = {
    "term": int, "round": int, "world_size": int, "in_place": bool, "finishing": bool, "desired": int,
    "fingerprint": (dict, type(None)), "round_of_step": int,
}  # fmt: skip
_BUDGET: Mapping[str, type | tuple[type, ...]] = {
    "used": int, "step": int, "last": (dict, type(None)), "repeats": int, "step_at_failure": int,
}  # fmt: skip
_FAILURE: Mapping[str, type | tuple[type, ...]] = {
    "node": str, "rank": int, "code": int, "message": str, "step": int, "uptime": (int, float), "contributed": bool,
}  # fmt: skip


def integer(message: Mapping[str, Any], name: str, low: int = 0) -> int:
    """Return a whole number from `low` on. Raises `ValueError` that names the field and the value."""
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= _LARGEST:
        raise ValueError(f"{name} {value!r:.100}: takes a whole number from {low}")
    return value


def flag(message: Mapping[str, Any], name: str) -> bool:
    """Return a truth value. Raises `ValueError` that names the field and the value."""
    value = message.get(name)
    if not isinstance(value, bool):
        raise ValueError(f"{name} {value!r:.100}: takes true or false")
    return value


def text(message: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """Return a text. Raises `ValueError` that names the field and the value."""
    value = message.get(name, default)
    if not isinstance(value, str):
        raise ValueError(f"{name} {value!r:.100}: takes a text")
    return value


def address(message: Mapping[str, Any], name: str) -> tuple[str, int] | None:
    """Return host and port, or None. Raises `ValueError` that names the field and the value."""
    value = message.get(name)
    if value is None:
        return None
    if isinstance(value, list | tuple) and len(value) == 2:
        host, port = value
        if isinstance(host, str) and host and type(port) is int and 0 < port < 1 << 16:
            return host, port
    raise ValueError(f"{name} {value!r:.100}: takes host and port, or null")


def joining(message: Mapping[str, Any], *, workers: int) -> tuple[Node, list[Worker], dict[str, Any] | None]:
    """Return what a `join` tells: the node, the workers that run there, and the copy that it keeps.

    `workers` is how many a node of this job has room for. All of it is checked before anything is done. Raises
    `ValueError` that names the field and the value.
    """
    node = Node(
        id=text(message, "node"), workers=integer(message, "workers"), pid=integer(message, "pid"),
        host=text(message, "host"), store=address(message, "store"),
    )  # fmt: skip
    if not node.id:
        raise ValueError("node '': takes a name")
    if node.workers != workers:
        raise ValueError(f"node {node.id} has room for {node.workers} workers, not {workers}")
    running = message.get("running")
    if not isinstance(running, list):
        raise ValueError(f"running {running!r:.100}: takes a list of workers")
    found = [_worker(node.id, each, workers) for each in running]
    if len({worker.slot for worker in found}) != len(found):
        raise ValueError("running: two workers in one slot")
    fingerprint, copy = message.get("fingerprint"), message.get("copy")
    if fingerprint is not None and not isinstance(fingerprint, dict):
        raise ValueError(f"fingerprint {fingerprint!r:.100}: takes an object, or null")
    if copy is not None:
        _check_copy(copy)
    return node, found, copy


def _worker(node: str, given: Any, room: int) -> Worker:
    if not isinstance(given, dict):
        raise ValueError(f"running: {given!r:.100} is no worker")
    worker = Worker(
        node=node, slot=integer(given, "slot"), spawn=integer(given, "spawn"), state=text(given, "state"),
        rank=integer(given, "rank", -1), round=integer(given, "round", -1), in_place=flag(given, "in_place"),
        step=integer(given, "step"), torn=flag(given, "torn"), fresh=flag(given, "fresh"),
        told=integer(given, "told", -1), at_once=flag(given, "at_once"), joined=flag(given, "joined"),
        pid=integer(given, "pid"), log=integer(given, "log", -1),
    )  # fmt: skip
    if worker.slot >= room:
        raise ValueError(f"slot {worker.slot}: a node has {room} workers")
    if worker.state not in _STATES:
        raise ValueError(f"state {worker.state!r:.100}: takes {', '.join(_STATES)}")
    return worker


def _check_copy(copy: Any) -> None:
    _check("copy", copy, _COPY)
    _check("budget", copy.get("budget"), _BUDGET)
    if copy["budget"]["last"] is not None:
        _check("last", copy["budget"]["last"], _FAILURE)
    losses = copy.get("losses")
    parts = [losses.get("excluded"), losses.get("exclusions")] if isinstance(losses, dict) else [None]
    for part in parts:
        if not isinstance(part, dict) or not all(type(number) in (int, float) for number in part.values()):
            raise ValueError(f"losses {losses!r:.100}: takes excluded and exclusions, numbers by node")


def _check(name: str, value: Any, kinds: Mapping[str, type | tuple[type, ...]]) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{name} {value!r:.100}: takes an object")
    for key, kind in kinds.items():
        found = value.get(key)
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise ValueError(f"{key} {found!r:.100} of {name}: is no such value")
    if extra := value.keys() - kinds.keys() - {"budget", "losses"}:
        raise ValueError(f"{min(extra)!r:.100} of {name}: no such field")


def to_node(action: act.ToNode, term: int) -> dict[str, Any]:
    """Return an action as the message to its node; `term` is that of the coordinator."""
    match action:
        case act.Start(round=number, store=store, places=places):
            assert store is not None
            return {
                "kind": "start",
                "round": number,
                "store": list(store),
                "places": [dict(vars(place)) for place in places],
            }
        case act.Go(round=number, store=store, source=source, places=places):
            given = [dict(vars(place)) for place in places]
            return {
                "kind": "go",
                "round": number,
                "term": term,
                "store": list(store),
                "source": source,
                "places": given,
            }
        case act.Change(round=number, planned=planned, slots=slots):
            return {"kind": "change", "round": number, "planned": planned, "slots": list(slots)}
        case act.Dismiss(reason=reason):
            return {"kind": "dismiss", "reason": reason}
        case _:
            return {"kind": type(action).__name__.lower(), "slots": list(action.slots)}
