"""Workers that entered `elastic.run`: survivors go on in the next round, others are let in at a step boundary."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from elastic_runtime.membership import actions as act

sys.path.insert(0, str(Path(__file__).parent))
from directed import Job

BROKEN = "RuntimeError: Connection closed by peer"


def kinds(actions: list[act.Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_all_start_and_the_first_round_has_no_source() -> None:
    job = Job("1:3")
    assert list(job.rounds) == [0]
    assert (job.last.source, job.last.nodes, job.last.world_size) == (-1, ["0", "1", "2"], 3)
    assert job.machine.in_place
    assert job.told("round") == ["round 0: 3 workers on 3 nodes"], "told once"


def test_a_killed_worker_does_not_stop_the_others_and_its_successor_joins_at_a_boundary() -> None:
    job = Job("1:3")
    job.train(5)
    survivors = {rank: job.rank(rank) for rank in (0, 2)}
    job.slow = {("1", 0)}
    job.exit(job.rank(1), -signal.SIGKILL)
    assert (job.last.number, job.last.nodes, job.last.world_size) == (1, ["0", "2"], 2)
    assert job.last.source == 0
    assert [proc.rank for proc in job.members()] == [0, 1], "rank 2 is above the new size and fills the hole"
    assert survivors[0] is job.rank(0)
    assert survivors[2] is job.rank(1)
    assert job.machine.budget.used == 1
    job.train(2)
    joiner = job.procs["1", 0]
    job.enter(joiner)
    assert job.last.number == 1, "not before the boundary"
    job.train(1)
    assert (job.last.number, job.last.world_size, job.last.source) == (2, 3, 0)
    assert joiner.rank == 2
    assert survivors[0].rank == 0
    assert survivors[2].rank == 1


def test_the_furthest_survivor_gives_its_state_whatever_its_rank() -> None:
    job = Job("1:3")
    job.train(5)
    job.held = {"0"}
    job.rank(2).step += 1
    job.rank(0).step += 1
    job.lose("0")
    assert job.last.source == next(proc.rank for proc in job.members() if proc.step == 6)


def test_a_torn_worker_is_never_the_source_though_it_is_further_on() -> None:
    job = Job("1:3")
    job.train(5)
    job.held = {"0"}
    torn = job.rank(1)
    torn.step, torn.torn = 6, True
    job.lose("0")
    source = job.rank(job.last.source or 0)
    assert source.step == 5
    assert source is not torn


def test_when_all_are_torn_they_are_killed_and_the_job_goes_on_from_its_checkpoint() -> None:
    job = Job("1:3", max_restarts=3)
    job.train(5)
    job.held = {"0"}
    old = [job.rank(1), job.rank(2)]
    for proc in old:
        proc.torn = True
    job.lose("0")
    assert job.told("state_lost") == ["no worker has a whole state: going on from the newest checkpoint"]
    job.wait(6)
    assert job.last.source == -1
    assert job.last.world_size == 2
    assert not [proc for proc in job.members() if proc in old]
    assert job.machine.budget.used == 0, "it was our own decision to kill them"


def test_a_worker_that_does_not_come_back_is_killed_and_the_others_go_on() -> None:
    job = Job("1:3")
    job.train(5)
    hung = job.rank(2)
    job.deaf = {("2", 0)}
    job.exit(job.rank(0), -signal.SIGKILL)
    job.wait(29)
    assert job.machine.phase == "changing"
    assert job.told("worker_late") == []
    job.wait(2)
    assert job.told("worker_late") == ["rank 2 on node 2 did not come back within 30 s: killing it"]
    assert hung not in job.procs.values()
    job.deaf.clear()
    job.wait(1)
    assert job.machine.phase == "running"
    assert job.machine.budget.used == 1


def test_a_planned_change_whose_boundary_is_not_reached_by_all_becomes_one_at_once() -> None:
    job = Job("1:2")
    job.train(3)
    hung = job.rank(1)
    job.deaf = {("1", 0)}
    job.leave("0")
    leaver = job.rank(0)
    assert leaver.told == 1
    job.ready(leaver)  # It has seen the boundary; the other one sits in a collective.
    assert job.machine.phase == "changing"
    job.wait(31)
    assert hung.at_once
    job.deaf.clear()
    job.ready(hung)
    assert job.last.number == 1
    assert hung.rank >= 0
    assert hung in job.members()


def test_workers_that_do_not_meet_form_the_round_again() -> None:
    job = Job("1:2", start=False)
    job.shy = {("1", 0)}
    job.do(job.machine.tick(0.0))
    assert job.last.number == 0
    job.wait(59)
    assert job.told("meeting_failed") == []
    job.wait(2)
    assert job.told("meeting_failed") == ["the workers of round 0 did not meet within 60 s: forming it again"]
    assert (job.last.number, job.last.world_size, job.machine.phase) == (1, 2, "running")


def test_a_worker_that_could_not_join_ends_the_round_for_all_and_is_not_charged() -> None:
    job = Job("1:2", max_restarts=0)
    job.train(2)
    job.ready(job.rank(1))  # Its store or a peer had gone; nobody told it to come back.
    assert (job.last.number, job.last.world_size, job.machine.budget.used) == (1, 2, 0)


def test_a_late_ready_of_the_round_before_does_not_end_the_new_one() -> None:
    job = Job("1:2")
    job.train(2)
    proc = job.rank(0)
    job.ready(job.rank(1))
    assert job.last.number == 1
    late = job.machine.worker_ready(
        proc.node, proc.slot, proc.spawn, job.now, step=2, torn=False, fresh=False, round=0, told=0
    )
    assert late == []
    assert job.machine.phase == "running"
    assert job.rank(0).round == 1


@pytest.mark.parametrize("again", [1, 3])
def test_what_is_told_more_than_once_changes_nothing(again: int) -> None:
    job = Job("1:3", workers=2)
    job.slow = {("1", 0)}
    victim = job.procs["1", 0]
    first = job.exit(victim, -9)
    assert first
    for _ in range(again):
        assert job.exit(victim, -9) == []
    assert job.machine.budget.used == 1
    proc = job.rank(0)
    before = job.machine.copy(job.now)
    for _ in range(again):
        assert job.machine.worker_hello(proc.node, proc.slot, proc.spawn, job.now) == []
        job.machine.worker_joined(proc.node, proc.slot, proc.spawn, proc.round)
    assert job.machine.copy(job.now) == before


def test_joined_of_an_older_round_counts_for_nothing() -> None:
    job = Job("1:2")
    job.shy = {("0", 0), ("1", 0)}
    job.ready(job.rank(1))
    assert job.last.number == 1
    proc = job.rank(0)
    job.machine.worker_joined(proc.node, proc.slot, proc.spawn, 0)
    assert not next(w for w in job.machine.workers() if w.key == (proc.node, proc.slot)).joined
    job.machine.worker_joined(proc.node, proc.slot, proc.spawn, 1)
    assert next(w for w in job.machine.workers() if w.key == (proc.node, proc.slot)).joined


def test_a_death_while_a_change_goes_on_is_just_another_change() -> None:
    job = Job("1:4")
    job.train(3)
    job.deaf = {("2", 0), ("3", 0)}
    slow = job.rank(3)
    job.held = {"0", "1", "2"}
    job.lose("0")
    assert job.machine.phase == "changing"
    job.lose("1")
    job.exit(job.rank(2), -9)
    assert job.machine.phase == "changing", "it waits for the last one"
    job.deaf.clear()
    job.ready(slow)
    assert job.last.nodes[0] == "3"
    assert slow.rank == 0
    assert slow.step == 3
    assert job.last.source == 0


def test_a_death_while_the_round_meets_forms_another() -> None:
    job = Job("1:3")
    job.shy = {(str(n), 0) for n in range(3)}
    job.held = {"1"}
    job.exit(job.rank(0), -9)
    number = job.last.number
    job.lose("1")
    assert job.last.number > number
    assert "1" not in job.last.nodes


# --- size ----------------------------------------------------------------------------------------------------------


def test_scaled_down_workers_leave_at_a_boundary_and_nothing_is_charged() -> None:
    job = Job("1:3", max_restarts=0)
    job.train(2)
    job.do(job.machine.scale(1, job.now))
    assert job.last.number == 0, "the present step is finished first"
    job.train()
    assert (job.last.nodes, job.last.source, job.members()[0].step) == (["0"], 0, 3)
    assert job.alive == {"0"}
    assert job.done is None
    job.do(job.machine.scale(3, job.now))
    job.wait(2)
    job.train()
    assert job.last.world_size == 3


def test_a_part_of_a_node_is_a_size_in_place() -> None:
    job = Job("1:2", 2)
    job.do(job.machine.scale(3, job.now))
    job.train()
    assert (job.last.world_size, job.alive) == (3, {"0", "1"})
    assert job.last.ranks == {0: ("0", 0), 1: ("0", 1), 2: ("1", 0)}


def test_a_node_that_leaves_finishes_its_step_and_is_not_charged() -> None:
    job = Job("1:3", max_restarts=0)
    job.train(2)
    leaver = job.rank(1)
    actions = job.leave("1")
    assert kinds(actions) == ["Change"] * 3
    assert all(isinstance(action, act.Change) and action.planned for action in actions)
    job.held = {"1"}
    job.train()
    assert (job.last.world_size, leaver in job.procs.values()) == (2, False)
    job.lose("1")
    assert job.last.number == 1, "its end is no news"
    job.held.clear()
    job.join("1")
    job.wait(2)
    job.train()
    assert (job.last.world_size, job.machine.budget.used, job.done) == (3, 0, None)


def test_three_nodes_and_allowed_sizes_1_2_4_train_on_2_and_say_so() -> None:
    job = Job("1,2,4", start=False)
    job.held = {"3"}
    job.do(job.machine.tick(0.0))
    job.wait(6)
    assert job.last.world_size == 2
    assert job.told("spare") == ["training on 2 workers, 1 spare (allowed sizes of nodes: 1,2,4)"]
    job.lose("0")
    job.wait(2)
    job.train()
    assert job.last.world_size == 2, "a spare takes the place"
    job.join("3")
    job.wait(2)
    job.train()
    job.wait(2)
    assert job.last.world_size == 4


def test_a_spare_that_comes_and_goes_a_hundred_times_does_not_end_a_round() -> None:
    job = Job("1,2", managed=False)
    for name in ("a", "b"):
        job.join(name)
    job.wait(6)
    before = (job.last.number, job.last.nodes)
    for _ in range(100):
        job.join("c")
        job.wait(0.2)
        job.train()
        job.lose("c")
    assert (job.last.number, job.last.nodes) == before
    assert job.machine.budget.used == 0


def test_below_the_minimum_it_waits_says_so_goes_on_and_gives_up_after_the_limit() -> None:
    job = Job("2", wait_limit=30.0)
    job.train(3)
    job.held = {"1"}
    keeper = job.rank(0)
    job.lose("1")
    assert job.machine.phase == "forming"
    job.wait(4)
    assert job.told("waiting") == []
    job.wait(20)
    assert job.told("waiting") == [
        "waiting for more workers: at least 2 workers are needed, 1 are there; giving up after 30 s"
    ]
    job.join("1")
    job.wait(1)
    assert (job.last.world_size, job.last.source, keeper.step) == (2, 0, 3)
    assert keeper is job.rank(0), "the state was kept all the time"
    job.lose("1")
    job.wait(31)
    assert job.done == act.Done("failed", "waited 30 s: at least 2 workers are needed, 1 are there")


# --- budget, bad nodes -----------------------------------------------------------------------------------------------


def test_three_failures_are_more_than_a_budget_of_two() -> None:
    job = Job("1:3", max_restarts=2)
    for rank in (0, 1, 2):
        assert job.done is None
        job.train()
        job.exit(job.rank(rank), 1, f"ValueError: {rank}")
        job.wait(2)
        if job.done is None:
            job.train()
    assert job.done is not None
    assert job.done.reason.endswith("3 failures are more than the 2 restarts allowed")
    assert job.machine.budget.used == 3


def test_the_same_error_at_the_same_step_twice_ends_the_job() -> None:
    job = Job("1:2")
    job.train(4)
    for _ in range(2):
        job.held = {"9"}
        job.exit(job.rank(0), 1, "KeyError: 'x'")
    assert job.done is not None
    assert "failed twice at step 4 with the same error: KeyError: 'x'" in job.done.reason


def test_survivors_do_not_wait_though_a_successor_has_to() -> None:
    job = Job("1:2", max_restarts=100)
    for _ in range(2):
        job.exit(job.procs["1", 0], -11)
    assert job.told("pause") == ["waiting 1 s before the next try: killed by SIGSEGV again"]
    assert (job.machine.phase, job.last.nodes) == ("running", ["0"])
    assert ("1", 0) not in job.procs
    job.wait(1.1)
    assert ("1", 0) in job.procs


@pytest.mark.parametrize("lost_first", [True, False])
def test_a_consequence_of_a_lost_peer_is_not_charged(lost_first: bool) -> None:
    job = Job("1:3", max_restarts=0)
    job.train()
    job.held = {"0"}
    job.deaf = {("1", 0), ("2", 0)}
    peer = job.rank(1)
    if lost_first:
        job.lose("0")
        job.exit(peer, 1, BROKEN)
    else:
        job.exit(peer, 1, BROKEN)
        job.lose("0")
    job.deaf.clear()
    job.ready(job.procs["2", 0])
    assert (job.done, job.machine.budget.used) == (None, 0)


def test_a_node_that_joins_and_dies_in_a_loop_is_left_out_longer_each_time_and_comes_back() -> None:
    job = Job("1:3")
    durations = []
    for _ in range(2):
        while not job.machine.losses.is_excluded("2"):
            assert job.now < 500
            if "2" in job.alive:
                job.lose("2")
            job.wait(0.5)
        durations.append(job.machine.losses.until("2") - job.now)
        assert "2" not in job.wanted
        assert job.machine.phase == "running"
        assert set(job.last.nodes) == {"0", "1"}
        job.wait(durations[-1] + 2)
        assert "2" in job.alive, "its time is over"
    assert [round(duration / 60) for duration in durations] == [1, 2]
    job.train()
    job.wait(2)
    job.train()
    assert job.last.world_size == 3
    assert job.machine.budget.used == 0


def test_a_managed_job_that_cannot_go_on_without_the_node_fails() -> None:
    job = Job("2")
    for _ in range(6):
        if job.done is None:
            job.lose("1")
            job.wait(40)
    assert job.done == act.Done("failed", "node 1 was lost 6 times in a row, and the job needs it")


def test_a_node_that_is_left_out_is_refused_until_its_time_is_over() -> None:
    job = Job("1:2", managed=False)
    job.join("a")
    job.join("b")
    job.lose("b")
    job.machine.losses.exclude("b", job.now)
    job.join("b")
    refused = [a for a in job.log if isinstance(a, act.Dismiss) and a.node == "b"]
    assert [action.reason for action in refused] == ["node b failed too often and is left out for 60 s more"]
    assert "b" not in job.alive
    job.wait(61)
    job.join("b")
    assert "b" in job.alive


def test_one_node_whose_workers_always_die_is_left_out_and_the_others_go_on() -> None:
    job = Job("1:3", max_restarts=100)
    for _ in range(60):
        if job.told("node_excluded"):
            break
        for proc in job.of("2"):
            job.exit(proc, 1, f"OSError: disk {job.now}")
        job.wait(1)
    assert job.told("node_excluded") == [
        "node 2: its workers failed 4 times in a row: left out for 60 s"
    ]  # fmt: skip
    assert job.machine.budget.used == 4
    assert (job.machine.phase, set(job.last.nodes)) == ("running", {"0", "1"})
    assert "2" not in job.alive


def test_failures_all_over_leave_nobody_out() -> None:
    job = Job("1:2", max_restarts=100)
    for number in range(12):
        for proc in job.of(str(number % 2)):
            job.exit(proc, 1, f"OSError: {number}")
        job.wait(3)
    assert job.told("node_excluded") == []
    assert job.machine.budget.used == 12


def test_a_node_that_the_minimum_needs_is_not_left_out_for_its_workers() -> None:
    job = Job("2", max_restarts=100)
    for number in range(8):
        for proc in job.of("1"):
            job.exit(proc, 1, f"OSError: {number}")
        job.wait(3)
    assert job.told("node_excluded") == []
    assert job.done is None


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        ({"program": "b", "torch": "2.13.0"}, "program b there, a in this job"),
        ({"program": "a", "torch": "2.12.0"}, "torch 2.12.0 there, 2.13.0 in this job"),
        ({"program": "a"}, "torch None there, 2.13.0 in this job"),
        ({"program": "b", "torch": "2"}, "program b there, a in this job; torch 2 there, 2.13.0 in this job"),
    ],
)
def test_a_node_with_another_script_or_version_is_refused_and_both_are_named(
    theirs: dict[str, str], why: str
) -> None:
    job = Job("1:2", managed=False)
    job.join("a", fingerprint={"program": "a", "torch": "2.13.0"})
    job.join("b", fingerprint=theirs)
    assert job.told("node_refused") == [f"node b refused: {why}"]
    assert "b" not in job.alive
    job.join("c", fingerprint={"torch": "2.13.0", "program": "a"})
    job.wait(6)
    assert job.last.nodes == ["a", "c"]


# --- the end ---------------------------------------------------------------------------------------------------------


def test_all_are_released_together_when_the_last_is_through() -> None:
    job = Job("1:3")
    job.train(3)
    job.finish(job.rank(1))
    job.wait(20)
    job.finish(job.rank(2))
    assert job.machine.phase == "running"
    job.finish(job.rank(0))
    releases = [action for action in job.log if isinstance(action, act.Release)]
    assert {action.node for action in releases} == {"0", "1", "2"}
    assert job.done == act.Done("succeeded", "every worker ended with exit code 0")


def test_who_is_through_comes_back_when_somebody_dies_before_the_end() -> None:
    job = Job("1:3")
    job.train(3)
    job.held = {"0"}
    through = job.rank(1)
    job.finish(through)
    job.lose("0")
    assert job.last.world_size == 2
    assert through in job.members()
    assert through.state == "training"


def test_a_planned_change_that_meets_the_end_does_not_wait_for_a_boundary() -> None:
    job = Job("1:2")
    job.train(3)
    job.do(job.machine.scale(1, job.now))
    leaver, stayer = job.rank(1), job.rank(0)
    assert leaver.told == 1
    job.finish(stayer)
    job.finish(leaver)
    assert job.last.number == 1
    assert job.members() == [stayer]


def test_a_failure_after_the_release_starts_all_anew() -> None:
    job = Job("1:2")
    job.train(3)
    job.deaf = {("0", 0), ("1", 0)}
    procs = [job.rank(0), job.rank(1)]
    for proc in procs:
        job.finish(proc)
    assert job.machine.phase == "finishing"
    job.exit(procs[0], 0)
    assert job.done is None
    job.deaf.clear()
    job.exit(procs[1], 1, "OSError: disk full")
    job.wait(1)
    assert job.done is None
    assert job.machine.budget.used == 1
    assert job.last.number >= 1
    assert job.last.world_size == 2


def test_a_worker_that_ends_with_0_while_the_others_train_is_a_failure_of_that_name() -> None:
    job = Job("1:2")
    job.train(2)
    job.exit(job.rank(1), 0)
    assert job.told("worker_failed") == [
        "rank 1 on node 1: ended with exit code 0 while the others went on after step 2"
    ]
    assert job.machine.budget.used == 1


def test_after_the_end_nothing_happens_any_more() -> None:
    job = Job("1:2")
    job.do(job.machine.stop("enough"))
    before = len(job.log)
    job.wait(100)
    assert job.machine.scale(1, job.now) == []
    assert job.machine.tick(1e9) == []
    assert job.machine.node_lost("0", job.now) == []
    assert len(job.log) == before
    job.join("7")
    assert job.log[before:] == [act.Dismiss(node="7", reason="the job is over")]


def test_a_worker_that_waits_on_a_node_that_leaves_is_seen_off_at_once() -> None:
    job = Job("1,2,4")
    job.train(3)
    job.held = {"0"}
    job.lose("0")
    (spare,) = [proc for proc in job.procs.values() if proc.state == "ready"]
    assert job.last.world_size == 2
    assert spare.node not in job.last.nodes
    number, job.held = job.last.number, {"0", spare.node}
    job.leave(spare.node)
    assert spare not in job.procs.values()
    assert job.log[-1] != act.Stop(node=spare.node, slots=(0,))
    assert act.Leave(node=spare.node, slots=(0,)) in job.log
    assert job.last.number == number, "the others train on"
    assert job.machine.budget.used == 0
