"""Throwaway pipelines, compiled once, and the command as a user runs it."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from kfp import dsl
from kfp.dsl import HTML, Dataset, Input, Metrics, Output

from kfp_elastic.components.authoring import component
from kfp_elastic.pipelines.compiling import compiled_text


@component
def make(
    data: Output[Dataset],
    report: Output[HTML],
    metrics: Output[Metrics],
    mode: str = "good",
    seconds: float = 0.0,
    mixed: dict = {},  # noqa: B006
    numbers: list = [],  # noqa: B006
    text: str = "",
) -> str:
    """Write what `mode` says, after printing the arguments as they arrived."""
    import json
    import os
    import subprocess
    import sys
    import time
    from pathlib import Path

    received = {"mixed": mixed, "numbers": numbers, "text": text, "seconds": seconds}
    print("received", json.dumps(received, sort_keys=True), flush=True)
    print(
        "environment", json.dumps({k: v for k, v in os.environ.items() if k == "ELASTIC_FAULTS"}), flush=True
    )
    if seconds:
        # A grandchild in a session of its own, as a training job has: it must not outlive the run either.
        stray = "import os, time; os.setsid(); print('stray ready', flush=True); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", stray])
        time.sleep(seconds)
    if mode == "not utf-8":
        os.write(1, b"caf\xe9\n")
    if mode == "raise":
        raise ValueError("column 'age': rows 3, 4 break the rule\nsee the report")
    if mode == "exit":
        sys.exit(3)
    if mode == "die":
        os.kill(os.getpid(), 9)
    if mode != "no artifact":
        Path(data.path).mkdir()
        if mode != "empty folder":
            Path(data.path, "part-0").write_text("1")
    Path(report.path).write_text("<!DOCTYPE html><p>report")
    if mode == "raise late":
        raise RuntimeError("after the report")
    if mode == "our error":
        from elastic_runtime.errors import DataError

        try:
            int("x")
        except ValueError as error:
            raise DataError("column 'age' holds text") from error
    if mode != "no metrics":
        metrics.log_metric("rows", 7)
    return None if mode == "no return" else "done"


@component
def evaluate(data: Input[Dataset], metrics: Output[Metrics], accuracy: float, gates: dict = {}) -> str:  # noqa: B006
    metrics.log_metric("test_accuracy", accuracy)
    return "passed" if accuracy >= gates["min_accuracy"] else "failed"


@component
def publish(data: Input[Dataset]) -> int:
    return 3


@dsl.pipeline(name="throwaway")
def throwaway(
    mode: str = "good",
    seconds: float = 0.0,
    accuracy: float = 0.9,
    min_accuracy: float = 0.5,
    epochs: int = 3,
    text: str = "",
    given: list = [],  # noqa: B006
):
    """Three steps, the last behind a gate."""
    made = make(
        mode=mode,
        seconds=seconds,
        mixed={
            "epochs": epochs,
            "rate": min_accuracy,
            "widths": [64, 32],
            "none": None,
            "half": 0.5,
            "empty": [],
        },
        numbers=given,
        text=text,
    )
    judged = evaluate(data=made.outputs["data"], accuracy=accuracy, gates={"min_accuracy": min_accuracy})
    with dsl.If(judged.outputs["Output"] == "passed"):
        publish(data=made.outputs["data"])


@dataclass
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self):
        """The one JSON document on standard output."""
        (line,) = self.out.splitlines()
        return json.loads(line)


@dataclass
class Command:
    """Runs `kfp-elastic pipeline …` in `folder`."""

    folder: Path
    package: Path

    def arguments(self, *arguments):
        return [sys.executable, "-m", "kfp_elastic.pipelines.main", "pipeline", *map(str, arguments)]

    def start(self, *arguments, **options):
        return subprocess.Popen(
            self.arguments(*arguments),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def __call__(self, *arguments, env=None):
        ran = subprocess.run(
            self.arguments(*arguments),
            cwd=self.folder,
            capture_output=True,
            text=True,
            env={**os.environ, **(env or {})},
            timeout=200,
        )
        return Ran(ran.returncode, ran.stdout, ran.stderr)

    def local(self, **parameters):
        """Run the throwaway pipeline with `--local --json`."""
        given = [part for key, value in parameters.items() for part in ("-p", f"{key}={value}")]
        return self("run", self.package, "--local", "--json", *given)


@pytest.fixture(scope="session")
def package(tmp_path_factory):
    """The throwaway pipeline as a compiled file."""
    file = tmp_path_factory.mktemp("compiled") / "throwaway.yaml"
    file.write_text(compiled_text(throwaway))
    return file


@pytest.fixture
def command(tmp_path, package):
    """The command, in an empty folder."""
    return Command(tmp_path, package)


def processes_with(mark):
    """Return the living processes whose environment has `mark`, by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
    return found


@pytest.fixture
def marked():
    """A function that returns the processes whose environment has a mark."""
    return processes_with


def until(condition, patience=20.0):
    """Wait until `condition()` is true and return whether it became so."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def wait_until():
    """A function that waits on a condition."""
    return until
