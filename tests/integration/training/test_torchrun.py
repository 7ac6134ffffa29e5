"""The same script under plain torchrun: one round, env:// rendezvous, gradients of the global batch."""

from __future__ import annotations

from typing import Any

import torch

SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
import elastic_runtime as elastic

torch.manual_seed(7)
net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
unused = nn.Linear(2, 2)
data = torch.utils.data.TensorDataset(torch.arange(40.0).view(10, 4) / 40)

def train(job):
    optimizer = torch.optim.SGD([*net.parameters(), *unused.parameters()], 0.1, weight_decay=0.1)
    model, _ = job.attach(net=net, unused=unused, optimizer=optimizer)
    for step in job.steps(data, global_batch=4, epochs=2, micro_batch=1):
        for place, (x,) in enumerate(step):
            step.backward(model(x).square().mean())
        assert unused.weight.grad is None
        optimizer.step()
    if job.rank == 0:
        torch.save({**net.state_dict(), "loss": step.loss, "world": dist.get_world_size() if dist.is_initialized() else 1}, "out.pt")

elastic.run(train)
assert not dist.is_initialized()
"""


def test_torchrun_and_plain_python_end_alike(sandbox: Any) -> None:
    script = sandbox.script(SCRIPT)
    results = []
    for command in (["torchrun", "--standalone", "--nproc-per-node=3"], ["python"]):
        done = sandbox.run(*command, script, env={"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        results.append(torch.load(sandbox.folder / "out.pt"))
    assert [one.pop("world") for one in results] == [3, 1]
    for name, value in results[0].items():
        torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(results[1][name]))
