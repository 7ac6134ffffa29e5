"""What the workers of these tests train: BatchNorm, a paced step, and a note of every commit."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_runtime as elastic

FOLDER, HOST = Path(os.environ["TEST_JOB"]), os.environ["TEST_HOST"]
EPOCHS = int((FOLDER / "epochs").read_text())
SAMPLES, BATCH, PACE = 400, 20, 0.05
torch.manual_seed(1)
inputs = torch.randn(SAMPLES, 8)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
notes = (FOLDER / f"{HOST}.steps").open("a", buffering=1)


def note(**facts: object) -> None:
    round_ = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    notes.write(json.dumps({"time": time.time(), "pid": os.getpid(), "round": round_, **facts}) + "\n")


def train(job: elastic.Job) -> None:
    model = job.attach(model=net, optimizer=optimizer)
    for step in job.steps(dataset, global_batch=BATCH, epochs=EPOCHS, checkpoint_every=0):
        note(step=job.global_step)
        for x, y in step:
            step.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        if not (FOLDER / "fast").exists():
            time.sleep(PACE)


elastic.run(train, seed=3)
held = torch.cat([one.reshape(-1).double() for one in net.state_dict().values()])
end = {
    "step": SAMPLES // BATCH * EPOCHS,
    "batches": int(net[1].num_batches_tracked),
    "state": hashlib.sha256(held.numpy().tobytes()).hexdigest(),
    "finite": bool(held.isfinite().all()),
}
(FOLDER / f"{HOST}.end").write_text(json.dumps(end))
