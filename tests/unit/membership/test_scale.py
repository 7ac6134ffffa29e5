"""What the machine does for N nodes grows with N, not with its square: counted in lines that run, so never flaky."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from elastic_runtime.jobs.nodes import NodeRange
from elastic_runtime.membership import actions as act
from elastic_runtime.membership.machine import Membership
from elastic_runtime.membership.members import Node

SMALL, LARGE = 64, 256
MARGIN = 1.5
"""How much more than linear is still taken for linear: sorting, and what a job costs whatever its size."""


def lines_run(function: Callable[[], object]) -> int:
    """Return how many lines of Python run in `function`; a turn of a comprehension counts as one."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return lines


class Job:
    """A job of N nodes with a worker each, told what agents would tell."""

    def __init__(self, nodes: int, *, in_place: bool = True) -> None:
        self.names = [f"node-{number}" for number in range(nodes)]
        self.machine = Membership(NodeRange(minimum=1, maximum=nodes), max_restarts=3, now=0.0, managed=False)
        self.in_place = in_place
        self.spawns: dict[str, int] = {}

    def form(self) -> None:
        """Let all nodes join, and their workers start."""
        machine, actions = self.machine, []
        for name in self.names:
            actions += machine.node_joined(Node(id=name, workers=1, store=(name, 1)), 1.0)
        self._started(actions)

    def _started(self, actions: list[act.Action]) -> None:
        machine = self.machine
        starts = [action for action in actions if isinstance(action, act.Start)]
        assert len(starts) == len(self.names)
        self.spawns = {start.node: start.places[0].spawn for start in starts}
        if self.in_place:
            for name, spawn in self.spawns.items():
                machine.worker_started(name, 0, spawn, 1)
                machine.worker_hello(name, 0, spawn, 1.0)
            self._ready(fresh=True, told=-1, round_=-1)

    def _ready(self, *, fresh: bool, told: int, round_: int) -> None:
        actions: list[act.Action] = []
        for name, spawn in self.spawns.items():
            actions += self.machine.worker_ready(
                name, 0, spawn, 2.0, step=0, torn=False, fresh=fresh, round=round_, told=told
            )
        went = [action for action in actions if isinstance(action, act.Go)]
        assert {go.node for go in went} == set(self.spawns), "every node has its place"
        assert {go.places[0].rank for go in went} == set(range(len(self.spawns)))
        for name, spawn in self.spawns.items():
            self.machine.worker_joined(name, 0, spawn, went[0].round)
            self.machine.node_store(name, (name, 2 + went[0].round), 2.0)

    def lose_one(self) -> None:
        """Kill the node of rank 0, and let the others come back."""
        lost = self.names.pop(0)
        actions = self.machine.node_lost(lost, 2.0)
        del self.spawns[lost]
        assert {action.node for action in actions if isinstance(action, act.Change)} == set(self.names)
        self._ready(fresh=False, told=1, round_=0)
        assert self.machine.round == 1

    def finish(self) -> None:
        """Let all workers finish and end well."""
        machine, actions = self.machine, []
        if self.in_place:
            for name, spawn in self.spawns.items():
                actions += machine.worker_finished(name, 0, spawn, 9, 3.0)
            assert sum(isinstance(action, act.Release) for action in actions) == len(self.names)
        for name, spawn in self.spawns.items():
            actions += machine.worker_exited(name, 0, spawn, 3.0, code=0)
        assert machine.phase == "done"
        assert act.Done("succeeded", "every worker ended with exit code 0") in actions

    def restart(self) -> None:
        """Let one worker fail, so that all of a script that cannot recover in place are started anew."""
        machine, actions = self.machine, []
        for number, (name, spawn) in enumerate(list(self.spawns.items())):
            code, message = (1, "ValueError: no") if number == 0 else (-15, "")
            actions += machine.worker_exited(name, 0, spawn, 3.0, code=code, message=message)
        for name in self.names:
            actions += machine.node_store(name, (name, 3), 3.0)
        self._started(actions)


CASES: dict[str, tuple[bool, tuple[str, ...], str]] = {
    "form": (True, (), "form"),
    "reform": (True, ("form",), "lose_one"),
    "finish": (True, ("form",), "finish"),
    "start anew": (False, (), "form"),
    "restart": (False, ("form",), "restart"),
    "end": (False, ("form",), "finish"),
}


@pytest.mark.parametrize(("in_place", "first", "then"), CASES.values(), ids=CASES.keys())
def test_work_is_linear(in_place: bool, first: tuple[str, ...], then: str) -> None:
    costs = []
    for nodes in (SMALL, LARGE):
        job = Job(nodes, in_place=in_place)
        for name in first:
            getattr(job, name)()
        costs.append(lines_run(getattr(job, then)))
    assert costs[1] <= MARGIN * costs[0] * LARGE / SMALL, f"{costs} lines for {SMALL} and {LARGE} nodes"


def test_the_copy_that_agents_keep_does_not_grow_with_the_job() -> None:
    sizes = []
    for nodes in (SMALL, LARGE):
        job = Job(nodes)
        job.form()
        sizes.append(len(str(job.machine.copy(3.0))))
    assert sizes[1] - sizes[0] <= 8  # A digit more here and there.
