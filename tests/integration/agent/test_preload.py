"""What a job preloads: it works, or is refused by name and workers are started the other way; never a hung worker."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from elastic_runtime.agent.warm import Ended, Gone, Refused
from elastic_runtime.jobs.folder import JobFolder

OPERATION = "import torch\na = torch.ones(700, 700)\nprint((a @ a)[3, 5].item())\nb = torch.ones(500_000, requires_grad=True)\n(b * 2).sum().backward()\n"
SAFE = {
    "a parallel operation": (OPERATION, "700.0"),
    "a thread that ends": ("import threading, time\nthreading.Thread(target=time.sleep, args=[0.2]).start()\n", ""),
    "a child that ends": ("import subprocess; subprocess.run(['true'])", ""),
    "other signals": ("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)", ""),
    "a configured log": ("import logging; logging.basicConfig(level='DEBUG')", ""),
    "another folder": ("import os; os.chdir('/')", ""),
}  # fmt: skip
REFUSED = {
    "a thread": ("import threading, time\nthreading.Thread(target=time.sleep, args=[60], daemon=True).start()\n", "starts a thread"),
    "a pool of threads": ("import torch\ntorch.set_num_threads(2)\na = torch.ones(700, 700)\na @ a\n", "starts a thread"),
    # No device here: the flag that torch itself sets.
    "CUDA": ("import torch\ntorch.cuda._initialized = True\n", "uses CUDA"),
    "a crash": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "the zygote was killed by SIGSEGV"),
    "an exit": ("import os; os._exit(4)", "the zygote ended with code 4"),
}  # fmt: skip
BROKEN = {
    "missing": (None, "ModuleNotFoundError: No module named 'mine'"),
    "an exception": ("raise ValueError('not today')", "ValueError: not today"),
    "a polite exit": ("import sys; sys.exit('no')", "SystemExit: no"),
}
# What the preload did must not show in the worker, and a parallel operation must not hang it.
WORKER = """
import logging, os, signal, sys
assert "mine" in sys.modules and sys.modules["mine"].__file__.startswith(os.getcwd())
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and not logging.root.handlers
import torch
torch.set_num_threads(2)
a = torch.ones(700, 700)
b = torch.ones(500_000, requires_grad=True)
(b * 2).sum().backward()
print((a @ a)[3, 5].item(), torch.get_num_threads(), flush=True)
"""


@pytest.mark.parametrize("name", SAFE)
def test_a_safe_preload_works_and_shows_once(nursery: Callable[..., Any], name: str) -> None:
    source, printed = SAFE[name]
    box = nursery(preload=("mine",))
    (box.folder / "mine.py").write_text(source)
    (box.folder / "train.py").write_text(WORKER)
    box.start()
    assert box.told == []
    workers = [box.ask(box.program("train.py")) for _ in range(2)]
    for worker in workers:
        assert box.all(worker)[-2:] == [Ended(0), Gone()], box.log.read_text()
    assert box.log.read_text() == "700.0 2\n" * 2
    assert (box.folder / "zygote.log").read_text() == (printed + "\n" if printed else "")


@pytest.mark.parametrize("name", REFUSED)
def test_a_preload_that_is_not_safe_is_refused_by_name(nursery: Callable[..., Any], name: str) -> None:
    source, what = REFUSED[name]
    box = nursery(preload=("json", "mine", "csv"))
    (box.folder / "mine.py").write_text(source)
    early = box.ask(box.program("train.py"))
    box.start()
    (told,) = box.told
    assert told.startswith("preload 'mine'")
    assert what in told
    assert told.endswith(": workers are started without the zygote")
    assert box.handle.pid is None
    assert box.all(early) == [Refused()]


@pytest.mark.parametrize("name", BROKEN)
def test_a_preload_that_cannot_be_imported_is_left_out_with_a_warning(
    nursery: Callable[..., Any], name: str
) -> None:
    source, what = BROKEN[name]
    box = nursery(preload=("mine", "csv"))
    if source is not None:
        (box.folder / "mine.py").write_text(source)
    (box.folder / "train.py").write_text("import sys; print('csv' in sys.modules, 'mine' in sys.modules)")
    box.start()
    assert box.told == [f"preload 'mine' cannot be imported: {what}; going on without it"]
    assert box.run(box.program("train.py")) == (0, "True False\n")


def test_a_preload_that_never_ends_is_named(nursery: Callable[..., Any]) -> None:
    box = nursery(preload=("mine",))
    (box.folder / "mine.py").write_text(
        "import pathlib, time; pathlib.Path(__file__).with_name('in').touch(); time.sleep(600)"
    )
    box.handle.start()
    box.until((box.folder / "in").exists)
    assert box.watch(100.0) == []
    assert box.watch(100.0) == [
        "preload 'mine': the zygote no longer answered: workers are started without the zygote"
    ]


def test_a_preloaded_module_of_the_script_is_not_imported_again(nursery: Callable[..., Any]) -> None:
    box = nursery(preload=("package.models",))
    (box.folder / "package").mkdir()
    (box.folder / "package" / "__init__.py").touch()
    (box.folder / "package" / "models.py").write_text("print('imported', flush=True)\nvalue = 5")
    (box.folder / "train.py").write_text("from package import models; print(models.value)")
    box.start()
    assert box.run(box.program("train.py")) == (0, "5\n")
    assert (box.folder / "zygote.log").read_text() == "imported\n"


# --- whole jobs ---------------------------------------------------------------------------------------------------

TRAIN = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from elastic_runtime import worker
dist.init_process_group("gloo")
context = worker.context()
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
for step in range(1, 6):
    net(torch.randn(4, 8)).sum().backward()
    worker.log(step=step)
if context.round == 0 and context.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
print("mine" in sys.modules, flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("preload", "told"),
    [
        ("", None),
        ("mine", None),
        ("bad", "preload 'bad' starts a thread: workers are started without the zygote"),
    ],
)
def test_a_job_recovers_with_and_without_the_zygote(sandbox: Any, preload: str, told: str | None) -> None:
    sandbox.script("value = 5", "mine.py")
    sandbox.script(
        "import threading, time\nthreading.Thread(target=time.sleep, args=[60], daemon=True).start()\n",
        "bad.py",
    )
    done = sandbox.run(
        "kfp-elastic",
        "run",
        "--nproc-per-node",
        "2",
        "--state-dir",
        "job",
        "--preload",
        preload,
        sandbox.script(TRAIN),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = JobFolder(sandbox.folder / "job").record()
    assert record is not None
    assert record["restarts"] == 1
    said = [event["text"] for event in record["events"] if event["kind"] == "zygote"]
    assert said == ([told] if told else [])
    assert done.stdout.count("preload") == (1 if told else 0)
    assert f"[rank0] {preload == 'mine'}" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_job_goes_on_when_its_zygote_is_killed_and_recovers_by_the_next(
    sandbox: Any, wait: Callable[..., Any], number: signal.Signals
) -> None:
    script = sandbox.script("""
import pathlib, time
from elastic_runtime import worker
step = 0
while not pathlib.Path("finish").exists():
    step += 1
    worker.log(step=step)
    time.sleep(0.01)
""")
    folder = JobFolder(sandbox.folder / "job")
    process = sandbox.start("kfp-elastic", "run", "--nodes", "2", "--state-dir", "job", script)
    events = lambda kind: [event for event in folder.events() if event["kind"] == kind]  # noqa: E731
    wait(lambda: len(events("worker")) == 2)
    wait(lambda: (sandbox.folder / "job" / "metrics.jsonl").exists())
    (zygote,) = [pid for pid, command in sandbox.processes() if command.startswith("elastic-zygote")]
    os.kill(zygote, number)
    wait(lambda: events("zygote"), what="word of the lost zygote")
    os.kill(events("worker")[0]["pid"], signal.SIGKILL)
    wait(lambda: events("recovered"))
    (sandbox.folder / "finish").touch()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    record = folder.record()
    assert record is not None
    assert (record["restarts"], len(record["recoveries"])) == (1, 1)


def test_wrong_names_are_one_error(sandbox: Any) -> None:
    for wrong in ("a-b", "a..b", "numpy,", "class", "a b"):
        done = sandbox.run("kfp-elastic", "run", "--preload", wrong, sandbox.script("1"))
        assert done.returncode == 2, wrong
        assert "--preload" in done.stderr
        assert "takes names of modules" in done.stderr
        assert "Traceback" not in done.stderr
