"""Workers are lost at every point of a step: no committed step, no sample and no bit of state is lost."""

from __future__ import annotations

import signal
from typing import Any

import pytest

TOTAL = 20
"""Steps of the script: 64 samples, 16 a step, 5 epochs."""


def assert_whole(cluster: Any, ends: list[dict[str, Any]], world: int) -> None:
    """All survivors end alike, after every step, with BatchNorm counters of the undisturbed run."""
    assert len(ends) == world
    assert {one["step"] for one in ends} == {TOTAL}
    assert len({one["digest"] for one in ends}) == 1
    for one in ends:
        assert one["buffers"] == [TOTAL, TOTAL]
    assert_samples(cluster)


def assert_samples(cluster: Any, total: int = TOTAL, samples: int = 64, per_step: int = 16) -> None:
    """The last round that did a step did it with one share of each rank, and an epoch has every sample once."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for one in cluster.marks("share"):
        known = steps.get(one["step"], [])
        if known and known[0]["round"] > one["round"]:
            continue
        steps[one["step"]] = [*(old for old in known if old["round"] == one["round"]), one]
    for step, shares in steps.items():
        assert sorted(one["rank"] for one in shares) == list(range(shares[0]["world"])), step
    for first in range(0, total, samples // per_step):
        seen = [one["seen"] for step in range(first, first + samples // per_step) for one in steps[step]]
        assert sorted(number for numbers in seen for number in numbers) == list(range(samples))


@pytest.mark.parametrize("where", ["forward", "backward", "before-step", "optimizer", "loader"])
@pytest.mark.parametrize("rebuild", [False, True], ids=["same objects", "rebuilt objects"])
def test_a_peer_is_killed(cluster: Any, where: str, rebuild: bool) -> None:
    cluster.start(3, strike=f"SIGKILL {where} 1 7", rebuild=rebuild)
    ends = cluster.wait_for_end(2)
    assert_whole(cluster, ends, 2)
    steps = [line["step"] for line in cluster.metrics()]
    assert sorted(set(steps)) == list(range(1, TOTAL + 1))
    assert steps[-1] == TOTAL
    assert cluster.metrics()[-1]["samples"] == 320
    assert len(cluster.marks("returned")) == 2


def test_rank_0_is_killed_while_it_evaluates(cluster: Any) -> None:
    cluster.start(2, strike="SIGKILL evaluate 0 5", evaluate=True)
    assert_whole(cluster, cluster.wait_for_end(1), 1)
    assert cluster.seen("said", kind="phase", name="evaluate")


def test_empty_shares_and_micro_batches(cluster: Any) -> None:
    cluster.start(3, strike="SIGKILL backward 2 7", global_batch=2, samples=8, micro_batch=1, norm=False)
    ends = cluster.wait_for_end(2)
    assert {one["step"] for one in ends} == {TOTAL}
    assert len({one["digest"] for one in ends}) == 1
    assert_samples(cluster, samples=8, per_step=2)


def test_a_worker_leaves_politely(cluster: Any) -> None:
    cluster.start(2, pause=0.02, epochs=30)
    cluster.wait_for_step(3)
    cluster.tell(do="leave", worker=0)
    cluster.wait_for_end(2)
    assert [one["worker"] for one in cluster.marks("returned")] == [1]
    done = [(one["step"], one["rank"]) for one in cluster.marks("step")]
    assert len(done) == len(set(done))
    assert [one["buffers"] for one in cluster.marks("end")] == [[120, 120]]
    assert_samples(cluster, total=120)


def test_a_stopped_peer_does_not_hold_the_others(cluster: Any) -> None:
    """R27: its sockets stay open, so gloo itself would wait for its whole time-out."""
    cluster.start(3, strike="SIGSTOP forward 1 7")
    cluster.wait(lambda: list(cluster.folder.glob("struck-*")), "the strike")
    stopped = next(
        one["worker"] for one in cluster.marks("attached") if one["rank"] == 1 and one["world"] == 3
    )
    cluster.tell(do="lose", worker=stopped)
    ends = cluster.wait_for_end(2, timeout=30)
    assert_whole(cluster, ends, 2)
    told = cluster.seen("go", world=2)[0]["time"]
    first = min(one["time"] for one in cluster.marks("step", world=2))
    assert first - told < 20
    cluster.kill(stopped)


def test_a_joiner_gets_everything_from_a_survivor(cluster: Any) -> None:
    cluster.start(1, pause=0.02, epochs=30)
    cluster.wait_for_step(5)
    cluster.tell(do="spawn")
    ends = cluster.wait_for_end(2)
    joined = cluster.marks("attached", world=2)
    assert len(joined) == 2
    assert joined[0]["step"] == joined[1]["step"] > 5
    assert joined[0]["digest"] == joined[1]["digest"]
    assert len({one["digest"] for one in ends}) == 1
    assert {one["step"] for one in ends} == {120}
    assert [one["buffers"] for one in ends] == [[120, 120]] * 2
    # A planned change loses nothing: every step was done once by each rank.
    done = [(one["step"], one["rank"]) for one in cluster.marks("step")]
    assert len(done) == len(set(done))


def test_twenty_peers_are_killed_in_backward(cluster: Any) -> None:
    """R26."""
    cluster.start(2, strike="SIGKILL backward 1 +3*20", epochs=200, pause=0.005)
    for number in range(20):
        cluster.wait(lambda number=number: len(cluster.seen("exit", code=-9)) > number, f"death {number + 1}")
        cluster.tell(do="spawn")
        cluster.wait(
            lambda number=number: len([one for one in cluster.seen("go") if one["world"] == 2]) > number + 1,
            f"the replacement {number + 1}",
        )
    ends = cluster.wait_for_end(2)
    assert {one["step"] for one in ends} == {800}
    assert [one["buffers"] for one in ends] == [[800, 800]] * 2
    assert len({one["digest"] for one in ends}) == 1
    assert len({one["statistics"] for one in ends}) == 1


def test_loader_workers_stay_and_lose_no_sample(cluster: Any) -> None:
    cluster.start(2, strike="SIGKILL backward 1 7", num_workers=2)
    assert_whole(cluster, cluster.wait_for_end(1), 1)


def test_a_death_after_the_last_step(cluster: Any) -> None:
    cluster.start(2, strike="SIGKILL end 1 20")
    ends = cluster.wait_for_end(1)
    assert_whole(cluster, ends, 1)
    assert len(cluster.marks("step", world=1)) == 0


def test_a_users_exception_is_raised_at_once(cluster: Any, sandbox: Any) -> None:
    """R33."""
    script = sandbox.script(
        "import torch, elastic_runtime as elastic\n"
        "from torch import nn\n"
        "data = torch.utils.data.TensorDataset(torch.randn(64, 4))\n"
        "def train(job):\n"
        "    net = job.attach(model=nn.Linear(4, 1))\n"
        "    for step in job.steps(data, global_batch=8, epochs=100):\n"
        "        for (x,) in step:\n"
        "            if job.rank == 1 and job.global_step == 5:\n"
        "                raise ValueError('mine')\n"
        "            step.backward(net(x).mean())\n"
        "elastic.run(train)\n"
    )
    cluster.start(2, script=script)
    cluster.wait(lambda: cluster.seen("exit", code=1), "the worker with the exception ended")
    failed = cluster.seen("exit", code=1)[0]["worker"]
    assert "ValueError: mine" in (cluster.folder / f"worker-{failed}.log").read_text()


def test_the_source_dies_in_the_middle_of_the_broadcast(cluster: Any) -> None:
    """R28: 64 MiB of state, the source is killed when the joiner has been let in; the other survivor gives it."""
    cluster.start(2, pause=0.01, epochs=60, width=2048)
    cluster.wait_for_step(2)
    cluster.tell(do="spawn")
    go = cluster.wait(lambda: [one for one in cluster.seen("go") if one["world"] == 3], "the joiner's round")[
        0
    ]
    source = next(int(worker) for worker, rank in go["ranks"].items() if rank == go["source"])
    cluster.kill(source, signal.SIGKILL)
    ends = cluster.wait_for_end(2)
    assert {one["step"] for one in ends} == {240}
    assert len({one["digest"] for one in ends}) == 1
    assert [one["buffers"] for one in ends] == [[240, 240]] * 2
