"""Minutes of random blows to real jobs: after them every step, sample and bit of state is as it should be."""

from __future__ import annotations

import json
from typing import Any

import pytest

IN_PLACE = """
import hashlib, json, os, pathlib, time
import torch
from torch import nn
import elastic_runtime as elastic

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(104, 4))
held = {}

def last(job):
    # The step at which all ranks stop: chosen once, some steps ahead, and never written twice.
    path = pathlib.Path("last")
    if job.rank == 0 and pathlib.Path("finish").exists() and not path.exists():
        pathlib.Path(f"last-{os.getpid()}").write_text(str(job.global_step + 20))
        os.replace(f"last-{os.getpid()}", path)
    return int(path.read_text()) if path.exists() else None

def train(job):
    net = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9999**step)
    model = job.attach(net=net, optimizer=optimizer, scheduler=scheduler)
    held.update(net=net, optimizer=optimizer, scheduler=scheduler, job=job)
    for step in job.steps(data, global_batch=16, epochs=1_000_000, checkpoint_every=1):
        for (x,) in step:
            step.backward(model(x).square().mean())
        optimizer.step(); scheduler.step(); optimizer.zero_grad()
        time.sleep(0.002)
        at = last(job)
        if at is not None and job.global_step >= at:
            step.commit()
            break

elastic.run(train)
digest = hashlib.sha256()
for value in [*held["net"].state_dict().values(),
              *(one for each in held["optimizer"].state.values() for one in each.values())]:
    digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
print("END", json.dumps({"round": int(os.environ["TORCHELASTIC_RESTART_COUNT"]), "step": held["job"].global_step, "batches": int(held["net"][1].num_batches_tracked),
      "schedule": held["scheduler"].last_epoch, "adam": int(next(iter(held["optimizer"].state.values()))["step"]),
      "digest": digest.hexdigest()}), flush=True)
"""

UNMODIFIED = """
import hashlib, json, pathlib, sys
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
# DDP gives rank 0's buffers to all before each forward pass, not after the last one.
for buffer in net.buffers():
    dist.broadcast(buffer, 0)
digest = hashlib.sha256()
for value in [*net.state_dict().values(), *(one for each in optimizer.state.values() for one in each.values())]:
    digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
print("END", json.dumps({"round": context.round, "step": step, "batches": int(net[1].num_batches_tracked), "schedule": scheduler.last_epoch,
      "adam": int(next(iter(optimizer.state.values()))["step"]), "digest": digest.hexdigest()}), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def assert_whole(storm: Any, record: dict[str, Any]) -> dict[str, Any]:
    """All that were there at the end ended alike, and everything that counts steps counted each once."""
    ends = [json.loads(text) for text in storm.ends()]
    # A node that is lost while the last workers end, and has not told that its own ended well, costs another round.
    ends = [end for end in ends if end["round"] == max(one["round"] for one in ends)]
    print(storm.report(record))
    print("END", *ends)
    assert len(ends) == 1, f"every rank ended with the same state: {ends}"
    (end,) = ends
    assert end["step"] == end["batches"] == end["schedule"] == end["adam"] >= 50
    # More, if the last round found its checkpoint far enough and had nothing to do and to report.
    assert record["global_step"] >= end["step"]
    return end  # type: ignore[no-any-return]


@pytest.mark.timeout(1200)
def test_a_job_that_recovers_in_place_survives_and_counts_right(storm: Any) -> None:
    record = storm.run(IN_PLACE, sizes=(1, 2, 3))
    end = assert_whole(storm, record)
    lines = (storm.folder / "metrics.jsonl").read_text().splitlines()
    assert record["global_step"] == end["step"]
    newest = json.loads(lines[-1])
    whole, rest = divmod(end["step"], 7)
    assert newest["samples"] == whole * 104 + min(rest * 16, 104), "no sample was lost, and none repeated"


@pytest.mark.timeout(1200)
def test_an_unmodified_script_survives_and_counts_right(storm: Any) -> None:
    assert_whole(storm, storm.run(UNMODIFIED, "50", sizes=(1, 2, 3)))
