"""Another coordinator takes over in every phase: what the agents tell is all that it knows, and no step is lost."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from elastic_runtime.membership import actions as act

sys.path.insert(0, str(Path(__file__).parent))
from directed import Job


def since(job: Job, before: int) -> list[act.Action]:
    """What was asked for after the first `before` actions, but for who is wanted and what is told."""
    return [action for action in job.log[before:] if not isinstance(action, act.Wanted | act.Event)]


@pytest.mark.parametrize("in_place", [True, False])
def test_workers_that_lost_nobody_are_left_alone(in_place: bool) -> None:
    for order in itertools.permutations("012"):
        job = Job("1:3", in_place=in_place)
        job.train(5)
        procs, before = list(job.members()), len(job.log)
        job.take_over(agents=list(order))
        assert since(job, before) == []
        assert job.members() == procs
        job.wait(30)
        assert since(job, before) == []
        assert (job.machine.phase, job.machine.round, job.machine.world_size) == ("running", 0, 3)
        assert not job.machine.taking_over
        job.train(2)
        job.exit(job.rank(1), -9)
        assert job.last.number == 1
        assert job.machine.term == 2


def test_what_the_one_before_knew_comes_from_the_copies_and_the_newest_counts() -> None:
    job = Job("1:3", max_restarts=3, in_place=False)
    job.train(2)
    job.exit(job.rank(0), 1, "ValueError: a")
    old = job.copies["1"]
    job.train(3)
    job.exit(job.rank(1), 1, "ValueError: b")
    job.do(job.machine.scale(2, job.now))
    job.machine.losses.exclude("2", job.now)
    job.do([])
    job.copies["0"] = old
    assert job.machine.budget.used == 2
    job.now += 100  # Another clock.
    job.take_over(agents=["0", "1"])
    machine = job.machine
    assert (machine.budget.used, machine.desired, machine.round) == (2, 2, 3)
    assert machine.losses.is_excluded("2")
    assert machine.losses.until("2") - job.now == pytest.approx(60)
    job.exit(job.rank(0), 1, "ValueError: c")
    assert job.done is None
    job.exit(job.rank(0), 1, "ValueError: d")
    assert job.done is not None
    assert job.done.reason.endswith("4 failures are more than the 3 restarts allowed")


def test_the_same_error_before_and_after_a_takeover_is_seen_as_the_same() -> None:
    job = Job("1:2", in_place=False)
    job.train(3)
    job.exit(job.rank(0), 1, "KeyError: 'x'")
    job.take_over()
    job.exit(job.rank(0), 1, "KeyError: 'x'")
    assert job.done is not None
    assert "failed twice at step 3" in job.done.reason


@pytest.mark.parametrize("told", [set(), {"0"}, {"1", "2"}, {"0", "1", "2"}])
def test_a_planned_change_that_only_some_were_told_of_is_gone_through(told: set[str]) -> None:
    job = Job("1:3")
    job.train(3)
    job.machine.desired = 2
    job.do([])
    for proc in job.members():
        if proc.node in told:
            proc.told = 1
    job.take_over()
    job.wait(1)
    job.train()
    job.wait(1)
    assert job.last.world_size == 2
    assert job.last.source is not None
    assert job.last.source >= 0
    assert {proc.step for proc in job.members()} == {4}
    assert job.machine.budget.used == 0


@pytest.mark.parametrize("told", [set(), {"0"}, {"1"}, {"0", "1"}])
@pytest.mark.parametrize("ready", [set(), {"0"}, {"1"}])
def test_a_change_at_once_that_only_some_were_told_of_is_gone_through(
    told: set[str], ready: set[str]
) -> None:
    job = Job("1:3")
    job.train(3)
    job.held = {"2"}
    job.alive.discard("2")
    del job.procs["2", 0]  # Its end was seen by the coordinator that is gone, and by nobody else.
    for proc in job.members():
        if proc.node in told:
            proc.told, proc.at_once = 1, True
        if proc.node in told & ready:
            proc.state = "ready"
    job.take_over()
    job.wait(3.5)
    for proc in [proc for proc in job.procs.values() if proc.at_once and proc.state == "training"]:
        job.ready(proc)
    job.wait(1)
    assert job.machine.phase == "running"
    assert (job.last.world_size, {proc.step for proc in job.members()}) == (2, {3})
    assert (job.last.source or 0) >= 0
    assert job.last.number >= 1


@pytest.mark.parametrize("state", ["starting", "ready"])
def test_a_first_round_that_was_forming(state: str) -> None:
    job = Job("1:2", start=False)
    job.slow = {("0", 0), ("1", 0)}
    job.do(job.machine.tick(0.0))
    for proc in job.procs.values():
        job.do(job.machine.worker_hello(proc.node, proc.slot, proc.spawn, job.now))
    assert not job.rounds
    for proc in job.procs.values():
        proc.state = state
    job.take_over()
    for proc in list(job.procs.values()):
        if state == "starting":
            job.ready(proc)
    job.wait(9)
    assert job.last.world_size == 2
    assert job.last.source == -1
    assert job.done is None


@pytest.mark.parametrize("joined", [set(), {"0"}, {"0", "1"}])
def test_a_round_whose_workers_were_meeting(joined: set[str]) -> None:
    job = Job("1:2", start=False)
    job.shy = {(node, 0) for node in {"0", "1"} - joined}
    job.do(job.machine.tick(0.0))
    job.take_over()
    before = len(job.log)
    job.wait(30)
    assert since(job, before) == [], "they are about to meet"
    for proc in job.members():
        job.joined(proc)
    job.wait(60)
    assert since(job, before) == []
    assert job.machine.round == 0


def test_half_of_the_places_of_a_round_were_told() -> None:
    job = Job("1:2")
    job.train(3)
    first, second = job.rank(0), job.rank(1)
    for proc in (first, second):
        proc.told, proc.at_once, proc.state = 1, True, "ready"
    # `go` for round 1 reached only the first one.
    first.state, first.round, first.at_once, first.joined = "training", 1, False, False
    job.copies["0"] = {**job.copies["0"], "round": 1}
    job.take_over()
    job.wait(4)
    for proc in (first, second):
        if proc.at_once and proc.state == "training":
            job.ready(proc)
    job.wait(1)
    assert job.machine.phase == "running"
    assert job.last.number >= 2
    assert job.last.world_size == 2
    assert job.members() == [first, second]


@pytest.mark.parametrize("ended", [set(), {"0"}, {"0", "1"}])
def test_a_job_that_was_finishing_ends_well(ended: set[str]) -> None:
    job = Job("1:2")
    job.train(3)
    job.deaf = {("0", 0), ("1", 0)}
    for proc in list(job.members()):
        job.finish(proc)
    assert job.machine.phase == "finishing"
    for name in ended:
        for proc in job.of(name):
            del job.procs[proc.node, proc.slot]
    job.deaf.clear()
    job.take_over()
    job.wait(4)
    assert job.done == act.Done("succeeded", "every worker ended with exit code 0")


def test_all_through_but_not_released_yet() -> None:
    job = Job("1:2")
    job.train(3)
    for proc in job.members():
        proc.state = "finished"
    job.take_over()
    job.wait(1)
    assert job.done == act.Done("succeeded", "every worker ended with exit code 0")


@pytest.mark.parametrize("in_place", [True, False])
def test_a_node_that_died_with_the_coordinator_is_not_waited_for_long(in_place: bool) -> None:
    job = Job("1:3", in_place=in_place)
    job.train(3)
    job.held = {"2"}
    job.alive.discard("2")
    del job.procs["2", 0]
    job.take_over()
    assert job.machine.taking_over
    job.wait(3.2)
    assert not job.machine.taking_over
    job.wait(6)
    assert (job.machine.phase, job.last.world_size) == ("running", 2)
    assert job.machine.budget.used == 0


def test_twice_in_a_row_also_before_anything_was_told() -> None:
    job = Job("1:3")
    job.train(3)
    procs = job.members()
    job.take_over(agents=[])
    job.take_over(agents=["1"])
    job.take_over()
    job.wait(10)
    assert job.members() == procs
    assert (job.machine.term, job.machine.round, job.machine.phase) == (4, 0, "running")


def test_a_stale_coordinator_gets_nobody() -> None:
    job = Job("1:2")
    job.train(3)
    stale = job.machine
    job.take_over()
    job.wait(1)
    copy = job.copies["0"]
    assert copy["term"] == 2
    from elastic_runtime.membership.members import Node

    before = stale.copy(job.now)
    actions = stale.node_joined(Node(id="0", workers=1), job.now, copy=copy)
    assert actions == [act.Dismiss(node="0", reason="term 1 is stale: term 2 was seen")]
    assert stale.copy(job.now) == before


def test_an_agent_that_was_cut_off_comes_back_with_workers_of_an_older_round() -> None:
    job = Job("1:3")
    job.train(3)
    cut = job.rank(2)
    job.deaf = {("2", 0)}
    job.do(job.machine.node_lost("2", job.now))
    assert job.last.world_size == 2
    job.train(4)
    job.deaf.clear()
    job.rejoin("2")
    assert cut.at_once
    job.train()
    job.wait(2)
    assert job.last.world_size == 3
    assert {proc.step for proc in job.members()} >= {8}
    assert cut in job.members()
    assert job.last.source != cut.rank


def test_an_unmodified_worker_of_an_older_round_is_killed() -> None:
    job = Job("1:2", in_place=False)
    job.held = {"1"}
    job.do(job.machine.node_lost("1", job.now))
    job.wait(6)
    assert job.last.nodes == ["0"]
    left = job.procs["1", 0]
    job.rejoin("1")
    assert left not in job.procs.values()
    assert act.Kill(node="1", slots=(0,)) in job.log
    assert job.machine.budget.used == 0


def test_an_agent_that_connects_again_replaces_its_old_connection() -> None:
    job = Job("1:2")
    job.train(2)
    number = job.last.number
    job.rejoin("1")  # The old connection has not been seen to end.
    job.wait(1)
    assert {proc.node for proc in job.members()} == {"0", "1"} or job.machine.phase == "changing"
    for proc in job.members():
        if proc.told > proc.round:
            job.ready(proc)
    job.wait(3)
    job.train()
    assert job.last.world_size == 2
    assert job.last.number >= number
    assert job.machine.budget.used == 0


def test_a_node_that_was_cut_off_before_it_could_stop_its_workers_is_told_again() -> None:
    job = Job("1:2", in_place=False)
    job.deaf = {("0", 0)}
    job.exit(job.rank(1), -9)
    assert job.machine.phase == "stopping"
    job.rejoin("0")  # What it was told went down with the old connection: its worker trains.
    stops = [action for action in job.log if action == act.Stop(node="0", slots=(0,))]
    assert len(stops) == 2
    job.exit(job.procs["0", 0], -15)
    assert (job.machine.phase, job.last.number, job.last.world_size) == ("running", 1, 2)


def test_a_left_out_node_that_connected_before_that_was_known_is_sent_away() -> None:
    job = Job("1:2", managed=False, in_place=False)
    job.join("a")
    job.join("b")
    job.held = {"b"}
    job.lose("b")
    job.machine.losses.exclude("b", job.now)
    job.do([])
    job.wait(6)
    assert job.last.nodes == ["a"]
    job.take_over(agents=[])
    job.join("b")
    job.rejoin("a")
    job.wait(4)
    assert "b" not in job.alive
    assert job.last.nodes == ["a"]
