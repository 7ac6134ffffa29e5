"""The size of a job that is started anew: it follows the desired size, and grows again when nodes come back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from directed import Job


def plain(nodes: str = "1:3", workers: int = 1, **options: object) -> Job:
    return Job(nodes, workers, in_place=False, **options)  # type: ignore[arg-type]


def scale(job: Job, desired: int) -> None:
    job.do(job.machine.scale(desired, job.now))


def sizes(job: Job) -> list[int]:
    return [found.world_size for _, found in sorted(job.rounds.items())]


def test_a_smaller_desired_size_ends_the_round_at_once_and_nothing_is_charged() -> None:
    job = plain(max_restarts=0)
    job.train(5)
    scale(job, 2)
    assert sizes(job) == [3, 2]
    assert job.last.nodes == ["0", "1"]
    assert (job.alive, job.wanted) == ({"0", "1"}, ("0", "1"))
    assert (job.machine.budget.used, job.done) == (0, None)
    assert job.told("scale") == ["desired size 2 workers (was 3)"]
    assert job.told("resize") == ["starting all workers anew on 2 nodes (was 3)"]


def test_a_larger_one_as_soon_as_the_nodes_for_it_are_there() -> None:
    job = plain()
    scale(job, 1)
    job.held = {"1", "2"}
    scale(job, 3)
    assert job.wanted == ("0", "1", "2")
    job.wait(2)
    job.join("1")
    assert sizes(job) == [3, 1], "the other one may be here in a moment"
    job.join("2")
    assert sizes(job) == [3, 1, 3]
    assert job.last.nodes == ["0", "1", "2"]


def test_growth_does_not_wait_for_ever_for_a_node_that_does_not_come() -> None:
    job = plain()
    scale(job, 1)
    job.held = {"1", "2"}
    scale(job, 3)
    job.join("1")
    job.wait(4.8)
    assert sizes(job) == [3, 1]
    job.wait(0.4)
    assert sizes(job)[2:] == []
    assert job.machine.phase == "forming", "its start waits for the third one as any does"
    job.join("2")
    assert sizes(job) == [3, 1, 3]


def test_scaled_down_and_up_and_down_again_it_ends_where_it_was_told() -> None:
    job = plain()
    for size in (2, 3, 1, 3, 2):
        scale(job, size)
    assert sizes(job) == [3, 2, 3, 1, 3, 2]
    assert job.machine.budget.used == 0


def test_scaled_while_it_is_being_started_anew_only_the_last_word_counts() -> None:
    job = plain()
    job.deaf = {("2", 0)}
    slow = job.rank(2)
    scale(job, 2)
    assert job.machine.phase == "stopping"
    scale(job, 3)
    scale(job, 1)
    job.exit(slow, -9)
    assert sizes(job) == [3, 1]
    assert job.alive == {"0"}


def test_the_same_size_again_changes_nothing() -> None:
    job = plain()
    before = len(job.log)
    scale(job, 3)
    job.wait(30)
    assert len(job.log) == before


def test_low_ranks_stay_and_keep_theirs() -> None:
    job = plain("1:3")
    job.held = {"0"}
    job.lose("0")
    job.wait(6)
    assert job.last.nodes == ["2", "1"]
    scale(job, 1)
    assert job.last.nodes == ["2"], "rank 0 is on node 2"
    assert job.wanted == ("2",)
    assert job.alive == {"2"}


def test_low_ranks_stay_though_the_store_of_the_next_round_takes_its_time() -> None:
    job = plain("1:3")
    job.held = {"0"}
    job.lose("0")
    job.wait(6)
    job.machine.node("2").store = None  # type: ignore[union-attr]
    scale(job, 1)
    assert job.machine.phase == "forming"
    assert "2" in job.alive
    assert job.wanted == ("2",)
    job.fresh_store("2")
    assert job.last.nodes == ["2"]


def test_whole_nodes_of_several_workers() -> None:
    job = plain("1:3", 2)
    scale(job, 4)
    assert (job.last.world_size, job.alive) == (4, {"0", "1"})
    scale(job, 6)
    assert job.last.world_size == 6


def test_a_size_that_whole_nodes_cannot_have_is_rounded_down() -> None:
    job = plain("1:3", 2)
    scale(job, 5)
    assert job.last.world_size == 4


def test_only_allowed_sizes_are_grown_to() -> None:
    job = plain("1,2,4")
    scale(job, 2)
    job.held = {"2", "3"}
    scale(job, 4)
    job.join("2")
    job.wait(60)
    assert sizes(job) == [4, 2], "three nodes are no allowed size"
    job.join("3")
    assert sizes(job) == [4, 2, 4]


def test_never_below_the_minimum_through_nodes_that_are_gone() -> None:
    job = plain("2:3")
    job.held = {"2"}
    job.lose("2")
    job.wait(6)
    assert job.last.world_size == 2
    job.held = {"1", "2"}
    scale(job, 2)
    job.lose("1")
    job.wait(20)
    assert job.machine.phase == "forming"
    assert sizes(job) == [3, 2]


def test_a_node_that_comes_back_lets_the_job_grow_after_a_pause() -> None:
    job = plain()
    job.held = {"2"}
    job.lose("2")
    job.wait(6)
    assert sizes(job) == [3, 2]
    job.join("2")
    started = job.now
    while job.last.world_size == 2:
        job.wait(0.1)
        assert job.now < started + 11
    assert 8 <= job.now - started <= 10.2, "the round had lasted about a second"
    assert sizes(job) == [3, 2, 3]
    assert job.machine.budget.used == 0


def test_two_that_come_back_one_after_the_other_cost_one_start() -> None:
    job = plain()
    job.held = {"1", "2"}
    job.lose("1")
    job.lose("2")
    job.wait(6)
    assert job.last.world_size == 1
    job.wait(20)
    job.join("1")
    job.wait(2)
    job.join("2")
    job.wait(0.2)
    assert sizes(job) == [3, 1, 3]


def test_a_node_that_comes_and_goes_does_not_eat_the_steps_of_the_others() -> None:
    job = plain()
    job.held = {"2"}
    started, gone_at = [], []
    while job.now < 1200:
        if "2" in job.alive and job.last.world_size == 3:
            job.train()
            job.lose("2")
            gone_at.append(job.now)
        elif "2" not in job.alive and "2" in job.wanted and job.last.world_size == 2:
            job.join("2")
            started.append(job.now)
        job.wait(0.5)
    grown = sizes(job).count(3) - 1
    assert 3 <= grown <= 8, f"in 20 minutes it grew {grown} times: the pause doubles"


def test_a_calm_round_starts_the_pause_over() -> None:
    job = plain()
    job.held = {"2"}

    def away_and_back() -> float:
        job.lose("2")
        job.wait(6)
        assert job.last.world_size == 2
        before = job.last.began
        job.join("2")
        while job.last.world_size == 2:
            job.wait(0.1)
        return job.now - before

    assert [round(away_and_back()) for _ in range(3)] == [10, 20, 40]
    job.train()
    job.wait(330)
    assert [round(away_and_back()) for _ in range(2)] == [10, 20]


def test_growth_that_was_asked_for_does_not_count_as_thrashing() -> None:
    job = plain()
    for _ in range(20):
        scale(job, 1)
        scale(job, 3)
    assert sizes(job)[-1] == 3
    assert len(job.rounds) == 41


@pytest.mark.parametrize("left_out", ["leaving", "excluded"])
def test_nodes_that_leave_or_are_left_out_are_not_grown_to(left_out: str) -> None:
    job = plain()
    scale(job, 2)
    job.held = {"2"}
    scale(job, 3)
    job.wait(12)
    if left_out == "leaving":
        job.join("2")
        assert sizes(job) == [3, 2, 3]
        job.lose("2")
        job.wait(6)
        assert job.last.world_size == 2
        job.join("2")
        job.do(job.machine.node_leaving("2", job.now))
    else:
        job.machine.losses.exclude("2", job.now)
        job.join("2")
        assert "2" not in job.alive, "dismissed"
    before = len(job.rounds)
    job.wait(40)
    assert len(job.rounds) == before


def test_an_excluded_node_is_grown_to_when_its_time_is_over() -> None:
    job = plain("1:2")
    for _ in range(40):
        if job.machine.losses.is_excluded("1"):
            break
        if "1" in job.alive:
            job.lose("1")
        job.wait(1)
    assert job.told("node_excluded") == ["node 1 was lost 6 times in a row: left out for 60 s"]
    job.wait(6)
    assert job.last.nodes == ["0"]
    job.wait(70)
    assert job.last.nodes == ["0", "1"], "started again, and let in"


def test_a_job_some_of_whose_workers_are_through_is_left_alone() -> None:
    job = plain("1:3")
    job.train(3)
    job.finish(job.rank(2))
    scale(job, 1)
    assert sizes(job) == [3]
    job.finish(job.rank(0))
    job.finish(job.rank(1))
    assert job.done is not None
    assert job.done.state == "succeeded"


@pytest.mark.parametrize("code", [0, 1, 3, -11, 143])
def test_however_a_program_ends_on_sigterm_when_it_is_scaled_costs_nothing(code: int) -> None:
    job = plain("1:2", max_restarts=0)
    job.deaf = {("0", 0), ("1", 0)}
    procs = [job.rank(0), job.rank(1)]
    scale(job, 1)
    for proc in procs:
        job.exit(proc, code, "SystemExit: terminated" if code == 1 else "")
    assert (job.done, job.last.world_size, job.machine.budget.used) == (None, 1, 0)
    assert job.told("worker_failed") == []


def test_a_takeover_in_the_middle_of_a_scaling_ends_at_the_new_size() -> None:
    for told in (False, True):
        job = plain("1:3")
        job.train(4)
        job.deaf = set(job.procs) if told else set()
        if told:
            scale(job, 2)
            assert job.machine.phase == "stopping"
            for proc in job.procs.values():
                proc.state = "ending"
        else:
            job.machine.desired = 2  # Decided and told as a copy, but no worker has been stopped.
            for name in job.alive:
                job.copies[name] = job.machine.copy(job.now)
        job.take_over()
        for proc in [proc for proc in job.procs.values() if proc.state == "ending"]:
            job.exit(proc, -15)
        job.deaf.clear()
        job.wait(5)
        assert (job.machine.desired, job.last.world_size) == (2, 2)
        assert job.machine.round >= 1
        assert job.machine.budget.used == 0


def test_unmanaged_surplus_stays_as_a_spare_and_comes_in_when_the_job_grows() -> None:
    job = plain("1:3", managed=False)
    for name in ("a", "b", "c"):
        job.join(name)
    assert job.last.world_size == 3
    scale(job, 2)
    assert (job.last.nodes, job.alive) == (["a", "b"], {"a", "b", "c"})
    assert job.told("spare") == ["training on 2 workers, 1 spare"]
    scale(job, 3)
    assert job.last.nodes == ["a", "b", "c"]
