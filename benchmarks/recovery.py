"""What a killed worker costs, and a start: torchrun and ours in turn, the same unmodified script.

`worker_unmodified`: from SIGKILL of rank 1 to the next finished optimizer step of rank 0.
`cold_start`: from the start of the command to the first finished step of rank 0.
A torchrun try that does not recover within 120 s counts as 120 s and in the figure `torchrun_unrecovered`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _harness import Result, options

WORKERS = 2
LIMIT = 120.0
SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
with open(f"{folder}/pid-{rank}.tmp", "w") as file:
    file.write(str(os.getpid()))
os.replace(f"{folder}/pid-{rank}.tmp", f"{folder}/pid-{rank}")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
steps = open(f"{folder}/steps", "a", buffering=1)
while not os.path.exists(f"{folder}/finish"):
    optimizer.zero_grad()
    model(torch.randn(32, 64)).pow(2).mean().backward()
    optimizer.step()
    if rank == 0:
        steps.write(f"{time.time()}\\n")
    time.sleep(0.005)
"""


def _steps(folder: Path) -> list[float]:
    try:
        return [
            float(line)
            for line in (folder / "steps").read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]
    except FileNotFoundError:
        return []


def _first_step_after(folder: Path, moment: float, count: int = 1) -> float | None:
    """Return when the step that is `count` steps after `moment` was finished; None after `LIMIT` seconds."""
    while time.time() < moment + LIMIT:
        later = [when for when in _steps(folder) if when > moment]
        if len(later) >= count:
            return later[count - 1]
        time.sleep(0.02)
    return None


def attempt(command: list[str]) -> tuple[float, float | None]:
    """Run one job with one kill; return the seconds to its first step and those from the kill to the next step."""
    folder = Path(command[-1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = time.time()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        first = _first_step_after(folder, started)
        if first is None:
            raise SystemExit(f"no step within {LIMIT:.0f} s: {' '.join(command)}")
        # Two dozen steps on, so that the start is over.
        assert _first_step_after(folder, started, 24) is not None
        victim = int((folder / "pid-1").read_text())
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        # Rank 0 may be finishing the step of the moment of the kill.
        again = _first_step_after(folder, killed + 0.05)
        return first - started, None if again is None else again - killed
    finally:
        (folder / "finish").touch()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    """Run both sides in turn and print the ratios."""
    arguments = options(__doc__ or "", repeats=5, quick=2)
    result = Result("recovery")
    unrecovered = 0
    with tempfile.TemporaryDirectory() as base:
        script = Path(base, "train.py")
        script.write_text(SCRIPT)
        os.environ["XDG_STATE_HOME"] = str(Path(base, "state"))
        bin_dir = Path(sys.executable).parent
        for number in range(arguments.repeats):
            for side in ("rival", "ours"):
                folder = Path(base, f"{side}-{number}")
                folder.mkdir()
                if side == "rival":
                    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                               f"--nproc-per-node={WORKERS}", "--max-restarts=3", str(script), str(folder)]  # fmt: skip
                else:
                    command = [str(bin_dir / "kfp-elastic"), "run", f"--nproc-per-node={WORKERS}", str(script), "--",
                               str(folder)]  # fmt: skip
                start, recovery = attempt(command)
                if recovery is None:
                    assert side == "rival", "ours did not recover"
                    unrecovered += 1
                    recovery = LIMIT
                result.add("cold_start", **{side: start})
                result.add("worker_unmodified", **{side: recovery})
                shutil.rmtree(folder)
    result.figures["torchrun_unrecovered"] = unrecovered
    result.show(as_json=arguments.json, repeats=arguments.repeats)


if __name__ == "__main__":
    main()
