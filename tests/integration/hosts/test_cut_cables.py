"""Case R19a: a host falls silent, a network falls in two, the coordinator is cut off: real sockets on cut cables."""

from __future__ import annotations

import os
import signal
import time
from itertools import pairwise
from typing import Any

import pytest

pytestmark = pytest.mark.root
_SLOW = 20.0
"""Seconds that a recovery may take on a machine with other work; what it takes on a quiet one is printed."""


def moment(cluster: Any, *, after: float, world: int) -> float:
    """Return when the first step of a world of this size was reported after a moment; 0 if there was none."""
    found = (
        line["time"] for line in cluster.metrics() if line["time"] > after and line["world_size"] == world
    )
    return next(found, 0.0)


def check_history(cluster: Any, last: int) -> None:
    """No two rounds at once, every step there, and only steps of an abandoned round done again."""
    lines = cluster.metrics()
    spans: dict[int, list[float]] = {}
    for line in lines:
        spans.setdefault(line["round"], []).append(line["time"])
    for (earlier, before), (later, after) in pairwise(sorted(spans.items())):
        assert max(before) < min(after), f"rounds {earlier} and {later} trained at once"
    assert {line["step"] for line in lines} == set(range(1, last + 1))
    for round_ in spans:
        steps = [line["step"] for line in lines if line["round"] == round_]
        assert steps == list(range(steps[0], steps[-1] + 1)), f"round {round_}: a step twice, or left out"
    newest = {line["step"]: line for line in lines}
    assert newest[last]["samples"] == 20 * last


def check_end(ends: list[dict[str, Any]], last: int) -> None:
    """All hosts hold the same, and each step counts once."""
    assert [end["step"] for end in ends] == [last] * len(ends)
    assert [end["batches"] for end in ends] == [last] * len(ends)
    assert len({end["state"] for end in ends}) == 1
    assert all(end["finite"] for end in ends)


def pids(cluster: Any) -> list[set[int]]:
    """Return the processes that trained, by host."""
    return [{line["pid"] for line in cluster.steps(name)} for name in cluster.names]


def test_one_host_falls_silent_and_then_the_coordinator(cluster, network, wait):
    cluster.start(epochs=40)
    wait(lambda: cluster.trains(4) and len(cluster.metrics()) > 20, what="four hosts train")

    cut = time.time()
    network.cut("cedar")
    on = wait(lambda: moment(cluster, after=cut, world=3), what="the other three go on")
    assert on - cut < cluster.heartbeat + _SLOW
    held = cluster.steps("cedar")[-1]
    wait(lambda: cluster.metrics()[-1]["step"] > held["step"] + 10, what="the three leave the cut one behind")
    assert cluster.steps("cedar")[-1] == held  # It waits.
    healed = time.time()
    network.mend("cedar")
    back = wait(lambda: moment(cluster, after=healed, world=4), what="the cut host is in again")
    assert back - healed < _SLOW

    wait(lambda: cluster.trains(4), what="a whole round")
    before = cluster.status()
    cut_off = time.time()
    network.cut("coordinator")
    wait(lambda: time.time() > cut_off + 5 * cluster.heartbeat, what="five heartbeats")
    assert cluster.status() == {}
    network.mend("coordinator")
    wait(cluster.status, what="the coordinator is there again")
    known_again = time.time()
    # Longer than it waits for those that have not come back.
    wait(lambda: time.time() > known_again + 7 * cluster.heartbeat, what="seven heartbeats")
    after = cluster.status()
    assert (after["round"], after["nodes"], after["world_size"]) == (before["round"], before["nodes"], 4)
    times = [line["time"] for line in cluster.metrics() if line["time"] > cut_off]
    longest = max(later - earlier for earlier, later in pairwise(times))
    assert longest < 3.0

    check_end(cluster.finish(), 800)
    check_history(cluster, 800)
    assert all(len(found) == 1 for found in pids(cluster))  # Nobody was started again.
    print(f"three go on {on - cut:.2f} s after the cut, four {back - healed:.2f} s after the mending; "
          f"longest step while the coordinator was cut off {longest:.2f} s")  # fmt: skip


def test_a_network_in_two_halves(cluster, network, wait):
    cluster.start(epochs=40)
    wait(lambda: cluster.trains(4) and len(cluster.metrics()) > 20, what="four hosts train")
    minority = cluster.names[:2]  # Rank 0 is there, as a rule.

    cut = time.time()
    network.split(*minority)
    on = wait(lambda: moment(cluster, after=cut, world=2), what="the half with the coordinator goes on")
    wait(lambda: time.time() > cut + 10, what="ten seconds")
    late = [line for name in minority for line in cluster.steps(name) if line["time"] > cut + 1]
    assert late == [], "the half without the coordinator trained"
    assert cluster.trains(2)
    healed = time.time()
    network.heal(*minority)
    back = wait(lambda: moment(cluster, after=healed, world=4), what="all four train again")
    assert back - healed < _SLOW

    check_end(cluster.finish(), 800)
    check_history(cluster, 800)
    assert all(len(found) == 1 for found in pids(cluster))
    print(f"two go on {on - cut:.2f} s after the cut, four {back - healed:.2f} s after the healing")


def test_who_does_not_belong_to_the_job_is_refused(cluster, network, wait):
    (cluster.folder / "epochs").write_text("60")
    cluster.lead()
    wait(cluster.status, what="the coordinator")
    cluster.join("amber")
    wait(lambda: [node["id"] for node in cluster.status()["nodes"]] == ["amber"], what="the first host")

    other = cluster.folder / "other.py"
    other.write_text("print('another program')\n")
    cluster.join("birch-2", script=other)
    assert cluster.code("birch-2") == 1
    assert "node birch-2 ends: program " in cluster.said("birch-2")

    cluster.join("cedar", secret=cluster.other_secret())
    wait(lambda: "the secret is not this job's" in cluster.said("cedar"), what="the refusal")
    assert cluster.status()["refused"]["unauthentic"] >= 1

    # One that has seen a later coordinator does nothing that this one, of an older term, says.
    answer = cluster.answer_to_join("dune", seen=99)
    assert answer == {"kind": "dismiss", "reason": "term 1 is stale: term 99 was seen"}
    assert [node["id"] for node in cluster.status()["nodes"]] == ["amber"]


def test_a_worker_dies_while_the_coordinator_is_cut_off_and_then_an_agent(cluster, network, wait):
    cluster.start(epochs=500)
    wait(lambda: cluster.trains(4) and len(cluster.metrics()) > 20, what="four hosts train")
    first = pids(cluster)
    network.cut("coordinator")
    wait(lambda: "said nothing" in cluster.said("cedar"), what="the agents find it gone")
    os.kill(min(first[2]), signal.SIGKILL)
    killed = time.time()
    # Longer than the ten seconds that a coordinator has to explain a broken collective when it can be asked.
    wait(lambda: time.time() > killed + 11, what="eleven seconds")
    mended = time.time()
    network.mend("coordinator")
    wait(lambda: moment(cluster, after=mended, world=4), what="four train again")
    assert [len(found) for found in pids(cluster)] == [1, 1, 2, 1]  # The others waited for it.

    cut = time.time()
    before = cluster.steps("dune")[-1]["pid"]
    cluster.kill("dune")
    on = wait(lambda: moment(cluster, after=cut, world=3), what="the others go on")
    assert on - cut < _SLOW
    wait(
        lambda: not cluster.of_host("dune"),
        what="the end of the worker, the zygote and the store of the killed agent",
    )
    cluster.join("dune")
    wait(lambda: moment(cluster, after=on, world=4), what="another agent's worker is in")
    assert cluster.steps("dune")[-1]["pid"] != before
