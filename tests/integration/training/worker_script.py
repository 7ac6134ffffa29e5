"""What the workers of these tests run: BatchNorm, a scheduler, several micro-batches, empty shares, and marks.

`TEST_OPTIONS` (JSON) says how long and how; `TEST_STRIKE` = "signal where rank step" strikes one worker once.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import elastic_runtime as elastic

FOLDER = Path(os.environ["ELASTIC_JOB_DIR"])
OPTIONS = {
    "samples": 64, "global_batch": 16, "epochs": 5, "micro_batch": None, "width": 16, "rebuild": False, "pause": 0.0,
    "num_workers": 0, "evaluate": False, "norm": True, **json.loads(os.environ.get("TEST_OPTIONS", "{}")),
}  # fmt: skip


def strike(where: str, job: elastic.Job) -> None:
    """Send this process a planned signal if it is its turn.

    A step as a number strikes once a job; `+3*20` strikes each worker in the third step of its life, 20 times in all.
    """
    for part in filter(None, os.environ.get("TEST_STRIKE", "").split(";")):
        name, place, rank, step = part.split()
        if place != where or int(rank) != job.rank:
            continue
        after, _, times = step.partition("*")
        if (job.global_step - begun[0] != int(after)) if step[0] == "+" else (job.global_step != int(after)):
            continue
        for number in range(int(times or 1)):
            try:
                os.close(
                    os.open(FOLDER / f"struck-{part.replace(' ', '-')}-{number}", os.O_CREAT | os.O_EXCL)
                )
            except FileExistsError:
                continue
            os.kill(os.getpid(), getattr(signal, name))


def mark(kind: str, **facts: object) -> None:
    line = json.dumps({"kind": kind, "time": time.time(), "worker": int(os.environ["TEST_WORKER"]), **facts})
    with (FOLDER / "marks.jsonl").open("a") as file:
        file.write(line + "\n")


class Numbers(Dataset):
    """Counts which samples were loaded, and strikes in the loader."""

    def __init__(self, job_place: list[elastic.Job]) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(OPTIONS["samples"], 8, generator=generator)
        self.y = torch.randint(0, 4, (OPTIONS["samples"],), generator=generator)
        self.job_place = job_place

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        if self.job_place and not OPTIONS["num_workers"]:
            strike("loader", self.job_place[-1])
        return self.x[index], self.y[index], index


def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    width = OPTIONS["width"]
    norm = (
        nn.BatchNorm1d if OPTIONS["norm"] else nn.LayerNorm
    )  # a share of one sample has no batch statistics
    net = nn.Sequential(
        nn.Linear(8, width), norm(width), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(width, width), norm(width), nn.Linear(width, 4),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)


def digest(*objects: object) -> str:
    found = hashlib.sha256()

    def feed(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in value:
                found.update(str(key).encode())
                feed(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                feed(item)
        else:
            found.update(repr(value).encode())

    for one in objects:
        feed(one.state_dict())
    return found.hexdigest()[:16]


jobs: list[elastic.Job] = []
begun: list[int] = []
dataset = Numbers(jobs)
made = build()


class Striker(torch.autograd.Function):
    """Strikes in the middle of the backward pass."""

    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        strike("backward", jobs[-1])
        return gradient


def train(job: elastic.Job) -> None:
    jobs[:] = [job]
    net, optimizer, scheduler = build() if OPTIONS["rebuild"] else made
    job.attach(model=net, optimizer=optimizer, scheduler=scheduler)
    begun.append(job.global_step)
    mark(
        "attached",
        rank=job.rank,
        world=job.world_size,
        step=job.global_step,
        digest=digest(net, optimizer, scheduler),
    )
    assert torch.distributed.get_rank() == job.rank
    assert torch.distributed.get_world_size() == job.world_size
    for step in job.steps(
        dataset, global_batch=OPTIONS["global_batch"], epochs=OPTIONS["epochs"], micro_batch=OPTIONS["micro_batch"],
        num_workers=OPTIONS["num_workers"],
    ):  # fmt: skip
        seen = []
        for x, y, index in step:
            strike("forward", job)
            hidden = net[:4](x)
            loss = nn.functional.cross_entropy(net[4:](Striker.apply(hidden)), y)
            step.backward(loss)
            seen += index.tolist()
        mark("share", step=step.index, rank=job.rank, world=job.world_size, seen=seen,
             round=int(os.environ["TORCHELASTIC_RESTART_COUNT"]))  # fmt: skip
        strike("before-step", job)
        optimizer.step()
        strike("optimizer", job)
        scheduler.step()
        optimizer.zero_grad()
        if OPTIONS["evaluate"] and job.rank == 0:
            with job.phase("evaluate"), torch.no_grad():
                net.eval()
                strike("evaluate", job)
                net(dataset.x)
                net.train()
        mark("step", step=step.index, rank=job.rank, world=job.world_size, loss=step.loss)
        if OPTIONS["pause"]:
            time.sleep(OPTIONS["pause"])
    strike("end", job)
    mark(
        "end", rank=job.rank, world=job.world_size, step=job.global_step, digest=digest(net, optimizer, scheduler),
        buffers=[int(getattr(net[place], "num_batches_tracked", 0)) for place in (1, 5)], lr=optimizer.param_groups[0]["lr"],
        statistics=digest(net[1]),
    )  # fmt: skip


elastic.run(train, seed=3)
mark("returned")
