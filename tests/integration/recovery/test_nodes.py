"""Nodes are lost, leave and come back: R1, R2, R3, R5, R6, R8, R9, R17, R34, R35 of the cases."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

# Only sleeps, and so never notices that a peer is gone.
SLEEPER = """
import json, os, pathlib, time
from elastic_runtime import worker
place = worker.context()
with open(os.path.join(os.environ["ELASTIC_JOB_DIR"], "marks.jsonl"), "a") as file:
    file.write(json.dumps({"kind": "train", "pid": os.getpid(), "rank": place.rank, "world": place.world_size,
        "round": place.round, "master": os.environ["MASTER_ADDR"] + " " + os.environ["MASTER_PORT"],
        "restart_count": os.environ["TORCHELASTIC_RESTART_COUNT"]}) + "\\n")
worker.log(step=place.round + 1, samples=0)
while not pathlib.Path("finish").exists():
    time.sleep(0.01)
"""


def test_nodes_that_are_killed_leave_and_come_back_in_place(job: Any) -> None:
    """R2, R3, R9."""
    one = job().start("--nodes", "2:3", "--max-restarts", "0")
    one.wait_for_world(3)
    os.kill(one.agent("1"), signal.SIGUSR1)
    one.wait(lambda: one.marks("usr1"), "the worker's own handler")
    assert [mark["pid"] for mark in one.marks("usr1")] == [one.worker(1)]
    # The node with rank 0 dies, and comes back under a name that sorts first.
    assert [event["node"] for event in one.events("worker") if event["rank"] == 0] == ["0"]
    os.kill(one.agent("0"), signal.SIGKILL)
    one.recovered()
    one.wait_for_world(3)
    # One leaves politely: at a step boundary, so that no step is lost; and is there again at once.
    rounds = len(one.events("round"))
    os.kill(one.agent("1"), signal.SIGTERM)
    one.wait(lambda: len(one.events("round")) >= rounds + 2, "the leave and the return")
    one.wait_for_world(3)
    record = one.finish()
    assert record["restarts"] == 0
    assert "closed" not in one.output().lower()
    assert record["world_size"] == 3
    assert sum(recovery["steps_lost"] for recovery in record["recoveries"]) == 0
    one.assert_one_master()
    one.assert_whole(record)
    assert {mark["world"] for mark in one.marks("train")} == {2, 3}


def test_nodes_of_an_unmodified_script_that_only_sleeps(job: Any) -> None:
    """R1, R2, R3: nothing in the workers would ever notice."""
    one = job().start("--nodes", "2:3", "--max-restarts", "0", "--grace", "1", script=SLEEPER)
    one.wait(lambda: len(one.marks("train")) == 3, "the first round")
    for number, signum in enumerate([signal.SIGKILL, signal.SIGTERM]):
        rounds = len(one.events("round"))
        os.kill(one.agent("0"), signum)
        one.wait(lambda rounds=rounds: len(one.events("round")) > rounds, "another round")
        newest = one.events("round")[-1]["round"]
        world = one.events("round")[-1]["world_size"]
        one.wait(
            lambda newest=newest, world=world: sum(m["round"] >= newest for m in one.marks("train")) >= world,
            "its workers",
        )
        one.recovered(number + 1)
        # The node is there again, and lets the job grow if it has not already.
        one.wait(
            lambda: sum(m["round"] == one.marks("train")[-1]["round"] for m in one.marks("train")) == 3, "all"
        )
    record = one.finish()
    assert record["restarts"] == 0
    assert record["recoveries"][0]["cause"] == "node 0 lost"
    one.assert_one_master()


def test_a_node_whose_workers_always_die_is_left_out(job: Any, sandbox: Any) -> None:
    """R5. The survivors fill the ranks up to theirs, so whoever is to take the last one is on that node."""
    poison = """
import os, pathlib
if os.environ["RANK"] == "2" and pathlib.Path("poison").exists():
    os._exit(3)
"""
    one = job().start("--nodes", "1:3", first=poison)
    one.wait_for_world(3)
    (sandbox.folder / "poison").touch()
    os.kill(one.worker(2), signal.SIGKILL)
    one.wait(lambda: one.events("node_excluded"), "the exclusion")
    assert [event["node"] for event in one.events("node_excluded")] == ["2"]
    one.wait_for_world(2)
    assert [node["id"] for node in one.status()["nodes"] if node["workers"]] == ["0", "1"]
    record = one.finish()
    assert 0 < record["restarts"] <= 10
    one.assert_whole(record)


def test_crashes_spread_over_nodes_use_one_budget(job: Any) -> None:
    """R6: three failures on three nodes, two allowed."""
    script = SLEEPER.replace(
        "while not",
        """
import sys
if place.rank == place.round:
    metrics = pathlib.Path(os.environ["ELASTIC_JOB_DIR"], "metrics.jsonl")
    while not metrics.exists() or f'"round": {place.round}' not in metrics.read_text().replace('":', '": ').replace(":  ", ": "):
        time.sleep(0.01)
    sys.exit(1)
while not""",
    )
    one = job().start("--nodes", "3", "--max-restarts", "2", "--grace", "1", script=script)
    record = one.ended(1)
    assert (record["state"], record["restarts"]) == ("failed", 2)
    assert [(event["node"], event["code"]) for event in one.events("worker_failed")] == [
        ("0", 1),
        ("1", 1),
        ("2", 1),
    ]
    counts: dict[int, list[str]] = {}
    for mark in one.marks("train"):
        counts.setdefault(mark["round"], []).append(mark["restart_count"])
    assert counts == {number: [str(number)] * 3 for number in range(3)}


@pytest.mark.parametrize(("grace", "needed", "saved"), [("0.5", 40, False), ("30", 1, True)])
def test_a_worker_has_its_grace_and_no_more(
    job: Any, sandbox: Any, grace: str, needed: float, saved: bool
) -> None:
    """R8, when a node leaves: the peers of an unmodified script are stopped as well."""
    slow = f"""
import pathlib, signal, sys, time
def handler(*_):
    end = time.monotonic() + {needed}
    while time.monotonic() < end:
        time.sleep(0.05)
    pathlib.Path("saved").touch()
    sys.exit()
signal.signal(signal.SIGTERM, handler)
"""
    one = job().start("--nodes", "1", "--grace", grace, script=slow + SLEEPER)
    one.wait(lambda: one.marks("train"), "the worker")
    os.kill(one.agent("0"), signal.SIGTERM)
    one.wait(lambda: len(one.marks("train")) == 2, "the next round", timeout=30)
    assert (sandbox.folder / "saved").exists() is saved
    assert one.finish()["restarts"] == 0


@pytest.mark.parametrize(("limit", "comes_back"), [(600, True), (1, False)])
def test_a_job_below_its_minimum_waits_without_work_and_not_for_ever(
    job: Any, limit: int, comes_back: bool
) -> None:
    """R17. The supervisor is stopped, so that it cannot start the lost node again."""
    one = job().start("--nodes", "2", "--wait-limit", str(limit))
    one.wait_for_world(2)
    supervisor = one.status()["supervisor"]
    os.kill(supervisor, signal.SIGSTOP)
    try:
        os.kill(one.agent("1"), signal.SIGKILL)
        one.wait(
            lambda: one.status()["state"] == ("forming" if comes_back else "failed"), "the loss", timeout=30
        )
        if comes_back:
            watched = [one.coordinator(), one.agent("0"), one.worker(0)]
            before = [_ticks(pid) for pid in watched]
            waited = one.sandbox.run("sleep", "3")
            assert waited.returncode == 0
            used = [
                (_ticks(pid) - ticks) / os.sysconf("SC_CLK_TCK")
                for pid, ticks in zip(watched, before, strict=True)
            ]
            assert max(used) < 0.6, f"seconds of processor time in three seconds of waiting: {used}"
            one.wait(lambda: one.status()["state"] == "forming", "still waiting")
    finally:
        os.kill(supervisor, signal.SIGCONT)
    if comes_back:
        one.recovered()
        one.wait_for_world(2)
        record = one.finish()
        one.assert_whole(record)
        assert record["restarts"] == 0
    else:
        record = one.ended(1)
        assert "waited 1 s: at least 2 workers are needed, 1 are there" in record["reason"]


def test_another_version_of_the_script_is_refused_and_both_are_named(job: Any, sandbox: Any) -> None:
    """R34: an agent that somebody starts by hand."""
    one = job().start("--nodes", "1:2")
    one.wait_for_world(2)
    script = sandbox.folder / "job.py"
    script.write_text(script.read_text() + "\n# newer\n")
    agent = sandbox.run(
        sys.executable,
        "-P",
        "-m",
        "elastic_runtime.agent",
        "--config",
        one.path / "agent.json",
        "--node",
        "7",
    )
    assert agent.returncode in (0, 1), agent.stderr
    (refused,) = one.wait(lambda: one.events("node_refused"), "the refusal")
    assert refused["node"] == "7"
    from elastic_runtime.agent.config import AgentConfig, fingerprint

    assert fingerprint(AgentConfig.read(one.path / "agent.json").program)["program"] in refused["text"]
    assert one.folder.description()["program"]["sha256"][:16] in refused["text"]
    rounds = len(one.events("round"))
    before = one.step()
    one.wait(lambda: one.step() > before + 5, "the job going on")
    assert len(one.events("round")) == rounds
    one.assert_whole(one.finish())


def test_allowed_sizes_leave_a_spare(job: Any) -> None:
    """R35: 1, 2 or 4, and three nodes live. The supervisor is stopped, so that the fourth stays away."""
    one = job().start("--nodes", "1,2,4")
    one.wait_for_world(4)
    supervisor = one.status()["supervisor"]
    os.kill(supervisor, signal.SIGSTOP)
    try:
        os.kill(one.agent("2"), signal.SIGKILL)
        one.wait_for_world(2)
    finally:
        os.kill(supervisor, signal.SIGCONT)
    told = one.wait(lambda: one.events("spare"), "the word of the spare")
    assert told[0]["text"] == "training on 2 workers, 1 spare (allowed sizes of nodes: 1,2,4)"
    one.wait_for_world(4)
    record = one.finish()
    assert record["restarts"] == 0
    one.assert_whole(record)


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_stopped_helper_does_not_hold_up_a_recovery(job: Any) -> None:
    """The keeper of the worker that dies, the zygote that forks the next one, the store host of the next round."""
    one = job().start("--nodes", "2", "--max-restarts", "9")
    one.wait_for_world(2)
    for number, what in enumerate(["elastic-keeper", "elastic-zygote", "elastic_runtime.agent.store_host"]):
        worker = one.worker(1)
        for pid, line in one.sandbox.processes():
            if what in line and (what != "elastic-keeper" or str(worker) in line):
                os.kill(pid, signal.SIGSTOP)
        os.kill(worker, signal.SIGKILL)
        one.recovered(number + 1)
        one.wait_for_world(2)
    record = one.finish()
    assert record["restarts"] == 3
    one.assert_whole(record)
    # Without help the patience with each of them is 15 seconds or more.
    assert max(recovery["seconds"] for recovery in record["recoveries"]) < 12
