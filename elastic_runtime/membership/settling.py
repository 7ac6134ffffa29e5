"""What failures cost once all of a round are in: the budget, a pause, a node that is left out, the end of the job."""

from __future__ import annotations

from elastic_runtime.membership.actions import Action, Dismiss, Done, Event
from elastic_runtime.membership.failures import Failure, early_exit, root_cause
from elastic_runtime.membership.forming import Forming

__all__ = ["Settling"]

_NODE_FAILURES = 3
"""Failures in a row, all on one node and without a step between them, after which that node is left out."""
_SOUND = 60.0
"""Seconds after which a worker that fails is not held against its node."""


class Settling(Forming):
    """The steps of the machine that charge failures and end the job."""

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

    def _finish(self, state: str, reason: str) -> list[Action]:
        if self.phase == "done":
            return []
        self.phase = "done"
        dismissed: list[Action] = [Dismiss(node=node.id, reason=f"job {state}") for node in self.connected()]
        return [*dismissed, Done(state, reason)]
