"""What tests share: the installed commands, a state folder of their own, and proof that no process is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")
MARK = "KFP_ELASTIC_TEST_MARK"


def marked_processes(mark: str) -> list[tuple[int, str]]:
    """Return (pid, command line) of every process whose environment holds `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                if command:
                    found.append((int(entry.name), command))
        except OSError:
            continue
    return found


def wait_until(condition: Callable[[], T], timeout: float = 60.0, what: str = "the condition") -> T:
    """Return the first true value of `condition`; fail after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not come true within {timeout:.0f} s")
        time.sleep(0.01)


class Sandbox:
    """Starts commands in a folder of the test's own and knows every process that came of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.environment = {
            **{
                key: value
                for key, value in os.environ.items()
                if not key.startswith(("ELASTIC_", "KFP_ELASTIC_"))
            },
            "XDG_STATE_HOME": str(folder / "state"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            MARK: self.mark,
        }

    def start(self, *command: str | Path, **options: object) -> subprocess.Popen[str]:
        """Start a command; output is captured as text."""
        environment = {**self.environment, **options.pop("env", {})}  # type: ignore[dict-item]
        return subprocess.Popen(
            [str(word) for word in command], cwd=options.pop("cwd", self.folder), env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, **options,
        )  # type: ignore[call-overload,no-any-return]  # fmt: skip

    def run(
        self, *command: str | Path, timeout: float = 120, **options: object
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        process = self.start(*command, **options)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            pytest.fail(f"{command} did not end within {timeout} s\n{out}\n{err}")
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def script(self, text: str, name: str = "train.py") -> Path:
        """Write a training script and return its path."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def processes(self) -> list[tuple[int, str]]:
        """Return every living process that came of the commands."""
        return marked_processes(self.mark)

    def assert_no_process_left(self) -> None:
        """Fail if a process is left a moment after the command ended."""
        deadline = time.monotonic() + 5
        while left := self.processes():
            if time.monotonic() > deadline:
                pytest.fail(f"processes left: {left}")
            time.sleep(0.02)


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    """A folder and environment for real commands; the test fails if it leaves a process behind."""
    box = Sandbox(tmp_path)
    try:
        yield box
        box.assert_no_process_left()
    finally:
        for pid, _ in box.processes():
            os.kill(pid, 9)


@pytest.fixture
def wait() -> Callable[..., object]:
    """Wait for a condition: `wait(condition, timeout=…, what=…)` returns its first true value."""
    return wait_until


_skips: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the reason of every skip."""
    if report.skipped and isinstance(report.longrepr, tuple):
        _skips.append(f"{report.nodeid}: {report.longrepr[2].removeprefix('Skipped: ')}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI, fail on a skip whose reason `allowed_skips.txt` does not list."""
    if not os.environ.get("CI") or hasattr(session.config, "workerinput"):
        return
    lines = (Path(__file__).parent / "allowed_skips.txt").read_text(encoding="utf-8").splitlines()
    allowed = [line for line in lines if line and not line.startswith("#")]
    unlisted = [skip for skip in _skips if not any(reason in skip for reason in allowed)]
    if unlisted:
        print("\nskipped for a reason that tests/allowed_skips.txt does not list:", *unlisted, sep="\n  ")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
