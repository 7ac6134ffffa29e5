"""What the recovery benchmark trains: one small model, as a plain DDP script and as an `elastic.run` script.

Each worker appends a line to `FOLDER/steps` for every optimizer step that it has finished: time, process id, rank,
world size and round. They run until they are killed.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["SLOW_SECONDS", "write_scripts"]

SLOW_SECONDS = 2.0
"""What `slow_import` takes. It sleeps, so that workers which import it at the same time do not slow each other."""

_MARK = """
_steps = os.open(os.path.join(sys.argv[1], "steps"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

def mark():
    place = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")]
    os.write(_steps, f"{time.time():.6f} {os.getpid()} {' '.join(place)}\\n".encode())
"""

_PLAIN = """
import os, sys, time
{extra}
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
{mark}
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    optimizer.zero_grad()
    model(torch.randn(32, 64)).pow(2).mean().backward()
    optimizer.step()
    mark()
    time.sleep(0.005)
"""

_IN_PLACE = """
import os, sys, time
{extra}
import torch
from torch.utils.data import TensorDataset
import elastic_runtime as elastic
{mark}
net = torch.nn.Linear(64, 64)
{state}
optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01)
dataset = TensorDataset(torch.randn(1024, 64))

def train(job):
    model = job.attach(model=net, optimizer=optimizer)
    for step in job.steps(dataset, global_batch=64, epochs=10**6, checkpoint_every=0):
        for (x,) in step:
            step.backward({loss})
        optimizer.step()
        mark()
        time.sleep(0.005)

elastic.run(train)
"""

# A backbone that is not trained: it is part of the state that a joiner has to get, but of no gradient.
_GIBIBYTE = """
class Tuned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(64, 64)
        self.backbone = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(1 << 24), requires_grad=False) for _ in range(16)
        )

    def forward(self, x):
        return self.head(x)

net = Tuned()

import elastic_runtime.training.session as session
_broadcast = session.broadcast_state

def timed(*arguments, **options):
    begin = time.time()
    state = _broadcast(*arguments, **options)
    with open(os.path.join(sys.argv[1], "syncs"), "a") as file:
        file.write(f"{time.time():.6f} {os.getpid()} {time.time() - begin:.6f}\\n")
    return state

session.broadcast_state = timed
"""


def write_scripts(folder: Path) -> dict[str, Path]:
    """Write the scripts into `folder` and return their paths by name.

    `plain`, `in_place`; `plain_slow`, `in_place_slow`: with a module whose import takes `SLOW_SECONDS`; `in_place_1g`:
    with 1 GiB of state, which writes process id and seconds of each state broadcast into `FOLDER/syncs`.
    """
    (folder / "slow_import.py").write_text(f"import time\ntime.sleep({SLOW_SECONDS})\n")
    loss = "model(x).pow(2).mean()"
    texts = {
        "plain": _PLAIN.format(extra="", mark=_MARK),
        "plain_slow": _PLAIN.format(extra="import slow_import", mark=_MARK),
        "in_place": _IN_PLACE.format(extra="", mark=_MARK, state="", loss=loss),
        "in_place_slow": _IN_PLACE.format(extra="import slow_import", mark=_MARK, state="", loss=loss),
        "in_place_1g": _IN_PLACE.format(extra="", mark=_MARK, state=_GIBIBYTE, loss=loss),
    }
    paths = {}
    for name, text in texts.items():
        paths[name] = folder / f"{name}.py"
        paths[name].write_text(text)
    return paths
