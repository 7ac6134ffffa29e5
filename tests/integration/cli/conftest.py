"""What these tests share: the command, its JSON document, and jobs that only wait."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SLEEPER = """
import os, signal, sys, time
from elastic_runtime import worker
place = worker.context()
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
for number in range(5):
    print("line", number, "of rank", place.rank, flush=True)
worker.log(step=3, loss=0.5, samples=64)
print("asleep", flush=True)
while not os.path.exists("finish"):
    time.sleep(0.02)
print("awake", end="", flush=True)
"""


class Control:
    """Runs `kfp-elastic` commands from a folder that has nothing to do with any job."""

    def __init__(self, sandbox: Any, wait: Callable[..., Any]) -> None:
        self.sandbox, self.wait = sandbox, wait
        self.script: Path = sandbox.script(SLEEPER)
        self.elsewhere = sandbox.folder / "nowhere"
        self.elsewhere.mkdir()

    def __call__(self, *words: str | Path, code: int = 0, **options: Any) -> Any:
        """Run a command, which must end with `code`; return the completed process."""
        done = self.sandbox.run("kfp-elastic", *words, **{"cwd": self.elsewhere, **options})
        assert done.returncode == code, (words, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done

    def document(self, *words: str | Path, code: int = 0) -> dict[str, Any]:
        """Run a command with `--json` and return its one document."""
        document: dict[str, Any] = json.loads(self(*words, "--json", code=code).stdout)
        assert document["schema"] == 1
        return document

    def error(self, *words: str | Path, code: int = 2) -> str:
        """Run a command that must fail with one clear error; return that."""
        done = self(*words, code=code)
        assert done.stdout == ""
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith("error: ")
        return str(line)

    def start(
        self, name: str, *options: str | Path, script: Path | None = None, arguments: Any = ()
    ) -> dict[str, Any]:
        """Start a job in the background; return its document."""
        words = ("run", "--detach", "--name", name, *options, script or self.script, "--", *arguments)
        done = self.sandbox.run("kfp-elastic", *words[:2], "--json", *words[2:])
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    def until(self, name: str, condition: Callable[[dict[str, Any]], Any], what: str) -> dict[str, Any]:
        """Return the first status document for which `condition` holds."""

        def met() -> dict[str, Any] | None:
            document = self.document("status", name)
            return document if condition(document) else None

        return self.wait(met, timeout=90, what=what)  # type: ignore[no-any-return]


@pytest.fixture
def control(sandbox: Any, wait: Callable[..., Any]) -> Control:
    """The command line, for jobs of this test."""
    return Control(sandbox, wait)
