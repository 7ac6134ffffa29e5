"""The membership of one job, as a pure state machine: no I/O, the clock is passed in.

The machine is told what happened (a node joined or is lost, a worker is ready or ended, a step was finished) and
answers with what to do (`actions`). Inputs end in `_advance`, which looks at the whole state again: an input
that is repeated, late or about a process that is gone changes nothing.

    forming ──go / start──▶ running ──somebody lost, joins or leaves──▶ changing ──all are ready──▶ forming …
                               └──all finished──▶ finishing ──▶ done

A round is one agreed set of workers with their ranks. There are two ways from one round to the next:

- **in place**, for workers that entered `elastic.run`: those that are there are told of the change, report ready with
  the step that they committed, and get their place in the next round. The one that is furthest on gives its state;
- **anew**, for any other program: all workers are stopped (`stopping`), and started again from what they saved.

Which of the two holds follows from whether the workers said that they can (`in_place`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from elastic_runtime.jobs.nodes import NodeRange
from elastic_runtime.membership.actions import Action, Change, Dismiss, Done, Event, Release, Wanted
from elastic_runtime.membership.failures import Failure, early_exit, root_cause
from elastic_runtime.membership.forming import FORMING_PATIENCE, Forming
from elastic_runtime.membership.members import Node, Worker, by_node
from elastic_runtime.membership.roster import NODE_LOSSES, difference

__all__ = ["Membership"]

_TAKEOVER_PATIENCE = 3.0
"""Seconds in which a new coordinator waits for the agents of the round that it takes over."""
_REFUND = 2.0
"""Seconds in which the loss of a node takes back what a failure of its worker was charged."""
_NODE_FAILURES = 3
"""Failures in a row, all on one node and without a step between them, after which that node is left out."""
_SOUND = 60.0
"""Seconds after which a worker that fails is not held against its node."""
_STORE_LOSSES = 5
_STOPPED_BY_US = (0, -15, -9, 143)
"""How a worker ends that is being stopped: 143 is what a handler of SIGTERM usually exits with."""


class Membership(Forming):
    """Membership, ranks and restart budget of one job. See `Roster.__init__` for the parameters."""

    def __init__(self, nodes: NodeRange, *, max_restarts: int, now: float, term: int = 1, managed: bool = True,
                 wait_limit: float = 600.0) -> None:  # fmt: skip
        """Prepare a job; see `Roster`."""
        super().__init__(
            nodes, max_restarts=max_restarts, now=now, term=term, managed=managed, wait_limit=wait_limit
        )
        self._taking_over = term > 1
        self._finishing = False
        """Whether the coordinator before this one had released the workers at their end."""
        self._takeover_until = now + _TAKEOVER_PATIENCE

    @property
    def taking_over(self) -> bool:
        """Whether the agents have not told yet what the coordinator before this one knew."""
        return self._taking_over

    # --- nodes -------------------------------------------------------------------------------------------------

    def node_joined(
        self, node: Node, now: float, *, fingerprint: dict[str, Any] | None = None,
        workers: Iterable[Worker] = (), copy: dict[str, Any] | None = None,
    ) -> list[Action]:  # fmt: skip
        """An agent connected. `workers` run there already; `copy` is what it keeps of an earlier coordinator."""
        if self.phase == "done":
            return [Dismiss(node=node.id, reason="the job is over")]
        if copy is not None and copy["term"] > self.term:
            return [Dismiss(node=node.id, reason=f"term {self.term} is stale: term {copy['term']} was seen")]
        actions: list[Action] = []
        if node.id in self._nodes:
            actions += self.node_lost(node.id, now)
        if copy is not None and copy["term"] < self.term:
            self._take_over(copy, now)
        if self.fingerprint is None:
            self.fingerprint = fingerprint
        elif fingerprint is not None and (why := difference(self.fingerprint, fingerprint)):
            text = f"node {node.id} refused: {why}"
            told = Event(kind="node_refused", text=text, details={"node": node.id})
            return [*actions, told, Dismiss(node=node.id, reason=why)]
        if self.losses.is_excluded(node.id) and not self.losses.usable(node.id, now):
            seconds = self.losses.until(node.id) - now
            why = f"node {node.id} failed too often and is left out for {seconds:.0f} s more"
            return [*actions, Dismiss(node=node.id, reason=why)]
        self._nodes[node.id] = node
        for worker in workers:
            worker.since = worker.ready_since = now
            self._workers[worker.key] = worker
            self._spawned = max(self._spawned, worker.spawn)
            self.in_place = self.in_place or worker.in_place
            if worker.rank >= 0:
                self._last_rank[worker.key] = worker.rank
        if not self._taking_over and self._of(node.id):
            actions += self._adopt(now)
        elif self._is_filling():
            return actions
        return actions + self._advance(now)

    def _is_filling(self) -> bool:
        """Whether a first round still waits for nodes, so that one more decides nothing (keeps joining linear)."""
        expected = -(-self.desired // self.nodes.workers)
        return (
            self.phase == "forming"
            and not self._workers
            and len(self._nodes) < expected
            and not self._taking_over
        )

    def node_lost(self, node: str, now: float) -> list[Action]:
        """An agent is gone, and with it its workers."""
        known = self._nodes.pop(node, None)
        if known is None or self.phase == "done":
            return []
        gone = self._of(node)
        for worker in gone:
            del self._workers[worker.key]
            self._awaited.discard(worker.key)
        actions: list[Action] = []
        if not known.leaving and self.losses.lost(node, now):
            times = NODE_LOSSES + 1
            usable = self.nodes.maximum - sum(
                map(self.losses.is_excluded, map(str, range(self.nodes.maximum)))
            )
            if self._managed and usable < self.nodes.minimum:
                reason = f"node {node} was lost {times} times in a row, and the job needs it"
                return self._finish("failed", reason)
            seconds = self.losses.until(node) - now
            text = f"node {node} was lost {times} times in a row: left out for {seconds:.0f} s"
            actions.append(Event(kind="node_excluded", text=text, details={"node": node}))
        charged, when = self._last_charge
        if charged == node and now - when < _REFUND and self.budget.used:
            self.budget.used -= 1  # Its worker was only the first of it that was seen to end.
            self._last_charge = ("", when)
        if any(worker.rank >= 0 for worker in gone):
            self._lost.add(node)
        return actions + self._members_gone(gone, now) + self._advance(now)

    def node_leaving(self, node: str, now: float) -> list[Action]:
        """An agent was told to end; its workers are no failures, however they end."""
        known = self._nodes.get(node)
        if known is None or known.leaving or self.phase == "done":
            return []
        known.leaving = True
        if not self._all_in_place() and any(w.state != "ending" for w in self._of(node)):
            self._lost.add(node)
            if self.phase in ("running", "finishing"):
                return self._change(now, planned=True) + self._advance(now)
        return self._advance(now)

    def node_store(self, node: str, store: tuple[str, int] | None, now: float) -> list[Action]:
        """A node has a fresh store for the next round."""
        if node not in self._nodes or self.phase == "done":
            return []
        self._nodes[node].store = store
        return self._advance(now) if self.phase == "forming" and not self._is_filling() else []

    def store_lost(self, node: str, how: str, now: float) -> list[Action]:
        """A node's store host is gone. Workers that have not met yet would wait for it: their round ends, uncharged."""
        if self.phase != "running" or not self.is_meeting or self._all_in_place():
            return []  # Workers in place report ready again when they cannot join.
        self._store_losses += 1
        if self._store_losses > _STORE_LOSSES:
            reason = f"the store host was lost {self._store_losses} times in a row; the last one {how}"
            return self._finish("failed", reason)
        self._lost.add(node)
        return self._change(now, planned=False) + self._advance(now)

    # --- workers -----------------------------------------------------------------------------------------------

    def worker_started(self, node: str, slot: int, spawn: int, pid: int) -> None:
        """A worker runs."""
        if worker := self._find(node, slot, spawn):
            worker.pid = pid

    def worker_hello(self, node: str, slot: int, spawn: int, now: float) -> list[Action]:
        """A worker entered `elastic.run`: it can go on in place."""
        worker = self._find(node, slot, spawn)
        if worker is None or worker.in_place:
            return []
        worker.in_place = True
        if worker.state == "training":
            worker.state = "starting"
        if self.in_place or self.phase not in ("running", "forming"):
            return []
        self.in_place = True
        for other in self._workers.values():
            if other.state == "training" and not other.in_place:
                other.state = "starting"
        self.phase, self._forming_since = "forming", now
        return self._advance(now)

    def worker_ready(
        self, node: str, slot: int, spawn: int, now: float, *, step: int, torn: bool, fresh: bool, round: int,
        told: int,
    ) -> list[Action]:  # fmt: skip
        """A worker waits to join the next round.

        It has committed `step` steps. `round` is the newest round that it was let into, `told` the newest one that it
        was told to get ready for: they tell a message that was under way from an answer to what was said since.
        """
        worker = self._find(node, slot, spawn)
        if worker is None or worker.state == "ending" or self.phase == "done":
            return []
        if worker.state == "training" and round < worker.round and told <= worker.round:
            return []  # Said before it got its place in the round.
        was, worker.state = worker.state, "ready"
        worker.step, worker.torn, worker.fresh = step, torn, fresh
        worker.in_place, worker.ready_since = True, now
        self._awaited.discard(worker.key)
        actions: list[Action] = []
        if was in ("training", "finished") and self.phase == "running" and worker.round == self.round:
            if worker.told > self.round:
                self.phase, self._changing_since = "changing", now  # The agreed boundary is reached.
            else:
                # It could not join, or lost its round for a reason that nobody else has reported.
                actions += self._change(now, planned=False)
        if self.phase == "changing" and self._awaited:
            return actions
        if self._is_gathering() and fresh:
            return actions
        return actions + self._advance(now)

    def _is_gathering(self) -> bool:
        """Whether a first round waits for workers that start, so that one more which is ready decides nothing yet."""
        return (
            self.phase == "forming"
            and self._started_only
            and len(self._workers) <= self.desired
            and self._any_in("starting")
        )

    def worker_joined(self, node: str, slot: int, spawn: int, round_: int) -> None:
        """A worker has met the others of the round and trains."""
        worker = self._find(node, slot, spawn)
        if worker is not None and worker.round == round_ and worker.state == "training":
            worker.joined, worker.fresh = True, False

    def worker_finished(self, node: str, slot: int, spawn: int, step: int, now: float) -> list[Action]:
        """A worker has no more steps to do and waits for the others."""
        worker = self._find(node, slot, spawn)
        if worker is None or worker.state not in ("training", "finished") or self.phase == "done":
            return []
        worker.state, worker.step, worker.joined, worker.fresh = "finished", step, True, False
        if worker.told > self.round:
            # A planned change that it can no longer reach by a step: it has to come back from here.
            worker.at_once = True
            return [Change(node=node, round=worker.told, planned=False, slots=(slot,))]
        if self.phase == "running" and self._any_in("training"):
            return []  # The others have steps to do.
        return self._advance(now)

    def worker_exited(
        self, node: str, slot: int, spawn: int, now: float, *, code: int, message: str = ""
    ) -> list[Action]:
        """A worker ended, with `code` (minus the number of the signal that ended it)."""
        worker = self._find(node, slot, spawn)
        if worker is None:
            return []
        del self._workers[worker.key]
        self._awaited.discard(worker.key)
        if self.phase == "done":
            return []
        if code == 0 and (not self.in_place or self.phase == "finishing"):
            self._ended_well.add(worker.rank)
            if self.phase in ("running", "finishing") and self._any_in("training", "finished"):
                return []  # The others are still to end.
            return self._advance(now)
        known = self._nodes.get(node)
        excused = worker.state == "ending" or known is None or known.leaving
        failure = Failure(
            node=node, rank=worker.rank if worker.rank >= 0 else self._last_rank.get(worker.key, 0), code=code,
            message=message, step=self.budget.step, uptime=now - worker.since,
            contributed=0 <= worker.round <= self._round_of_step,
        )  # fmt: skip
        actions: list[Action] = []
        if not excused or (code not in _STOPPED_BY_US and not failure.is_consequence):
            failure = early_exit(failure, failure.rank) if code == 0 else failure
            self._failures.append(failure)
            member = worker.rank >= 0 and worker.round == self.round and worker.state != "starting"
            actions.append(self._told(failure, member=member))
        if self.phase == "stopping" and self._workers:
            return actions  # It goes on when the last one has ended.
        return actions + self._members_gone([worker], now) + self._advance(now)

    def _members_gone(self, gone: Iterable[Worker], now: float) -> list[Action]:
        """Workers are gone: if they were in the round, it ends."""
        if self.phase not in ("running", "changing", "finishing"):
            return []
        if any(w.rank >= 0 and w.round == self.round and w.state != "starting" for w in gone):
            return self._change(now, planned=False)
        return []

    def progressed(self, step: int, round_: int = -1) -> None:
        """`step` steps are finished, the last in `round_`: nodes that were lost before start with a clean sheet."""
        self._round_of_step = max(self._round_of_step, round_)
        self.budget.step = max(self.budget.step, step)
        self.losses.progressed()
        self._store_losses = 0

    # --- what somebody wants -----------------------------------------------------------------------------------

    def scale(self, desired: int, now: float) -> list[Action]:
        """Change how many workers the job should have; the caller has checked the range."""
        if self.phase == "done" or desired == self.desired:
            return []
        before, self.desired = self.desired, desired
        text = f"desired size {desired} workers (was {before})"
        return [Event(kind="scale", text=text, details={"desired": desired}), *self._advance(now)]

    def stop(self, reason: str) -> list[Action]:
        """The user or the platform wants the job to end."""
        return self._finish("stopped", reason)

    def fail(self, reason: str) -> list[Action]:
        """The job cannot be led any more."""
        return self._finish("failed", reason)

    def tick(self, now: float) -> list[Action]:
        """Time went by; call it at least every tenth of a second."""
        return self._advance(now)

    # --- the same look at everything after each input -----------------------------------------------------------

    def _advance(self, now: float) -> list[Action]:
        if self._taking_over:
            actions = self._end_takeover(now)
            if self._taking_over:
                return actions
        else:
            actions = []
        steps: list[Callable[[float], list[Action]]] = [
            self._settle, self._collect, self._form, self._end, self._invite, self._size, self._wait,
        ]  # fmt: skip
        for step in steps:
            if self.phase == "done":
                break
            actions += step(now)
        return actions

    def _settle(self, now: float) -> list[Action]:
        """Charge the failures once all of them are in: at once if nobody has to come back from a round."""
        unfinished = (self.phase == "changing" and self._awaited) or (
            self.phase == "stopping" and self._workers
        )
        if not self._failures or unfinished:
            return []
        failures, self._failures = self._failures, []
        failure = root_cause(failures)
        if failure.is_consequence and self._lost:
            return []  # The lost node or store was the cause, and that is not charged.
        if self._ended_well and failure.is_consequence:
            # Named as the cause, so that a script whose workers do not end together is found out the second time.
            failure = early_exit(failure, min(self._ended_well))
        verdict = self.budget.charge(failure, places_known=self._round_of_step >= 0)
        if verdict.fatal:
            return self._finish("failed", verdict.fatal)
        self._last_charge = (failure.node, now)
        actions: list[Action] = []
        if verdict.delay:
            self._not_before = now + verdict.delay
            text = f"waiting {verdict.delay:.0f} s before the next try: {failure.cause} again"
            actions.append(Event(kind="pause", text=text, details={"seconds": verdict.delay}))
        return actions + self._suspect(failure, now)

    def _suspect(self, failure: Failure, now: float) -> list[Action]:
        """Leave out a node whose workers always fail, if the others can do without it."""
        node, count = self._suspected
        if failure.uptime >= _SOUND or failure.contributed:
            self._suspected = ("", 0)
            return []
        count = count + 1 if node == failure.node else 1
        self._suspected = (failure.node, count)
        others = sum(n.workers for n in self._nodes.values() if n.id != failure.node and not n.leaving)
        known = self._nodes.get(failure.node)
        if count <= _NODE_FAILURES or not self._largest(others) or known is None:
            return []
        self._suspected = ("", 0)
        self.losses.exclude(failure.node, now)
        known.leaving = True
        seconds = self.losses.until(failure.node) - now
        text = f"node {failure.node}: its workers failed {count} times in a row: left out for {seconds:.0f} s"
        self._not_before = now
        return [
            Event(kind="node_excluded", text=text, details={"node": failure.node}),
            Dismiss(node=failure.node, reason=text),
        ]

    def _end(self, now: float) -> list[Action]:
        """The end: all are finished, or all have ended well."""
        if self.phase == "running" and self.in_place:
            members = self._members()
            if members and all(w.state == "finished" for w in members):
                self.phase = "finishing"
                return [Release(node=node, slots=slots) for node, slots in by_node(members).items()]
        elif self.phase == "finishing":
            if not self._members():
                return self._finish("succeeded", "every worker ended with exit code 0")
        elif self.phase == "running" and not self._workers and not self._failures:
            return self._finish("succeeded", "every worker ended with exit code 0")
        return []

    def _size(self, now: float) -> list[Action]:
        """Say which nodes should be there, and send away those that should not."""
        actions: list[Action] = []
        if not self._managed:
            return actions
        wanted = tuple(self._names(now))
        if wanted != self._told_wanted:
            self._told_wanted = wanted
            actions.append(Wanted(wanted))
        keep = set(self._keep(now))
        for node in self.connected():
            if node.id not in keep and not node.leaving and not self._of(node.id):
                node.leaving = True
                actions.append(Dismiss(node=node.id, reason="the job was made smaller"))
        return actions

    def _wait(self, now: float) -> list[Action]:
        """Say once what a job below its minimum waits for, and give up after the limit."""
        alive = sum(w.state != "ending" for w in self._workers.values())
        have = alive if self.in_place else sum(n.workers for n in self._available())
        if self.phase != "forming" or self._largest(have) or now < self._not_before:
            self._waiting_since, self._waiting_told = None, False
            return []
        if self._waiting_since is None:
            self._waiting_since = now
        what = f"at least {self.minimum} workers are needed, {have} are there"
        if now - self._waiting_since > self._wait_limit:
            return self._finish("failed", f"waited {self._wait_limit:.0f} s: {what}")
        if self._waiting_told or now - self._waiting_since < FORMING_PATIENCE:
            return []
        self._waiting_told = True
        text = f"waiting for more workers: {what}; giving up after {self._wait_limit:.0f} s"
        return [Event(kind="waiting", text=text, details={"minimum": self.minimum, "workers": have})]

    def _finish(self, state: str, reason: str) -> list[Action]:
        if self.phase == "done":
            return []
        self.phase = "done"
        dismissed: list[Action] = [Dismiss(node=node.id, reason=f"job {state}") for node in self.connected()]
        return [*dismissed, Done(state, reason)]

    # --- a new coordinator, or a node that was out of reach ---------------------------------------------------------

    def _take_over(self, copy: dict[str, Any], now: float) -> None:
        """Go on from an agent's copy of what an earlier coordinator knew."""
        self.budget.resume(copy["budget"])
        self.losses.resume(copy["losses"], now)
        self._round_of_step = max(self._round_of_step, copy["round_of_step"])
        self.fingerprint = self.fingerprint or copy["fingerprint"]
        if copy["round"] >= self.round:
            self.round, self.world_size = copy["round"], copy["world_size"]
            self.in_place, self.desired = copy["in_place"], copy["desired"]
            self._finishing = copy["finishing"]

    def _end_takeover(self, now: float) -> list[Action]:
        if now < self._takeover_until and len(self._workers) < self.world_size:
            return []
        known = [w for w in self._workers.values() if w.round == self.round or w.state == "ready"]
        unformed = self.round < 0 and len(self._nodes) < -(-self.desired // self.nodes.workers)
        if now < self._takeover_until and (unformed or len(known) < self.world_size):
            return []
        self._taking_over = False
        if self._finishing:
            self.phase = "finishing"
            return [Release(node=n, slots=slots) for n, slots in by_node(self._members()).items()]
        return self._adopt(now) if self.round >= 0 else []

    def _adopt(self, now: float) -> list[Action]:
        """Make sense of workers that run already: of this round, or of one that has ended meanwhile."""
        stale = [
            w for w in self._workers.values()
            if w.state in ("training", "finished") and w.round != self.round and not w.in_place
        ]  # fmt: skip
        actions = self._kill(stale)
        active = [w for w in self._workers.values() if w.state in ("training", "finished")]
        self._awaited |= {w.key for w in active if w.told > self.round}
        members = self._members()
        waiting = [w for w in self._workers.values() if w.state == "ready" and w.rank >= 0]
        if self.phase == "forming" and members:
            self.phase, self._round_since, self._started_only = "running", now, False
            if len(members) != self.world_size or waiting:
                return actions + self._change(now, planned=False)
        if self.phase == "changing":
            return actions + self._change(now, planned=False)
        return actions + self._tell([w for w in active if w not in members], planned=False)
