"""A real zygote and what is asked of it."""

from __future__ import annotations

import os
import select
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic_runtime.agent.requests import Program
from elastic_runtime.agent.warm import Ended, Event, Failed, Gone, Lost, Refused, WarmWorker
from elastic_runtime.agent.zygote_handle import ZygoteHandle

LAST = (Gone, Failed, Refused, Lost)


class Nursery:
    """A zygote, started as the supervisor does, and the workers of one test."""

    def __init__(
        self, folder: Path, *, preload: tuple[str, ...] = (), environment: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.log = folder / "worker.log"
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            **(environment or {}),
        }
        self.handle = ZygoteHandle(
            folder / "zygote.log", preload=preload, entry=str(folder), environment={**self.environment}
        )
        self.told: list[str] = []
        self.workers: list[WarmWorker] = []

    def watch(self, seconds: float = 0.0) -> list[str]:
        """Let the handle look at the zygote once, as if `seconds` had passed."""
        said = self.handle.watch(seconds)
        self.told += said
        return said

    def until(self, condition: Callable[[], Any], timeout: float = 120) -> None:
        """Watch the zygote until `condition`."""
        deadline = time.monotonic() + timeout
        while not condition():
            self.watch()
            assert time.monotonic() < deadline, f"waited {timeout} s; told: {self.told}"
            time.sleep(0.01)

    def start(self) -> None:
        """Start the zygote and wait until it can fork, or never will."""
        self.handle.start()
        self.until(lambda: self.handle.ready or self.handle.given_up)

    def ask(self, program: Program, channel: int | None = None) -> WarmWorker:
        """Ask for a worker."""
        log = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            worker = WarmWorker(self.handle.requests, program, log=log, channel=channel)
        finally:
            os.close(log)
        self.workers.append(worker)
        return worker

    def program(
        self, script: str | None = None, *arguments: str, module: str | None = None, **environment: str
    ) -> Program:
        """Return a program in this folder."""
        return Program(
            script=script,
            module=module,
            arguments=arguments,
            environment={**self.environment, **environment},
            cwd=str(self.folder),
        )

    def next(self, worker: WarmWorker, timeout: float = 120) -> list[Event]:
        """Return the next events of a worker."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self.watch()
            if select.select([worker], [], [], 0.05)[0] and (events := worker.read()):
                return events
        pytest.fail(f"nothing of the worker within {timeout} s; told: {self.told}")

    def all(self, worker: WarmWorker) -> list[Event]:
        """Return every event of a worker to its last."""
        events: list[Event] = []
        while not (events and isinstance(events[-1], LAST)):
            events += self.next(worker)
        return events

    def run(self, program: Program, channel: int | None = None) -> tuple[int, str]:
        """Run a program to its end; return its code and what it wrote."""
        self.log.unlink(missing_ok=True)
        events = self.all(self.ask(program, channel))
        (ended,) = [event for event in events if isinstance(event, Ended)]
        return ended.code, self.log.read_text()

    def close(self) -> None:
        """End everything."""
        for worker in self.workers:
            worker.close()
        self.handle.close()
        self.handle.requests.close()
        self.handle._receiver.close()


@contextmanager
def _nursery(folder: Path, **options: Any) -> Iterator[Nursery]:
    mark = uuid.uuid4().hex
    environment = {**options.pop("environment", {}), "KFP_ELASTIC_TEST_MARK": mark}
    nursery = Nursery(folder, environment=environment, **options)
    try:
        yield nursery
    finally:
        nursery.close()
        deadline = time.monotonic() + 10
        while left := _marked(mark):
            if time.monotonic() > deadline:
                for pid in left:
                    os.kill(pid, 9)
                pytest.fail(f"processes left: {left}")
            time.sleep(0.02)


def _marked(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Callable[..., Nursery]]:
    """Make a zygote in the test's folder: `nursery(preload=("x",))`; not started."""
    made = []

    def make(**options: Any) -> Nursery:
        context = _nursery(tmp_path, **options)
        made.append(context)
        return context.__enter__()

    yield make
    for context in made:
        context.__exit__(None, None, None)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """A started zygote that the tests of a module share."""
    with _nursery(tmp_path_factory.mktemp("shared")) as nursery:
        nursery.start()
        assert nursery.handle.ready, nursery.told
        yield nursery


@pytest.fixture
def python() -> str:
    """The interpreter that workers run in."""
    return sys.executable
