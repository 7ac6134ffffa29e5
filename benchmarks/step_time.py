"""Step time with `elastic.run` against plain DDP: two workers, gloo, the same model and data, blocks interleaved.

    python benchmarks/step_time.py [--json] [--quick] [--repeats N]

Each try runs a block of steps of one side, then of the other, in the same two processes and the same process group.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _harness import Result, options

MODELS = {"small": (64, 256, 3), "large": (512, 1024, 6)}
STEPS = {"small": 200, "large": 30}
BATCH = 64


def worker(repeats: int) -> None:
    """Measure in this process; rank 0 prints the seconds of every block."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import elastic_runtime as elastic

    torch.set_num_threads(1)

    def model(name: str) -> nn.Sequential:
        torch.manual_seed(0)
        inputs, width, depth = MODELS[name]
        layers: list[nn.Module] = [nn.Linear(inputs, width), nn.ReLU()]
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(width, 10))

    nets = {name: model(name) for name in MODELS}

    def run(job: elastic.Job) -> None:
        ours = dict(zip(nets, job.attach(**nets), strict=True))
        for name in MODELS:
            compare(job, name, ours[name])

    def compare(job: elastic.Job, name: str, net: nn.Module) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        steps = STEPS[name]
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(BATCH * steps, MODELS[name][0], generator=generator)
        y = torch.randint(0, 10, (len(x),), generator=generator)
        data = torch.utils.data.TensorDataset(x, y)
        ddp = DistributedDataParallel(model(name), gradient_as_bucket_view=True)
        # The rival skips the modules of the other sizes: ours would too, if they were not attached.
        for other, module in nets.items():
            module.requires_grad_(other == name)
        optimizers = {
            "ours": torch.optim.SGD(net.parameters(), 0.01),
            "rival": torch.optim.SGD(ddp.parameters(), 0.01),
        }
        times: dict[str, list[float]] = {"ours": [], "rival": []}

        def block_ours() -> None:
            for step in job.steps(data, global_batch=BATCH, epochs=1):
                for inputs, labels in step:
                    step.backward(nn.functional.cross_entropy(net(inputs), labels))
                optimizers["ours"].step()

        def block_rival() -> None:
            # What a careful DDP script does: the same global batches, its share by rank.
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
            for at in range(0, len(data), BATCH):
                own = order[at : at + BATCH][rank::world]
                inputs, labels = x[own], y[own]
                optimizers["rival"].zero_grad()
                loss = nn.functional.cross_entropy(ddp(inputs), labels)
                loss.backward()
                loss.item()  # of its own share only: ours is that of the global batch
                optimizers["rival"].step()

        for number in range(repeats + 1):
            for side, block in (("ours", block_ours), ("rival", block_rival)):
                dist.barrier()
                begin = time.perf_counter()
                block()
                dist.barrier()
                if number:  # the first is for warming up
                    times[side].append((time.perf_counter() - begin) / steps)
        if rank == 0:
            print(json.dumps({"name": name, **times}), flush=True)

    elastic.run(run)
    dist.destroy_process_group() if dist.is_initialized() else None


def main() -> None:
    """Start two workers and show what they measured."""
    arguments = options(__doc__ or "", repeats=9, quick=3)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("ELASTIC_")},
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1", "STEP_TIME_REPEATS": str(arguments.repeats),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve())],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=folder, stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            output, _ = workers[0].communicate(timeout=900)
            workers[1].communicate(timeout=60)
        finally:
            for one in workers:
                one.kill()
                one.wait()
    result = Result("step_time")
    for line in output.splitlines():
        found_line = json.loads(line)
        name = found_line["name"]
        for ours, rival in zip(found_line["ours"], found_line["rival"], strict=True):
            result.add(name, ours=ours, rival=rival)
        ratio = statistics.median(
            ours / rival for ours, rival in zip(found_line["ours"], found_line["rival"], strict=True)
        )
        result.figures[f"{name}_overhead"] = ratio
        result.figures[f"{name}_step_ms"] = statistics.median(found_line["ours"]) * 1e3
        result.figures[f"{name}_ddp_step_ms"] = statistics.median(found_line["rival"]) * 1e3
    result.show(as_json=arguments.json, repeats=arguments.repeats)


if __name__ == "__main__":
    if "STEP_TIME_REPEATS" in os.environ:
        worker(int(os.environ["STEP_TIME_REPEATS"]))
    else:
        main()
