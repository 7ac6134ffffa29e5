"""Rounds of a job on one machine, as a pure state machine: no I/O, the clock is passed in.

A round is one agreed membership: which nodes, which ranks. The machine is told what happened (a node is ready or
lost, a worker ended, a step was finished) and answers with what to do. A failure ends the round: the other
workers are stopped, the budget is charged, and the next round forms from the nodes that are there.

    forming ──start──▶ running ──failure / node lost──▶ stopping ──▶ forming …
                          └──all workers exit 0──▶ done
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace

from elastic_runtime.jobs.nodes import NodeRange

__all__ = ["Action", "Done", "Failure", "Pause", "RoundMachine", "Spawn", "Start", "Stop", "root_cause"]

_FORMING_PATIENCE = 5.0
"""Seconds that a round waits for nodes beyond the minimum."""
_LARGEST_DELAY = 30.0
_NODE_LOSSES = 5
"""Losses in a row, without a finished step between them, after which a node is excluded."""
_STORE = -1
"""The store's place among the losses."""
_CONSEQUENCE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|recv(alue)? failed|timed? ?out|socket|gloo|nccl|"
    r"DistBackendError|DistNetworkError|DistStoreError",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A worker that ended without success."""

    node: int
    rank: int
    code: int
    """Exit code, or minus the number of the signal that ended it."""
    message: str = ""
    """Last line of its traceback; empty if it left none."""
    step: int = 0
    """Steps that were finished when it ended."""
    uptime: float = 0.0
    """Seconds from the start of its round to its end."""

    @property
    def is_consequence(self) -> bool:
        """Whether it is what a worker shows when a peer or the store has gone: a broken connection, or an abort."""
        return self.code == -signal.SIGABRT or (
            self.code >= 0 and _CONSEQUENCE.search(self.message) is not None
        )

    @property
    def cause(self) -> str:
        """What happened, in a few words."""
        if self.code < 0:
            try:
                return f"killed by {signal.Signals(-self.code).name}"
            except ValueError:
                return f"killed by signal {-self.code}"
        return self.message or f"exit code {self.code}"


@dataclass(frozen=True)
class Spawn:
    """Start an agent for this node."""

    node: int


@dataclass(frozen=True)
class Start:
    """Start a round: the group rank of each node; a node's workers follow from it."""

    round: int
    groups: Mapping[int, int]


@dataclass(frozen=True)
class Stop:
    """Stop the workers of these nodes."""

    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Pause:
    """The next round starts no sooner than `until`, because `cause` repeated."""

    until: float
    seconds: float
    cause: str


@dataclass(frozen=True)
class Done:
    """The job is over: `succeeded`, `failed` or `stopped`, and why."""

    state: str
    reason: str


Action = Spawn | Start | Stop | Pause | Done


def root_cause(failures: list[Failure]) -> Failure:
    """Return the failure that the others followed from: a signal first, then an error of the worker's own.

    `failures` is in the order in which they were seen. A broken connection is what a worker reports when its
    peer has gone, so it counts only when nothing else is there.
    """
    own = [failure for failure in failures if not failure.is_consequence]
    signals = [failure for failure in own if failure.code < 0]
    return (signals or own or failures)[0]


class RoundMachine:
    """Membership, ranks and restart budget of one job."""

    def __init__(self, nodes: NodeRange, *, max_restarts: int, now: float) -> None:
        """Prepare a job; `begin` returns the first actions."""
        self.nodes = nodes
        self.max_restarts = max_restarts
        self.restarts = 0
        self.round = -1
        self.phase = "forming"
        self.groups: dict[int, int] = {}
        """Group rank of each node of the current round."""
        self._ready: set[int] = set()
        self._excluded: set[int] = set()
        self._spawn_at: dict[int, float] = {}
        self._losses: dict[int, int] = {}
        self._active: set[int] = set()
        self._running: dict[int, set[int]] = {}
        self._failures: list[Failure] = []
        self._node_lost = False
        self._leaving: set[int] = set()
        self._finished: set[int] = set()
        self._round_of_step = -1
        self._round_since = now
        self._forming_since = now
        self._not_before = now
        self._last: Failure | None = None
        self._repeats = 0
        self._step = 0
        self._step_at_failure = -1

    def begin(self) -> list[Action]:
        """Return the actions that start every node."""
        return [Spawn(node) for node in range(self.nodes.maximum)]

    @property
    def active(self) -> list[int]:
        """Nodes of the current round that have not reported the end of all their workers."""
        return sorted(self._active)

    @property
    def world_size(self) -> int:
        """Workers of the current round."""
        return len(self.groups) * self.nodes.workers

    # --- what happened ---------------------------------------------------------------------------------------

    def node_ready(self, node: int, now: float) -> list[Action]:
        """An agent reported that it can take work."""
        self._ready.add(node)
        return self.tick(now)

    def node_lost(self, node: int, now: float) -> list[Action]:
        """An agent is gone, and with it its workers."""
        self._ready.discard(node)
        self._active.discard(node)
        self._leaving.discard(node)
        unfinished = bool(self._running.pop(node, None))
        if self.phase == "done":
            return []
        losses = self._losses[node] = self._losses.get(node, 0) + 1
        actions: list[Action] = []
        if losses > _NODE_LOSSES:
            self._excluded.add(node)
            if self.nodes.maximum - len(self._excluded) < self.nodes.minimum:
                return self._finish(
                    "failed", f"node {node} was lost {losses} times in a row, and the job needs it"
                )
        else:
            self._spawn_at[node] = now + (0.0 if losses == 1 else min(2.0 ** (losses - 2), _LARGEST_DELAY))
        if self.phase in ("running", "stopping") and unfinished:
            self._node_lost = True
        if self.phase == "running" and unfinished:
            actions += self._end_round()
        return actions + self.tick(now)

    def node_leaving(self, node: int, now: float) -> list[Action]:
        """An agent was told to end: it stops its workers, which is no failure of theirs, and will be lost."""
        self._ready.discard(node)
        self._leaving.add(node)
        if not self._running.get(node) or self.phase not in ("running", "stopping"):
            return []
        self._node_lost = True
        return self._end_round() if self.phase == "running" else []

    def store_lost(self, how: str) -> list[Action]:
        """The store host is gone. Workers that have not met yet would wait for it: their round ends, uncharged."""
        if self.phase not in ("running", "stopping"):
            return []
        self._node_lost = True
        losses = self._losses[_STORE] = self._losses.get(_STORE, 0) + 1
        if losses > _NODE_LOSSES:
            return self._finish(
                "failed", f"the store host was lost {losses} times in a row; the last one {how}"
            )
        return self._end_round() if self.phase == "running" and self.is_meeting else []

    @property
    def is_meeting(self) -> bool:
        """Whether the current round has not finished a step yet, as far as is known."""
        return self._round_of_step < self.round

    def worker_exited(self, failure: Failure | None, *, node: int, rank: int, now: float) -> list[Action]:
        """A worker of the current round ended: `failure` is None for exit code 0."""
        ranks = self._running.get(node)
        if ranks is None or rank not in ranks:
            return []
        ranks.discard(rank)
        if failure is None:
            self._finished.add(rank)
            if self.phase == "running" and not any(self._running.values()):
                return self._finish("succeeded", "every worker ended with exit code 0")
            return []
        if self.is_failure(failure):
            self._failures.append(replace(failure, uptime=now - self._round_since))
        return self._end_round() if self.phase == "running" else []

    def is_failure(self, failure: Failure) -> bool:
        """Return whether a worker that ended so failed by itself, rather than by being stopped with its round."""
        if self.phase == "stopping" or failure.node in self._leaving:
            # 143 is what a handler of SIGTERM usually exits with.
            return failure.code not in (-signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM)
        return self.phase == "running"

    def node_stopped(self, node: int, now: float) -> list[Action]:
        """A node reported that none of its workers is left."""
        self._active.discard(node)
        self._running.pop(node, None)
        return self.tick(now)

    def progressed(self, step: int, in_round: int = -1) -> None:
        """Step `step` was finished, in this round: nodes and causes that failed before it start with a clean sheet."""
        self._round_of_step = max(self._round_of_step, in_round)
        self._step = max(self._step, step)
        self._losses.clear()

    def stop(self, reason: str) -> list[Action]:
        """The user or the platform wants the job to end."""
        return self._finish("stopped", reason)

    def tick(self, now: float) -> list[Action]:
        """Time went by; call it at least every tenth of a second."""
        actions: list[Action] = []
        if self.phase == "stopping" and not self._active:
            actions += self._after_round(now)
        if self.phase == "done":
            return actions
        for node, when in list(self._spawn_at.items()):
            if when <= now:
                del self._spawn_at[node]
                actions.append(Spawn(node))
        if self.phase == "forming" and now >= self._not_before:
            actions += self._try_start(now)
        return actions

    # --- what follows ----------------------------------------------------------------------------------------

    def _try_start(self, now: float) -> list[Action]:
        wanted = self.nodes.maximum - len(self._excluded)
        complete = len(self._ready) >= wanted
        size = self.nodes.largest(len(self._ready))
        if not size or not (complete or now - self._forming_since >= _FORMING_PATIENCE):
            return []
        self.round += 1
        self._round_since = now
        self.groups = self._group_ranks(size)
        self.phase = "running"
        self._active = set(self.groups)
        self._failures = []
        self._finished = set()
        self._node_lost = False
        workers = self.nodes.workers
        self._running = {
            node: set(range(group * workers, (group + 1) * workers)) for node, group in self.groups.items()
        }
        return [Start(self.round, dict(self.groups))]

    def _group_ranks(self, size: int) -> dict[int, int]:
        """Give `size` ready nodes their ranks: who had one below `size` keeps it, the others fill the holes."""
        kept = {node: rank for node, rank in self.groups.items() if node in self._ready and rank < size}
        free = iter(sorted(set(range(size)) - set(kept.values())))
        others = sorted(self._ready - set(kept), key=lambda node: (self.groups.get(node, size), node))
        return dict(
            sorted({**kept, **dict(zip(others, free, strict=False))}.items(), key=lambda item: item[1])
        )

    def _end_round(self) -> list[Action]:
        self.phase = "stopping"
        return [Stop(tuple(sorted(self._active)))] if self._active else []

    def _after_round(self, now: float) -> list[Action]:
        self.phase = "forming"
        self._forming_since = now
        if not self._failures:
            return []
        failure = root_cause(self._failures)
        self._failures = []
        if self._node_lost and failure.is_consequence:
            return []  # The lost node or store was the cause, and that is not charged.
        if self._finished and failure.is_consequence:
            # Named as the cause, so that a script whose workers do not end together is found out the second time.
            early = min(self._finished)
            failure = replace(
                failure,
                rank=early,
                code=0,
                message="ended with exit code 0 while the others went on",
            )
        last, self._last = self._last, failure
        if self._is_users_bug(last, failure):
            return self._finish(
                "failed",
                f"rank {failure.rank} failed twice at step {failure.step} with the same error: {failure.cause}",
            )
        self.restarts += 1
        if self.restarts > self.max_restarts:
            return self._finish(
                "failed",
                f"rank {failure.rank}: {failure.cause}; "
                f"{self.restarts} failures are more than the {self.max_restarts} restarts allowed",
            )
        advanced = self._step > self._step_at_failure
        self._step_at_failure = self._step
        same = last is not None and (last.code, last.message) == (failure.code, failure.message)
        self._repeats = self._repeats + 1 if same and not advanced else 0
        if not self._repeats:
            return []
        delay = min(2.0 ** (self._repeats - 1), _LARGEST_DELAY)
        self._not_before = now + delay
        return [Pause(self._not_before, delay, failure.cause)]

    def _is_users_bug(self, last: Failure | None, now: Failure) -> bool:
        """The same exception at the same step twice cannot be bad luck.

        A script that reports no steps is taken to fail at the same place if it ran for about as long both times.
        """
        if last is None or not now.message or now.code < 0 or now.is_consequence:
            return False
        if self._round_of_step < 0 and abs(last.uptime - now.uptime) > max(5.0, 0.25 * now.uptime):
            return False
        return (last.code, last.message, last.step) == (now.code, now.message, now.step)

    def _finish(self, state: str, reason: str) -> list[Action]:
        if self.phase == "done":
            return []
        self.phase = "done"
        nodes = tuple(sorted(self._active))
        self._spawn_at.clear()
        stop: list[Action] = [Stop(nodes)] if nodes else []
        return [*stop, Done(state, reason)]
