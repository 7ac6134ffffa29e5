from __future__ import annotations

import signal
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_runtime.jobs.nodes import NodeRange, parse_nodes
from elastic_runtime.supervisor.rounds import (
    Action,
    Done,
    Failure,
    Pause,
    RoundMachine,
    Spawn,
    Start,
    Stop,
    root_cause,
)


@dataclass
class World:
    """Answers the machine as real agents would, without any of them."""

    machine: RoundMachine
    now: float = 0.0
    alive: set[int] = field(default_factory=set)
    workers: dict[int, set[int]] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    done: Done | None = None

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            assert self.done is None or isinstance(action, Stop)
            match action:
                case Spawn(node):
                    assert node not in self.alive, "a node is started once"
                    self.alive.add(node)
                    self.do(self.machine.node_ready(node, self.now))
                case Start():
                    assert not any(self.workers.values()), "no worker of an earlier round is left"
                    assert sorted(action.groups.values()) == list(range(len(action.groups)))
                    self.starts.append(action)
                    size = self.machine.nodes.workers
                    self.workers = {n: set(range(g * size, (g + 1) * size)) for n, g in action.groups.items()}
                case Stop(nodes):
                    for node in nodes:
                        for rank in sorted(self.workers.get(node, ())):
                            self.exit(node, rank, -signal.SIGTERM)
                        if node in self.alive:
                            self.do(self.machine.node_stopped(node, self.now))
                case Pause():
                    self.pauses.append(action)
                case Done():
                    self.done = action

    def exit(self, node: int, rank: int, code: int, message: str = "", step: int = 0) -> None:
        self.workers[node].discard(rank)
        failure = Failure(node=node, rank=rank, code=code, message=message, step=step) if code else None
        self.do(self.machine.worker_exited(failure, node=node, rank=rank, now=self.now))

    def lose(self, node: int) -> None:
        self.alive.discard(node)
        self.workers.pop(node, None)
        self.do(self.machine.node_lost(node, self.now))

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end and self.done is None:
            self.now += 0.1
            self.do(self.machine.tick(self.now))


def world(nodes: str = "1:2", workers: int = 1, max_restarts: int = 10) -> World:
    found = World(RoundMachine(parse_nodes(nodes, workers), max_restarts=max_restarts, now=0.0))
    found.do(found.machine.begin())
    return found


def test_a_job_starts_with_all_its_nodes_and_succeeds_when_all_workers_do() -> None:
    job = world("1:3", workers=2)
    assert [start.groups for start in job.starts] == [{0: 0, 1: 1, 2: 2}]
    for rank in range(6):
        assert job.done is None
        job.exit(rank // 2, rank, 0)
    assert job.done == Done("succeeded", "every worker ended with exit code 0")


def test_a_killed_worker_starts_the_next_round_at_once_and_is_charged() -> None:
    job = world()
    job.exit(1, 1, -signal.SIGKILL)
    assert [start.round for start in job.starts] == [0, 1]
    assert job.machine.restarts == 1
    assert job.pauses == []


def test_a_lost_node_is_started_again_and_not_charged() -> None:
    job = world("1:3")
    job.lose(0)
    job.wait(1)
    assert job.starts[-1].groups == {1: 1, 2: 2, 0: 0}
    assert job.machine.restarts == 0


@pytest.mark.parametrize("lost_first", [True, False])
@pytest.mark.parametrize(
    ("code", "message"), [(1, "RuntimeError: Connection closed by peer"), (-signal.SIGABRT, "")]
)
def test_what_the_peers_of_a_lost_node_report_is_not_charged(
    lost_first: bool, code: int, message: str
) -> None:
    machine = RoundMachine(parse_nodes("1:2"), max_restarts=0, now=0.0)
    machine.begin()
    for node in (0, 1):
        machine.node_ready(node, 0.0)
    failure = Failure(node=1, rank=1, code=code, message=message)
    if lost_first:
        machine.node_lost(0, 1.0)
        machine.worker_exited(failure, node=1, rank=1, now=1.0)
    else:
        machine.worker_exited(failure, node=1, rank=1, now=1.0)
        machine.node_lost(0, 1.0)
    machine.node_stopped(1, 1.0)
    assert (machine.phase, machine.restarts) == ("forming", 0)


def test_survivors_keep_their_ranks_and_others_fill_the_holes() -> None:
    machine = RoundMachine(parse_nodes("1:4"), max_restarts=10, now=0.0)
    machine.begin()
    for node in range(4):
        started = machine.node_ready(node, 0.0)
    assert started == [Start(0, {0: 0, 1: 1, 2: 2, 3: 3})]
    machine.node_lost(1, 1.0)
    for node in (0, 2, 3):
        machine.node_stopped(node, 1.0)
    assert machine.phase == "forming"
    (start,) = [action for action in machine.tick(7.0) if isinstance(action, Start)]
    assert start.groups == {0: 0, 3: 1, 2: 2}, (
        "0 and 2 keep theirs; 3 is above the new size and fills the hole"
    )


def test_without_all_nodes_a_round_waits_only_for_its_patience() -> None:
    machine = RoundMachine(parse_nodes("2:3"), max_restarts=10, now=0.0)
    machine.begin()
    assert machine.node_ready(0, 0.0) == []
    assert machine.node_ready(2, 0.1) == []
    assert machine.tick(4.9) == []
    assert machine.tick(5.1) == [Start(0, {0: 0, 2: 1})]


def test_below_the_minimum_a_job_waits() -> None:
    machine = RoundMachine(parse_nodes("2:3"), max_restarts=10, now=0.0)
    machine.begin()
    machine.node_ready(0, 0.0)
    assert machine.tick(10_000.0) == []


def test_only_allowed_sizes_are_trained_on() -> None:
    machine = RoundMachine(parse_nodes("1,2,4"), max_restarts=10, now=0.0)
    machine.begin()
    for node in range(3):
        machine.node_ready(node, 0.0)
    assert machine.tick(6.0) == [Start(0, {0: 0, 1: 1})]


def test_the_budget_is_global_and_the_reason_names_rank_and_cause() -> None:
    job = world("1:3", max_restarts=2)
    for node in (0, 1, 2):
        assert job.done is None
        job.machine.progressed(job.machine._step + 1)
        rank = next(iter(job.workers[node]))
        job.exit(node, rank, 1, message=f"ValueError: {node}", step=node)
    assert job.done is not None
    assert job.done.state == "failed"
    assert "rank 2: ValueError: 2" in job.done.reason
    assert "3 failures are more than the 2 restarts allowed" in job.done.reason


def test_no_restart_allowed_means_the_first_failure_ends_the_job() -> None:
    job = world(max_restarts=0)
    job.exit(0, 0, 1)
    assert job.done is not None
    assert job.done.state == "failed"
    assert len(job.starts) == 1


def test_the_same_exception_at_the_same_step_twice_ends_the_job() -> None:
    job = world()
    job.exit(0, 0, 1, message="KeyError: 'x'", step=7)
    job.exit(0, 0, 1, message="KeyError: 'x'", step=7)
    assert job.done is not None
    assert job.done.state == "failed"
    assert "twice at step 7" in job.done.reason


@pytest.mark.parametrize(("second", "done"), [(1.0, True), (100.0, False)])
def test_without_reported_steps_the_same_place_is_about_the_same_time(second: float, done: bool) -> None:
    job = world()
    for uptime in (2.0, second):
        job.now += uptime
        job.exit(0, 0, 1, message="OSError: no answer")
    assert (job.done is not None) is done


@pytest.mark.parametrize(
    ("code", "message", "steps"),
    [(1, "KeyError: 'x'", (7, 8)), (-signal.SIGKILL, "", (7, 7)), (1, "RuntimeError: Connection closed by peer", (7, 7))],
)  # fmt: skip
def test_other_repeats_are_retried(code: int, message: str, steps: tuple[int, int]) -> None:
    job = world()
    for step in steps:
        job.machine.progressed(step)
        job.exit(0, 0, code, message=message, step=step)
    job.wait(5)
    assert job.done is None
    assert len(job.starts) == 3


def test_a_cause_that_repeats_without_progress_waits_longer_each_time() -> None:
    job = world(max_restarts=100)
    for _ in range(8):
        job.exit(0, 0, -signal.SIGSEGV)
        job.wait(31)
    assert [pause.seconds for pause in job.pauses] == [1, 2, 4, 8, 16, 30, 30]
    job.machine.progressed(50)
    job.exit(0, 0, -signal.SIGSEGV)
    assert len(job.pauses) == 7, "progress wipes the slate"


def test_a_node_that_is_lost_again_and_again_is_excluded_and_the_job_goes_on() -> None:
    job = world("1:2")
    for _ in range(6):
        job.lose(1)
        job.wait(40)
    assert job.done is None
    assert job.starts[-1].groups == {0: 0}
    assert 1 not in job.alive


def test_a_job_that_cannot_go_on_without_an_excluded_node_fails() -> None:
    job = world("2")
    for _ in range(6):
        job.lose(1)
        job.wait(40)
    assert job.done is not None
    assert job.done.state == "failed"
    assert "node 1 was lost 6 times" in job.done.reason


def test_stop_ends_the_job_in_every_phase() -> None:
    for prepare in (lambda job: None, lambda job: job.lose(0), lambda job: job.exit(0, 0, 1)):
        job = world()
        prepare(job)
        job.do(job.machine.stop("SIGTERM received"))
        assert job.done == Done("stopped", "SIGTERM received")
        assert job.machine.stop("again") == []


def failure(rank: int, code: int, message: str = "") -> Failure:
    return Failure(node=rank, rank=rank, code=code, message=message)


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([failure(0, 1, "RuntimeError: Connection closed by peer"), failure(2, -9)], 2),
        ([failure(0, -signal.SIGABRT), failure(1, -signal.SIGSEGV)], 1),
        ([failure(0, -signal.SIGABRT)], 0),
        ([failure(0, 1, "DistBackendError: NCCL error"), failure(1, 1, "ValueError: bad")], 1),
        ([failure(3, 1, "ValueError: a"), failure(1, 1, "ValueError: b")], 3),
        ([failure(1, 1, "RuntimeError: recv failed"), failure(0, 1, "RuntimeError: timed out")], 1),
    ],
)
def test_the_root_cause_is_not_a_consequence(failures: list[Failure], rank: int) -> None:
    assert root_cause(failures).rank == rank


events = st.one_of(
    st.tuples(st.just("exit"), st.integers(0, 7), st.sampled_from([0, 1, 3, -9, -11])),
    st.tuples(st.just("lose"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("wait"), st.integers(1, 40), st.just(0)),
    st.tuples(st.just("step"), st.integers(1, 5), st.just(0)),
)


@settings(max_examples=400)
@given(
    low=st.integers(1, 4), extra=st.integers(0, 3), workers=st.integers(1, 2), budget=st.integers(0, 4),
    schedule=st.lists(events, max_size=40),
)  # fmt: skip
def test_any_schedule_keeps_the_promises(
    low: int, extra: int, workers: int, budget: int, schedule: list[tuple[str, int, int]]
) -> None:
    nodes = NodeRange(minimum=low, maximum=low + extra, workers=workers)
    job = World(RoundMachine(nodes, max_restarts=budget, now=0.0))
    job.do(job.machine.begin())
    for kind, number, code in schedule:
        if job.done is not None:
            break
        if kind == "wait":
            job.wait(number)
        elif kind == "step":
            job.machine.progressed(job.machine._step + number)
        elif kind == "lose" and number in job.alive:
            job.lose(number)
        elif kind == "exit":
            running = [(node, rank) for node, ranks in sorted(job.workers.items()) for rank in sorted(ranks)]
            if running:
                job.exit(*running[number % len(running)], code)
    for start in job.starts:
        assert low <= len(start.groups) <= low + extra
    assert [start.round for start in job.starts] == list(range(len(job.starts)))
    assert job.machine.restarts <= budget + 1
    if job.done is None:
        # Left alone, a job that is not over always comes back to training.
        job.wait(120)
        assert job.done is not None or job.machine.phase == "running"
    if job.done is not None and job.done.state == "succeeded":
        assert not any(job.workers.values())


def running(nodes: str = "2", max_restarts: int = 10) -> RoundMachine:
    machine = RoundMachine(parse_nodes(nodes), max_restarts=max_restarts, now=0.0)
    machine.begin()
    for node in range(machine.nodes.maximum):
        machine.node_ready(node, 0.0)
    assert machine.phase == "running"
    return machine


def test_a_node_that_leaves_politely_ends_the_round_and_is_not_charged() -> None:
    machine = running(max_restarts=0)
    assert machine.node_leaving(0, 1.0) == [Stop((0, 1))]
    for rank, code in ((0, -signal.SIGTERM), (1, 143)):
        machine.worker_exited(Failure(node=rank, rank=rank, code=code), node=rank, rank=rank, now=1.0)
    assert machine.node_lost(0, 1.0) == [Spawn(0)]
    assert machine.node_stopped(1, 1.0) == []
    assert machine.node_ready(0, 1.0) == [Start(1, {0: 0, 1: 1})]
    assert machine.restarts == 0


def test_a_store_lost_while_the_workers_meet_ends_the_round_and_later_does_not() -> None:
    machine = running(max_restarts=0)
    machine.progressed(1, in_round=-1)
    assert machine.store_lost("died") == [Stop((0, 1))]
    for node in (0, 1):
        machine.node_stopped(node, 0.0)
    assert machine.phase == "running"
    machine.progressed(1, in_round=1)
    assert machine.store_lost("died") == [], "they have met, and need it no more"
    failure = Failure(node=0, rank=0, code=1, message="DistNetworkError: connection reset")
    machine.worker_exited(failure, node=0, rank=0, now=0.0)
    for node in (0, 1):
        machine.node_stopped(node, 0.0)
    assert (machine.phase, machine.restarts) == ("running", 0)


def test_a_store_that_is_lost_again_and_again_ends_the_job() -> None:
    machine = running()
    for _ in range(5):
        assert machine.store_lost("died") == [Stop((0, 1))]
        for node in (0, 1):
            machine.node_stopped(node, 0.0)
    (stop, done) = machine.store_lost("died")
    assert stop == Stop((0, 1))
    assert done == Done("failed", "the store host was lost 6 times in a row; the last one died")


def test_an_early_clean_exit_is_the_cause_of_the_others_broken_connections() -> None:
    job = world("2")
    for _ in range(2):
        job.exit(1, 1, 0)
        job.exit(0, 0, 1, "RuntimeError: Connection closed by peer")
        job.wait(0.2)
    assert job.done is not None
    assert job.done.state == "failed"
    assert "rank 1 failed twice at step 0" in job.done.reason
    assert "ended with exit code 0 while the others went on" in job.done.reason
