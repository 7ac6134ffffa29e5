"""Whole jobs: sizes that change quickly, two jobs at once, what processes leave behind (R10, R20, R21, R23, R25)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest


def test_sizes_that_change_quickly_lose_no_sample(job: Any) -> None:
    """R23: 2, 3, 1, 3, the last three without a pause."""
    one = job().start("--nodes", "1:3", "--max-restarts", "0")
    one.wait_for_world(3)
    one.scale(2, "--wait", "60")
    one.wait_for_world(2)
    for size in (3, 1, 3):
        one.scale(size)
    one.wait(lambda: (now := one.status())["world_size"] == 3 and now["state"] == "running", "three workers")
    one.wait_for_world(3)
    record = one.finish()
    assert record["restarts"] == 0
    one.assert_whole(record)
    one.assert_one_master()
    steps = [line["step"] for line in one.folder.metrics()]
    assert steps == list(range(1, len(steps) + 1)), "a planned change does no step twice"


def test_two_jobs_with_default_settings_do_not_meet_and_one_rank_may_end_late(job: Any) -> None:
    """R25 and R10: a worker of each is killed, and rank 0 of each is busy for a while after the last step."""
    both = [job(name).start("--nodes", "1:2", TAIL="3") for name in ("first", "second")]
    for one in both:
        one.wait_for_world(2)
    for one in both:
        os.kill(one.worker(1), signal.SIGKILL)
    for one in both:
        one.recovered()
        one.wait_for_world(2)
    masters = [{mark["master"] for mark in one.marks("train")} for one in both]
    assert not masters[0] & masters[1]
    records = [one.finish() for one in both]
    for one, record in zip(both, records, strict=True):
        assert record["restarts"] == 1
        assert len(one.marks("end")) == 2
        one.assert_whole(record)
    pids = [{mark["pid"] for mark in one.marks("train")} for one in both]
    assert not pids[0] & pids[1]


@pytest.mark.parametrize("victim", ["worker", "agent", "launcher"])
def test_loader_workers_go_with_whoever_is_killed(job: Any, sandbox: Any, victim: str) -> None:
    """R20."""
    memory = _shared_memory()
    one = job().start("--nodes", "1:2", LOADERS="2")
    one.wait_for_world(2)
    worker = one.worker(1)
    loaders = [pid for pid, _ in sandbox.processes() if _parent(pid) == worker]
    assert len(loaders) >= 2
    if victim == "launcher":
        launcher = next(pid for pid, line in sandbox.processes() if "kfp-elastic run" in line)
        os.kill(launcher, signal.SIGKILL)
        one.process.communicate(timeout=30)
        sandbox.assert_no_process_left()
    else:
        os.kill(worker if victim == "worker" else one.agent("1"), signal.SIGKILL)
        one.wait(lambda: not any(_is_alive(pid) for pid in [worker, *loaders]), "their end", timeout=10)
        one.recovered()
        one.wait_for_world(2)
        one.assert_whole(one.finish())
    left = {
        name for name in _shared_memory() - memory if any(f"_{pid}_" in name for pid in [worker, *loaders])
    }
    assert not left


def test_a_script_makes_its_own_groups(job: Any) -> None:
    """R21: env:// by itself, and then a group on a port of its own, before and after a loss."""
    script = """
import os, pathlib, socket, time, torch, torch.distributed as dist
from elastic_runtime import worker
context = worker.context()
dist.init_process_group("gloo")
port = [0]
if context.rank == 0:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = [probe.getsockname()[1]]
dist.broadcast_object_list(port, 0)
dist.destroy_process_group()
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port[0]}", rank=context.rank, world_size=context.world_size)
pair = dist.new_group([0, 1])
number, step = torch.ones(1), 0
while True:
    dist.all_reduce(number, group=pair)
    assert number.item() == 2
    number = torch.tensor([float(pathlib.Path("finish").exists())])
    dist.all_reduce(number)
    step += 1
    worker.log(step=step, samples=0)
    if number.item() == 2:
        break
    number = torch.ones(1)
    time.sleep(0.01)
dist.barrier()
dist.destroy_process_group()
"""
    one = job().start("--nodes", "2", "--grace", "1", script=script)
    one.wait_for_world(2)
    rank_1 = [event["pid"] for event in one.events("worker") if event["rank"] == 1]
    os.kill(rank_1[-1], signal.SIGKILL)
    one.recovered()
    record = one.finish()
    assert record["restarts"] == 1


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return -1


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False
