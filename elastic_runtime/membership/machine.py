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

from elastic_runtime.membership.actions import Action, Change, Dismiss, Event, Release, Wanted
from elastic_runtime.membership.failures import Failure, early_exit
from elastic_runtime.membership.members import Node, Worker, by_node
from elastic_runtime.membership.roster import FORMING_PATIENCE, NODE_LOSSES, difference
from elastic_runtime.membership.takeover import Takeover

__all__ = ["Membership"]

_REFUND = 2.0
"""Seconds in which the loss of a node takes back what a failure of its worker was charged."""
_STORE_LOSSES = 5
_STOPPED_BY_US = (0, -15, -9, 143)
"""How a worker ends that is being stopped: 143 is what a handler of SIGTERM usually exits with."""


class Membership(Takeover):
    """Membership, ranks and restart budget of one job. See `Roster.__init__` for the parameters."""

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
        workers = list(workers)
        if self._is_unchanged(node, workers):
            return self._connected_again(node, workers, now)
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
        node.since = now
        self._nodes[node.id] = node
        for worker in workers:
            worker.since = worker.ready_since = now
            self._workers[worker.key] = worker
            self._spawned = max(self._spawned, worker.spawn)
            self.in_place = self.in_place or (worker.in_place and self.phase != "stopping")
            if worker.rank >= 0:
                self._last_rank[worker.key] = worker.rank
        if not self._taking_over and self._of(node.id):
            actions += self._adopt(now)
        elif self._is_filling():
            return actions
        return actions + self._advance(now)

    def _connected_again(self, node: Node, workers: list[Worker], now: float) -> list[Action]:
        """Its cable was cut for a while, or ours was: the round goes on as if nothing had been."""
        self._nodes[node.id].store = node.store
        actions: list[Action] = []
        for told in workers:
            ours = self._workers[told.key]
            ours.pid = told.pid
            if ours.state != "training":
                continue
            if told.state == "finished":
                actions += self.worker_finished(node.id, told.slot, told.spawn, told.step, now)
            elif told.joined:
                ours.joined, ours.fresh = True, False
        if self.phase == "finishing" and (slots := tuple(w.slot for w in workers if w.state == "finished")):
            actions.append(Release(node=node.id, slots=slots))  # It may not have heard the first one.
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
        if charged == node and not known.leaving and now - when < _REFUND and self.budget.used:
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
        meeting = not all(w.joined for w in self._members()) if self._all_in_place() else self.is_meeting
        if self.phase != "running" or not meeting:
            return []
        self._store_losses += 1
        if self._store_losses > _STORE_LOSSES:
            reason = f"the store host was lost {self._store_losses} times in a row; the last one {how}"
            return self._finish("failed", reason)
        self._lost.add(node)
        return self._change(now, planned=False) + self._advance(now)

    def remember(self, copy: dict[str, Any], now: float) -> list[Action]:
        """Take in a copy of what an earlier coordinator knew that no agent brings."""
        if self._taking_over and copy["term"] < self.term:
            self._take_over(copy, now)
        return self._advance(now)

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
        stopped = worker.state == "ending" and self.phase == "stopping"
        if stopped and (code == 0 or self._planned_stop):
            # Whatever a program makes of SIGTERM: nothing had failed, and a real error comes again.
            return [] if self._workers else self._advance(now)
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
        if desired > before:
            self._grow_from, self._growth_asked = now, True
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
