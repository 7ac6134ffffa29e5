"""Processes of a job that hang or go at an unlucky moment: each is noticed, bounded, and charged to nobody else."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_runtime.jobs.folder import JobFolder

STEPS = """
import pathlib, time
from elastic_runtime import worker
context = worker.context()
step = 0
while not pathlib.Path("finish").exists():
    step += 1
    worker.log(step=step)
    time.sleep(0.01)
"""


def record_of(folder: Path) -> dict[str, Any]:
    document = JobFolder(folder).record()
    assert document is not None, "the job left a record"
    return document


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in JobFolder(folder).events() if event["kind"] == kind]


def pid_of(sandbox: Any, what: str) -> int:
    # A child that has not called exec yet shows its parent's command line; the last one is the newest.
    return max(pid for pid, command in sandbox.processes() if what in command)


def finish(sandbox: Any, process: Any) -> dict[str, Any]:
    (sandbox.folder / "finish").touch()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    return record_of(sandbox.folder / "job")


def start(sandbox: Any, script: str = STEPS, *options: str) -> Any:
    return sandbox.start(
        "kfp-elastic", "run", "--nodes", "2", "--state-dir", "job", *options, sandbox.script(script)
    )


def test_a_stopped_agent_is_killed_and_its_node_starts_again(sandbox: Any, wait: Callable[..., Any]) -> None:
    process, folder = start(sandbox, STEPS, "--max-restarts", "0"), sandbox.folder / "job"
    wait(lambda: len(events_of(folder, "worker")) == 2)
    os.kill(events_of(folder, "agent")[1]["pid"], signal.SIGSTOP)
    wait(lambda: events_of(folder, "recovered"), what="recovery from the hung agent")
    record = finish(sandbox, process)
    assert [event["node"] for event in events_of(folder, "node_hung")] == ["1"]
    assert record["restarts"] == 0, "a lost node is not charged"
    assert [recovery["cause"] for recovery in record["recoveries"]] == ["node 1 lost"]


def test_an_agent_that_is_stopped_at_the_end_of_the_job_does_not_hold_it_up(
    sandbox: Any, wait: Callable[..., Any]
) -> None:
    process, folder = start(sandbox, STEPS, "--grace", "0.5"), sandbox.folder / "job"
    wait(lambda: len(events_of(folder, "worker")) == 2)
    os.kill(events_of(folder, "agent")[1]["pid"], signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert record_of(folder)["state"] == "stopped"


def test_sigterm_to_an_agent_is_a_polite_leave_and_no_failure(sandbox: Any, wait: Callable[..., Any]) -> None:
    process, folder = start(sandbox, STEPS, "--max-restarts", "0"), sandbox.folder / "job"
    wait(lambda: events_of(folder, "worker") and (folder / "metrics.jsonl").exists())
    os.kill(events_of(folder, "agent")[0]["pid"], signal.SIGTERM)
    wait(lambda: events_of(folder, "recovered"))
    record = finish(sandbox, process)
    assert record["restarts"] == 0
    assert [recovery["cause"] for recovery in record["recoveries"]] == ["node 0 left"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_store_lost_while_the_workers_meet_ends_the_round_uncharged(
    sandbox: Any, wait: Callable[..., Any], number: signal.Signals
) -> None:
    script = """
import os, pathlib, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    pathlib.Path(f"here{os.environ['RANK']}").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
import torch.distributed as dist, torch
from elastic_runtime import worker
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
worker.log(step=1)
dist.barrier()
dist.destroy_process_group()
"""
    process, folder = start(sandbox, script, "--max-restarts", "0"), sandbox.folder / "job"
    wait(lambda: (sandbox.folder / "here0").exists() and (sandbox.folder / "here1").exists())
    wait(lambda: any("store_host" in command for _, command in sandbox.processes()))
    store = pid_of(sandbox, "store_host")
    if number == signal.SIGSTOP:
        wait(lambda: len(list(Path(f"/proc/{store}/task").iterdir())) > 1, what="the store's own thread")
    os.kill(store, number)
    (sandbox.folder / "go").touch()
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, out + err
    record = record_of(folder)
    assert record["restarts"] == 0
    assert [recovery["cause"] for recovery in record["recoveries"]] == ["store host lost"]


def test_what_a_killed_agents_workers_leave_behind_is_gone_before_the_next_round(
    sandbox: Any, wait: Callable[..., Any]
) -> None:
    script = """
import os, pathlib, subprocess, time
from elastic_runtime import worker
if worker.context().round == 0:
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["setsid", "sleep", "600"])
    subprocess.run(["sh", "-c", "setsid sleep 600 & exit 0"])
worker.log(step=1)
while not pathlib.Path("finish").exists():
    time.sleep(0.01)
"""
    process, folder = start(sandbox, script), sandbox.folder / "job"
    wait(lambda: sum("sleep 600" in command for _, command in sandbox.processes()) == 6)
    os.kill(events_of(folder, "agent")[0]["pid"], signal.SIGKILL)
    wait(lambda: len(events_of(folder, "round")) == 2)
    assert [command for _, command in sandbox.processes() if "sleep 600" in command] == []
    assert finish(sandbox, process)["restarts"] == 0


def test_a_step_that_the_failed_round_still_finished_ends_no_recovery(sandbox: Any) -> None:
    """Without collectives, rank 0 goes on after rank 1's death until it is stopped."""
    script = """
import os, pathlib, signal, sys, time
from elastic_runtime import worker
context = worker.context()
if context.round:
    worker.log(step=1)
    sys.exit()
signal.signal(signal.SIGTERM, lambda *_: (worker.log(step=4), os._exit(143)))
worker.log(step=3)
if context.rank == 1:
    while not pathlib.Path(os.environ["ELASTIC_JOB_DIR"], "metrics.jsonl").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
    process = start(sandbox, script)
    process.communicate(timeout=60)
    record = record_of(sandbox.folder / "job")
    (recovery,) = record["recoveries"]
    assert (recovery["cause"], recovery["steps_lost"]) == ("rank 1: killed by SIGKILL", 4)
    assert record["restarts"] == 1


def test_the_second_interrupt_ends_the_grace(sandbox: Any, wait: Callable[..., Any]) -> None:
    script = """
import pathlib, signal, time
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path("asked").touch())
pathlib.Path("ready").touch()
while True:
    time.sleep(1)
"""
    process = sandbox.start(
        "kfp-elastic", "run", "--grace", "600", "--state-dir", "job", sandbox.script(script)
    )
    wait((sandbox.folder / "ready").exists)
    process.send_signal(signal.SIGINT)
    wait((sandbox.folder / "asked").exists)
    time.sleep(1.1)  # Two signals within a second are one: the input here, not a wait for something.
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert record_of(sandbox.folder / "job")["state"] == "stopped"


def test_a_long_grace_is_given_also_on_ctrl_c(sandbox: Any, wait: Callable[..., Any]) -> None:
    script = """
import pathlib, signal, sys, time
def slow(*_):
    time.sleep(12)
    pathlib.Path("saved").touch()
    sys.exit()
signal.signal(signal.SIGTERM, slow)
pathlib.Path("ready").touch()
while True:
    time.sleep(1)
"""
    process = sandbox.start(
        "kfp-elastic", "run", "--grace", "60", "--state-dir", "job", sandbox.script(script)
    )
    wait((sandbox.folder / "ready").exists)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert (process.returncode, (sandbox.folder / "saved").exists()) == (130, True)
    assert record_of(sandbox.folder / "job")["state"] == "stopped"
