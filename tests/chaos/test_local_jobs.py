"""Minutes of random kills of real jobs: workers, agents and the store host, at any moment.

`CHAOS_SECONDS` (default 60) is how long the killing goes on, `CHAOS_SEED` makes it repeatable.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

SCRIPT = """
import pathlib, sys
import torch, torch.distributed as dist
from torch import nn
from elastic_runtime import worker

TOTAL = int(sys.argv[1])
context = worker.context()
dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.999**step)
start = 0
if restored := worker.checkpoint.load(context.checkpoint_dir):
    state, start = restored
    for part, saved in zip((net, optimizer, scheduler), state["parts"]):
        part.load_state_dict(saved)
model = nn.parallel.DistributedDataParallel(net)
step = start
while step < TOTAL or not pathlib.Path("finish").exists():
    model(torch.randn(6, 4)).pow(2).mean().backward()
    optimizer.step(); scheduler.step(); optimizer.zero_grad()
    step += 1
    enough = torch.tensor([float(step >= TOTAL and pathlib.Path("finish").exists())])
    if context.rank == 0 and step % 20 == 0:
        parts = [part.state_dict() for part in (net, optimizer, scheduler)]
        worker.checkpoint.save(context.checkpoint_dir, {"parts": parts}, step=step)
    worker.log(step=step, loss=0.0)
    dist.all_reduce(enough, op=dist.ReduceOp.MIN)
    if enough.item():
        break
print("END", step, int(net[1].num_batches_tracked), scheduler.last_epoch, flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.timeout(900)
def test_a_job_survives_random_kills_and_counts_right(sandbox: Any, wait: Callable[..., Any]) -> None:
    seconds = float(os.environ.get("CHAOS_SECONDS", "60"))
    chance = random.Random(int(os.environ.get("CHAOS_SEED", "0")))
    script = sandbox.script(SCRIPT)
    folder = sandbox.folder / "job"
    process = sandbox.start(
        "kfp-elastic", "run", "--nodes", "1:2", "--max-restarts", "1000", "--grace", "1", "--state-dir", "job",
        script, "--", "50",
    )  # fmt: skip
    wait(lambda: (folder / "metrics.jsonl").exists(), what="a first step")
    kills, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        # The moment is the input: kills fall into steps, starts, saves and recoveries alike.
        time.sleep(chance.expovariate(1 / 3))
        kinds = {"worker": "train.py", "agent": "elastic_runtime.agent", "store": "store_host"}
        wanted = kinds[chance.choices(list(kinds), weights=(6, 3, 1))[0]]
        found = [
            pid for pid, command in sandbox.processes()
            if wanted in command and "kfp-elastic run" not in command and "elastic_runtime.supervisor " not in command
            and "processes.guard" not in command
        ]  # fmt: skip
        if found:
            try:
                os.kill(chance.choice(found), chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV]))
                kills += 1
            except ProcessLookupError:
                continue
    (sandbox.folder / "finish").touch()
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out[-3000:] + err
    record = json.loads((folder / "record.json").read_text())
    ends = {line.split("END ")[1] for line in out.splitlines() if "END " in line}
    assert record["state"] == "succeeded"
    assert len(ends) == 1, "every rank ended with the same counters"
    step, batches, schedule = map(int, ends.pop().split())
    assert step == batches == schedule >= 50, "BatchNorm and the scheduler counted every step once"
    print(
        f"{kills} kills, {record['restarts']} restarts, {len(record['recoveries'])} recoveries, {step} steps"
    )
