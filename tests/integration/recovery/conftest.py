"""What these tests share: jobs in the foreground whose folder, status and processes they look at."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_runtime.jobs.folder import JobFolder

# Trains in place until the file `finish` is there; says at every start of `train` where it stands.
TRAINER = """
import hashlib, json, os, pathlib, signal, sys, time
import torch
from torch import nn
import elastic_runtime as elastic

SAMPLES, BATCH = 104, 16
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 4))
folder = pathlib.Path(os.environ["ELASTIC_JOB_DIR"])
held = {}
signal.signal(signal.SIGUSR1, lambda *_: mark("usr1"))

def mark(kind, **details):
    with (folder / "marks.jsonl").open("a") as file:
        file.write(json.dumps({"kind": kind, "pid": os.getpid(), **details}) + "\\n")

def last(job):
    path = folder / "last"
    if job.rank == 0 and pathlib.Path("finish").exists() and not path.exists():
        (folder / f"last-{os.getpid()}").write_text(str(job.global_step + 10))
        os.replace(folder / f"last-{os.getpid()}", path)
    return int(path.read_text()) if path.exists() else None

def train(job):
    net = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model = job.attach(net=net, optimizer=optimizer)
    held.update(net=net, optimizer=optimizer, job=job)
    mark("train", rank=job.rank, world=job.world_size, round=int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
         master=os.environ["MASTER_ADDR"] + " " + os.environ["MASTER_PORT"])
    for step in job.steps(data, global_batch=BATCH, epochs=1_000_000, num_workers=int(os.environ.get("LOADERS", 0))):
        for (x,) in step:
            step.backward(model(x).square().mean())
        optimizer.step(); optimizer.zero_grad()
        time.sleep(0.005)
        at = last(job)
        if at is not None and job.global_step >= at:
            step.commit()
            break
    time.sleep(float(os.environ.get("TAIL", 0)) * (job.rank == 0))  # as one rank that evaluates

elastic.run(train)
digest = hashlib.sha256()
for value in held["net"].state_dict().values():
    digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
mark("end", step=held["job"].global_step, batches=int(held["net"][1].num_batches_tracked), digest=digest.hexdigest())
"""
SAMPLES, BATCH = 104, 16


class Job:
    """One `kfp-elastic run`, from outside."""

    def __init__(self, sandbox: Any, wait: Callable[..., Any], name: str) -> None:
        self.sandbox, self.name = sandbox, name
        self.path: Path = sandbox.folder / name
        self.folder = JobFolder(self.path)
        self._wait = wait

    def start(self, *options: str, script: str = TRAINER, first: str = "", **environment: str) -> Job:
        """Start it in the foreground; `first` is put before the script."""
        path = self.sandbox.script(first + script, f"{self.name}.py")
        words = ["kfp-elastic", "run", "--name", self.name, "--state-dir", self.path, *options, path]
        # Into a file: nobody reads a pipe while the test looks at the job.
        self.process = self.sandbox.start(
            "sh", "-c", f'exec "$@" >{self.name}.txt 2>&1', "sh", *words, env=environment
        )
        return self

    def wait(self, condition: Callable[[], Any], what: str, timeout: float = 60.0) -> Any:
        """Wait for a condition; a job that ends before it came true fails the test at once."""

        def met() -> Any:
            value = condition()
            if not value and self.process.poll() is not None and not (value := condition()):
                pytest.fail(f"the job ended before {what}:\n{self.output()[-4000:]}")
            return value

        try:
            return self._wait(met, timeout=timeout, what=what)
        except BaseException:
            print(self.output()[-6000:])
            raise

    def output(self) -> str:
        """What it has printed."""
        return (self.sandbox.folder / f"{self.name}.txt").read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Its events of one kind."""
        return [event for event in self.folder.events() if event["kind"] == kind]

    def marks(self, kind: str) -> list[dict[str, Any]]:
        """What the script noted."""
        path = self.path / "marks.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for text in lines if (line := json.loads(text))["kind"] == kind]

    def step(self) -> int:
        """The newest finished step."""
        lines = self.folder.metrics()
        return int(lines[-1]["step"]) if lines else 0

    def world(self) -> int:
        """Workers that did the newest step."""
        lines = self.folder.metrics()
        return int(lines[-1]["world_size"]) if lines else 0

    def wait_for_world(self, size: int, timeout: float = 60.0) -> None:
        """Wait until a step was done by `size` workers that is not there yet."""
        before = len(self.folder.metrics())
        self.wait(
            lambda: (new := self.folder.metrics()[before:]) and new[-1]["world_size"] == size,
            f"a step of {size} workers", timeout,
        )  # fmt: skip

    def status(self) -> dict[str, Any]:
        """Its status document."""
        done = self.sandbox.run("kfp-elastic", "status", "--json", self.name)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    def scale(self, size: int, *options: str) -> None:
        """Give it another size."""
        done = self.sandbox.run("kfp-elastic", "scale", self.name, str(size), *options)
        assert done.returncode == 0, done.stderr

    def agent(self, node: str) -> int:
        """Process id of a node's newest agent."""
        return int([event["pid"] for event in self.events("agent") if event["node"] == node][-1])

    def coordinator(self) -> int:
        """Process id of the newest coordinator."""
        return int(self.events("coordinator")[-1]["pid"])

    def worker(self, rank: int) -> int:
        """Process id of the worker that was the last to begin a round as `rank`."""
        return int([mark["pid"] for mark in self.marks("train") if mark["rank"] == rank][-1])

    def recovered(self, number: int = 1) -> None:
        """Wait until there were `number` recoveries."""
        self.wait(lambda: len(self.events("recovered")) >= number, f"recovery {number}")

    def finish(self, code: int = 0, timeout: float = 60.0) -> dict[str, Any]:
        """Let it end, with exit code `code`; return its record."""
        (self.sandbox.folder / "finish").touch()
        return self.ended(code, timeout)

    def ended(self, code: int = 0, timeout: float = 60.0) -> dict[str, Any]:
        """Wait for its end, with exit code `code`; return its record."""
        self._wait(lambda: self.process.poll() is not None, timeout=timeout, what=f"the end of {self.name}")
        self.process.communicate()
        assert self.process.returncode == code, self.output()[-6000:]
        record = self.folder.record()
        assert record is not None
        return record

    def assert_whole(self, record: dict[str, Any]) -> None:
        """Every rank ended alike, after the same steps; no step was left out, no sample lost or repeated."""
        ends = self.marks("end")
        assert len({(end["step"], end["batches"], end["digest"]) for end in ends}) == 1, ends
        end = ends[0]
        assert end["step"] == end["batches"] == record["global_step"]
        lines = self.folder.metrics()
        # A rank 0 that dies after a step and before its line leaves the step, which the others have, without one.
        missing = set(range(1, end["step"] + 1)) - {line["step"] for line in lines}
        assert len(missing) <= len([event for event in record["events"] if event["kind"] == "round"]), missing
        per_epoch = -(-SAMPLES // BATCH)
        for line in lines:
            whole, rest = divmod(line["step"], per_epoch)
            assert line["samples"] == whole * SAMPLES + min(rest * BATCH, SAMPLES)

    def assert_one_master(self) -> None:
        """All members of a round had the same store, and no two of them the same rank."""
        rounds: dict[int, list[dict[str, Any]]] = {}
        for mark in self.marks("train"):
            rounds.setdefault(mark["round"], []).append(mark)
        for number, members in rounds.items():
            assert len({(one["master"], one["world"]) for one in members}) == 1, (number, members)
            assert len({one["rank"] for one in members}) == len(members), (number, members)

    def seconds(self) -> list[float]:
        """How long each recovery took so far."""
        return [round(event["seconds"], 3) for event in self.events("recovered")]


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal."""
    os.kill(pid, number)


@pytest.fixture
def job(sandbox: Any, wait: Callable[..., Any]) -> Iterator[Callable[..., Job]]:
    """Makes jobs of this test by name; prints how long their recoveries took."""
    made: list[Job] = []

    def make(name: str = "job") -> Job:
        made.append(Job(sandbox, wait, name))
        return made[-1]

    yield make
    for one in made:
        one.process.kill()  # Of a test that failed: the guard ends the rest.
        one.process.communicate()
        if times := one.seconds():
            print(f"{one.name}: recoveries {times}")
