"""Programs that cannot go on in place: every change starts all workers anew, on whole nodes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from elastic_runtime.jobs.nodes import parse_nodes
from elastic_runtime.membership import actions as act
from elastic_runtime.membership.failures import Failure, root_cause
from elastic_runtime.membership.machine import Membership

sys.path.insert(0, str(Path(__file__).parent))
from directed import Job

BROKEN = "RuntimeError: Connection closed by peer"


def plain(nodes: str = "1:2", workers: int = 1, **options: object) -> Job:
    return Job(nodes, workers, in_place=False, **options)  # type: ignore[arg-type]


def test_a_job_starts_with_all_its_nodes_and_succeeds_when_all_workers_do() -> None:
    job = plain("1:3", 2)
    assert list(job.rounds) == [0]
    assert job.last.ranks == {rank: (str(rank // 2), rank % 2) for rank in range(6)}
    assert job.last.world_size == 6
    for rank in range(6):
        assert job.done is None
        job.exit(job.rank(rank), 0)
    assert job.done == act.Done("succeeded", "every worker ended with exit code 0")


def test_all_nodes_of_a_round_are_told_the_same_store_of_its_first_node() -> None:
    job = plain("1:3")
    ((node, _),) = job.last.stores
    assert node == "0"
    job.lose("0")
    assert len(job.last.stores) == 1
    first = {number: found.stores for number, found in job.rounds.items()}
    assert first[0] != first[1], "a store serves one round"


def test_a_killed_worker_starts_the_next_round_at_once_and_is_charged() -> None:
    job = plain()
    job.exit(job.rank(1), -signal.SIGKILL)
    assert list(job.rounds) == [0, 1]
    assert job.machine.budget.used == 1
    assert job.told("pause") == []
    assert job.told("worker_failed") == ["rank 1 on node 1: killed by SIGKILL after step 0"]


def test_a_lost_node_is_started_again_and_not_charged() -> None:
    job = plain("1:3")
    job.lose("0")
    assert job.last.ranks == {0: ("0", 0), 1: ("1", 0), 2: ("2", 0)}
    assert (job.last.number, job.machine.budget.used) == (1, 0)


def test_survivors_keep_their_ranks_and_others_fill_the_holes() -> None:
    job = plain("1:4")
    job.held = {"1"}
    job.lose("1")
    assert job.machine.phase == "forming", "it waits for the one that is to be started again"
    job.wait(6)
    assert job.last.nodes == ["0", "3", "2"], (
        "0 and 2 keep theirs; 3 is above the new size and fills the hole"
    )


def test_without_all_nodes_a_round_waits_only_for_its_patience() -> None:
    job = plain("2:3", start=False)
    job.held = {"1"}
    job.do(job.machine.tick(0.0))
    job.wait(4.9)
    assert not job.rounds
    job.wait(0.2)
    assert job.last.nodes == ["0", "2"]


@pytest.mark.parametrize(
    ("nodes", "live", "size", "spare"),
    [
        ("1,2,4", 3, 2, ["training on 2 workers, 1 spare (allowed sizes of nodes: 1,2,4)"]),
        ("1,2,4", 4, 4, []),
        ("1,2,4", 1, 1, []),
        ("2,3", 2, 2, []),
    ],
)
def test_only_allowed_sizes_are_trained_on(nodes: str, live: int, size: int, spare: list[str]) -> None:
    job = plain(nodes, start=False)
    job.held = {str(number) for number in range(live, 4)}
    job.do(job.machine.tick(0.0))
    job.wait(6)
    assert job.last.world_size == size
    assert job.told("spare") == spare


def test_the_budget_is_of_the_whole_job_and_the_reason_names_rank_and_cause() -> None:
    job = plain("1:3", max_restarts=2)
    for rank in (0, 1, 2):
        assert job.done is None
        job.train()
        job.exit(job.rank(rank), 1, f"ValueError: {rank}")
    assert job.done is not None
    assert job.done.state == "failed"
    assert job.done.reason == "rank 2: ValueError: 2; 3 failures are more than the 2 restarts allowed"
    assert list(job.rounds) == [0, 1, 2]
    assert job.alive == set(), "all agents were dismissed"


def test_no_restart_allowed_means_the_first_failure_ends_the_job() -> None:
    job = plain(max_restarts=0)
    job.exit(job.rank(0), 1)
    assert job.done is not None
    assert job.done.state == "failed"
    assert len(job.rounds) == 1


def test_the_same_exception_at_the_same_step_twice_ends_the_job() -> None:
    job = plain()
    job.train(7)
    for _ in range(2):
        job.exit(job.rank(0), 1, "KeyError: 'x'")
    assert job.done is not None
    assert job.done.reason == "rank 0 failed twice at step 7 with the same error: KeyError: 'x'"


@pytest.mark.parametrize(("second", "over"), [(1.0, True), (100.0, False)])
def test_without_reported_steps_the_same_place_is_about_the_same_time(second: float, over: bool) -> None:
    job = plain()
    for uptime in (2.0, second):
        job.wait(uptime)
        job.exit(job.rank(0), 1, "OSError: no answer")
    assert (job.done is not None) is over


@pytest.mark.parametrize(
    ("code", "message", "steps"),
    [(1, "KeyError: 'x'", (7, 8)), (-signal.SIGKILL, "", (7, 0)), (1, BROKEN, (7, 0))],
)  # fmt: skip
def test_other_repeats_are_retried(code: int, message: str, steps: tuple[int, int]) -> None:
    job = plain()
    for step in steps:
        if step:
            job.train(step)
        job.exit(job.rank(0), code, message)
    job.wait(5)
    assert job.done is None
    assert len(job.rounds) == 3


def test_a_cause_that_repeats_without_progress_waits_longer_each_time() -> None:
    job = plain("1", max_restarts=100)
    for _ in range(8):
        job.exit(job.rank(0), -signal.SIGSEGV)
        before = job.now
        while job.machine.phase != "running":
            job.wait(0.1)
        job.delays = [*getattr(job, "delays", []), round(job.now - before)]  # type: ignore[attr-defined]
    assert job.delays == [0, 1, 2, 4, 8, 16, 30, 30]  # type: ignore[attr-defined]
    assert job.told("pause")[0] == "waiting 1 s before the next try: killed by SIGSEGV again"
    job.train(1)
    job.exit(job.rank(0), -signal.SIGSEGV)
    assert job.machine.phase == "running", "progress wipes the slate"


@pytest.mark.parametrize("lost_first", [True, False])
@pytest.mark.parametrize(("code", "message"), [(1, BROKEN), (-signal.SIGABRT, "")])
def test_what_the_peers_of_a_lost_node_report_is_not_charged(
    lost_first: bool, code: int, message: str
) -> None:
    job = plain(max_restarts=0)
    job.deaf = {("1", 0)}
    peer = job.rank(1)
    if lost_first:
        job.lose("0")
        job.exit(peer, code, message)
    else:
        job.deaf = {("0", 0)}
        job.exit(peer, code, message)
        job.lose("0")
    assert job.done is None
    assert (job.last.number, job.machine.budget.used) == (1, 0)


def test_a_worker_that_is_seen_to_end_just_before_its_node_is_not_charged() -> None:
    job = plain("1:2", max_restarts=3)
    job.held = {"0"}
    job.exit(job.rank(0), -signal.SIGKILL)
    assert job.machine.budget.used == 1
    job.lose("0")
    assert job.machine.budget.used == 0


def test_a_loss_long_after_a_failure_takes_nothing_back() -> None:
    job = plain("1:2", max_restarts=3)
    job.exit(job.rank(0), -signal.SIGKILL)
    job.wait(3)
    job.lose("0")
    job.lose("0")
    assert job.machine.budget.used == 1


@pytest.mark.parametrize("first", [0, 1])
def test_the_root_cause_is_charged_though_its_consequences_were_seen_first(first: int) -> None:
    job = plain("3", max_restarts=5)
    job.deaf = {(str(n), 0) for n in range(3)}
    order = [(0, BROKEN), (2, "ValueError: mine")]
    for rank, message in order if first == 0 else reversed(order):
        job.exit(job.rank(rank), 1, message)
    job.exit(job.rank(1), 1, BROKEN)
    assert job.machine.budget.used == 1
    job.deaf.clear()
    job.exit(job.rank(0), 1, "ValueError: mine")
    assert job.done is not None, "the same error at the same step twice"
    assert "ValueError: mine" in job.done.reason


def test_a_node_that_leaves_politely_ends_the_round_and_is_not_charged() -> None:
    job = plain("2", max_restarts=0)
    job.deaf = {("1", 0)}
    peer = job.rank(1)
    actions = job.leave("0")
    assert [a for a in actions if isinstance(a, act.Stop)] == [
        act.Stop(node="0", slots=(0,)), act.Stop(node="1", slots=(0,))
    ]  # fmt: skip
    job.exit(peer, 143)
    job.lose("0")
    assert job.last.ranks == {0: ("0", 0), 1: ("1", 0)}
    assert (job.last.number, job.machine.budget.used, job.done) == (1, 0, None)


def test_an_agent_that_is_told_to_leave_twice_leaves_once() -> None:
    job = plain("1:2")
    job.leave("0")
    before = len(job.log)
    assert job.leave("0") == []
    assert len(job.log) == before


def test_a_store_lost_while_the_workers_meet_ends_the_round_and_later_does_not() -> None:
    job = plain("2", max_restarts=0)
    job.do(job.machine.store_lost("0", "died", job.now))
    assert (job.last.number, job.machine.phase, job.machine.budget.used) == (1, "running", 0)
    job.train()
    assert job.do(job.machine.store_lost("0", "died", job.now)) == [], "they have met, and need it no more"


def test_a_store_that_is_lost_again_and_again_ends_the_job() -> None:
    job = plain("2")
    for _ in range(6):
        assert job.done is None
        job.do(job.machine.store_lost("0", "died", job.now))
    assert job.done == act.Done("failed", "the store host was lost 6 times in a row; the last one died")


def test_an_early_clean_exit_is_the_cause_of_the_others_broken_connections() -> None:
    job = plain("2")
    for _ in range(2):
        job.exit(job.rank(1), 0)
        job.exit(job.rank(0), 1, BROKEN)
        job.wait(0.2)
    assert job.done is not None
    assert job.done.reason == (
        "rank 1 failed twice at step 0 with the same error: ended with exit code 0 while the others went on"
    )


def test_a_worker_that_answers_sigterm_with_exit_code_0_is_not_taken_for_one_that_ended_early() -> None:
    job = plain("2")
    for _ in range(3):
        job.deaf = {("1", 0)}
        polite = job.rank(1)
        job.exit(job.rank(0), 1, BROKEN)
        job.exit(polite, 0)
        job.wait(5)
    assert job.done is None, "a broken connection is no error of the user's"
    assert job.machine.budget.used == 3


def test_one_rank_may_end_long_before_the_others() -> None:
    job = plain("1:3")
    job.finish(job.rank(1))
    job.wait(20)
    job.finish(job.rank(0))
    job.wait(200)
    assert job.done is None
    job.finish(job.rank(2))
    assert job.done == act.Done("succeeded", "every worker ended with exit code 0")


def test_a_failure_after_some_have_ended_well_starts_all_again() -> None:
    job = plain("1:2")
    job.train(3)
    job.finish(job.rank(1))
    job.exit(job.rank(0), 1, "ValueError: late")
    assert (job.last.number, job.last.world_size) == (1, 2)
    job.finish(job.rank(0))
    assert job.done is None
    job.finish(job.rank(1))
    assert job.done is not None
    assert job.done.state == "succeeded"


def test_stop_ends_the_job_in_every_phase() -> None:
    def change(job: Job) -> None:
        job.deaf = {("1", 0)}
        job.exit(job.rank(0), 1)
        assert job.machine.phase == "stopping"

    def forming(job: Job) -> None:
        job.held = {"0"}
        job.lose("0")
        assert job.machine.phase == "forming"

    for prepare in (lambda job: None, change, forming):
        job = plain()
        prepare(job)
        job.do(job.machine.stop("SIGTERM received"))
        assert job.done == act.Done("stopped", "SIGTERM received")
        assert job.alive == set()
        assert job.machine.stop("again") == []


def test_a_fail_of_the_leader_ends_the_job_too() -> None:
    job = plain()
    job.do(job.machine.fail("its lock is gone"))
    assert job.done == act.Done("failed", "its lock is gone")


def failure(rank: int, code: int, message: str = "") -> Failure:
    return Failure(node=str(rank), rank=rank, code=code, message=message)


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([failure(0, 1, BROKEN), failure(2, -9)], 2),
        ([failure(0, -signal.SIGABRT), failure(1, -signal.SIGSEGV)], 1),
        ([failure(0, -signal.SIGABRT)], 0),
        ([failure(0, 1, "DistBackendError: NCCL error"), failure(1, 1, "ValueError: bad")], 1),
        ([failure(3, 1, "ValueError: a"), failure(1, 1, "ValueError: b")], 3),
        ([failure(1, 1, "RuntimeError: recv failed"), failure(0, 1, "RuntimeError: timed out")], 1),
    ],
)
def test_the_root_cause_is_not_a_consequence(failures: list[Failure], rank: int) -> None:
    assert root_cause(failures).rank == rank


@pytest.mark.parametrize(
    ("code", "message", "cause"),
    [(3, "", "exit code 3"), (-11, "", "killed by SIGSEGV"), (-99, "", "killed by signal 99"),
     (1, "ValueError: no", "ValueError: no"), (-9, "killed by its agent", "killed by its agent")],
)  # fmt: skip
def test_a_cause_in_words(code: int, message: str, cause: str) -> None:
    assert failure(0, code, message).cause == cause


def test_messages_about_workers_that_are_gone_or_unknown_change_nothing() -> None:
    job = plain("1:2")
    old = job.rank(0)
    job.exit(old, 1, "ValueError: a")
    assert job.last.number == 1
    before = job.machine.copy(job.now)
    for spawn in (old.spawn, 12345):
        assert job.machine.worker_exited("0", 0, spawn, job.now, code=1) == []
        assert job.machine.worker_hello("0", 0, spawn, job.now) == []
        assert job.machine.worker_finished("0", 0, spawn, 9, job.now) == []
        assert job.machine.worker_ready(
            "0", 0, spawn, job.now, step=9, torn=False, fresh=False, round=0, told=1
        ) == []  # fmt: skip
        job.machine.worker_started("0", 0, spawn, 77)
        job.machine.worker_joined("0", 0, spawn, 1)
    assert job.machine.node_lost("9", job.now) == []
    assert job.machine.node_leaving("9", job.now) == []
    assert job.machine.node_store("9", ("h", 1), job.now) == []
    assert job.machine.copy(job.now) == before
    assert [w.pid for w in job.machine.workers() if w.pid == 77] == []


def test_unmanaged_nodes_come_by_themselves_and_the_surplus_stays_as_spares() -> None:
    machine = Membership(parse_nodes("2:3"), max_restarts=0, now=0.0, managed=False)
    job = plain("2:3", managed=False)
    job.machine = machine
    for name in ("gpu-10", "gpu-2", "gpu-1", "gpu-3"):
        job.join(name)
    assert job.last.nodes == ["gpu-1", "gpu-2", "gpu-10"], "the three that were there, numbers by their value"
    assert job.wanted == ()
    assert "gpu-3" in job.alive
    job.lose("gpu-1")
    job.wait(0.1)
    assert job.last.nodes == ["gpu-3", "gpu-2", "gpu-10"], "the spare takes the lost one's place at once"


def test_a_node_that_comes_back_does_not_take_the_rank_that_another_has_had_since() -> None:
    job = plain("1:3")
    job.held = {"0"}
    job.lose("0")
    job.wait(6)
    assert job.last.nodes == ["2", "1"]
    job.join("0")
    job.wait(11)
    assert job.last.nodes == ["2", "1", "0"]
