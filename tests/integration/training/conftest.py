"""The fixture `cluster`: real workers under the stand-in driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


class Cluster:
    """Workers of one job, and everything that they and the driver said."""

    def __init__(self, sandbox: Any, wait: Callable[..., Any]) -> None:
        self.folder: Path = sandbox.folder
        self._sandbox, self._wait = sandbox, wait
        self.events: list[dict[str, Any]] = []
        self._process: subprocess.Popen[str] | None = None

    def start(
        self, workers: int, *, script: Path = HERE / "worker_script.py", strike: str = "", **options: Any
    ) -> None:
        """Start `workers` workers of `script`."""
        environment = {
            **self._sandbox.environment,
            "TEST_OPTIONS": json.dumps(options),
            "TEST_STRIKE": strike,
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("MASTER_ADDR", None)
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "driver.py"), str(script), str(workers), str(self.folder)],
            env=environment, cwd=self.folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()

    def tell(self, **order: Any) -> None:
        """Give the driver a command."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def seen(self, event: str, **facts: Any) -> list[dict[str, Any]]:
        """Return the events of that kind with these facts."""
        return [
            one
            for one in list(self.events)
            if one["event"] == event and all(one.get(key) == value for key, value in facts.items())
        ]

    def pid(self, worker: int) -> int:
        """Return the pid of a worker."""
        return int(self.seen("spawned", worker=worker)[0]["pid"])

    def kill(self, worker: int, signum: signal.Signals = signal.SIGKILL) -> None:
        """Send a worker a signal."""
        os.kill(self.pid(worker), signum)

    def marks(self, kind: str | None = None, **facts: Any) -> list[dict[str, Any]]:
        """Return what the workers wrote down."""
        try:
            text = (self.folder / "marks.jsonl").read_text()
        except FileNotFoundError:
            return []
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [
            one
            for one in lines
            if (kind is None or one["kind"] == kind)
            and all(one.get(key) == value for key, value in facts.items())
        ]

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def wait(self, condition: Callable[[], Any], what: str, timeout: float = 90.0) -> Any:
        """Wait for a condition; on failure show what happened."""

        def met() -> Any:
            found = condition()
            if not found and self._process is not None and self._process.poll() is not None:
                pytest.fail(f"the driver ended before {what}")
            return found

        try:
            return self._wait(met, timeout=timeout, what=what)
        except pytest.fail.Exception:
            print(*self.events[-40:], sep="\n")
            for log in sorted(self.folder.glob("worker-*.log")):
                print(log.name, log.read_text()[-3000:], sep="\n")
            raise

    def wait_for_step(self, step: int, **facts: Any) -> None:
        """Wait until some worker has finished the body of `step`."""
        self.wait(lambda: [one for one in self.marks("step", **facts) if one["step"] >= step], f"step {step}")

    def wait_for_end(self, alive: int, timeout: float = 120.0) -> list[dict[str, Any]]:
        """Wait until `alive` workers have ended with code 0; return their last marks."""
        self.wait(lambda: len(self.seen("exit", code=0)) >= alive, f"{alive} workers ended well", timeout)
        finished = {one["worker"] for one in self.seen("exit", code=0)}
        last = {one["worker"]: one for one in self.marks("end") if one["worker"] in finished}
        return list(last.values())

    def stop(self) -> None:
        """End everything."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        for one in self.seen("spawned"):
            if not self.seen("exit", worker=one["worker"]):
                os.kill(one["pid"], signal.SIGKILL)
        self._process.stdin.close()
        self._process.wait(30)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self.events.append(json.loads(line))


@pytest.fixture
def cluster(sandbox: Any, wait: Callable[..., Any]) -> Iterator[Cluster]:
    """A job of real workers under the stand-in driver; ended, and looked after, by the test's sandbox."""
    found = Cluster(sandbox, wait)
    try:
        yield found
    finally:
        found.stop()
