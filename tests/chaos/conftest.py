"""A storm over a real job: random signals to every kind of its processes, and random sizes, at any moment.

`CHAOS_SECONDS` (default 60) is how long it lasts, `CHAOS_SEED` makes its choices repeatable (not their moments in the
job), `CHAOS_PAUSE` (default 1.5) is the mean of the seconds between two blows.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

KINDS = {
    "worker": ("train.py", 8),
    "agent": ("-m elastic_runtime.agent --channel", 4),
    "keeper": ("elastic-keeper", 2),
    "store host": ("elastic_runtime.agent.store_host", 1),
    "coordinator": ("elastic_runtime.membership.coordinator", 2),
    "zygote": ("elastic-zygote", 1),
}
"""What the command line of each kind holds, and how often it is chosen."""
SIGNALS = {signal.SIGKILL: 5, signal.SIGTERM: 2, signal.SIGSTOP: 2, signal.SIGSEGV: 1}
_OTHERS = ("kfp-elastic run", "elastic_runtime.supervisor ", "processes.guard")
_SCALE = 0.12
"""Share of the blows that are a change of size."""
_BURST = 0.15
"""Share of the blows that are followed at once by another."""
_ZYGOTE_PAUSE = 25.0
"""Seconds between two blows to the zygote: three losses in a row mean, by design, that workers start without one."""


class Storm:
    """One job and what is done to it."""

    def __init__(self, sandbox: Any, wait: Callable[..., Any]) -> None:
        self.sandbox, self.wait = sandbox, wait
        self.seconds = float(os.environ.get("CHAOS_SECONDS", "60"))
        self.chance = random.Random(int(os.environ.get("CHAOS_SEED", "0")))
        self.folder: Path = sandbox.folder / "job"
        self.blows: Counter[str] = Counter()
        self.told: list[str] = []
        self._zygote_at = float("-inf")
        self._scales: list[subprocess.Popen[str]] = []

    def run(self, script: str, *arguments: str, sizes: tuple[int, ...] = ()) -> dict[str, Any]:
        """Start the job, let the storm pass over it, let it finish; return its record. Fails if it does not."""
        command = (
            "kfp-elastic", "run", "--name", "chaos", "--nodes", "1:3", "--max-restarts", "100000", "--grace", "1",
            "--heartbeat", "2", "--state-dir", "job", self.sandbox.script(script), "--", *arguments,
        )  # fmt: skip
        output = self.sandbox.folder / "output.txt"
        process = self.sandbox.start("sh", "-c", 'exec "$@" >output.txt 2>&1', "sh", *command)
        self.wait((self.folder / "metrics.jsonl").exists, what="a first step")
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            # The moment is the input: blows fall into steps, starts, saves and recoveries alike.
            time.sleep(self.chance.expovariate(1 / float(os.environ.get("CHAOS_PAUSE", "1.5"))))
            assert process.poll() is None, output.read_text()[-4000:]
            self._blow(sizes)
            while self.chance.random() < _BURST:
                self._blow(sizes)
        (self.sandbox.folder / "finish").touch()
        try:
            process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            pytest.fail("the job did not end:\n" + "\n".join(self.told[-20:]) + output.read_text()[-6000:])
        self.text = output.read_text()
        assert process.returncode == 0, self.text[-6000:]
        for scale in self._scales:
            # One that was told to a coordinator which was killed for ever may come after the end: an error, not a hang.
            _, err = scale.communicate(timeout=60)
            assert "Traceback" not in err
        record = json.loads((self.folder / "record.json").read_text())
        assert record["state"] == "succeeded"
        return record  # type: ignore[no-any-return]

    def ends(self) -> set[str]:
        """What the workers that were there to the end said of it."""
        return {line.split("END ")[1] for line in self.text.splitlines() if "] END " in line}

    def report(self, record: dict[str, Any]) -> str:
        """What happened, in a few lines."""
        seconds = sorted(one["seconds"] for one in record["recoveries"] if one["seconds"] is not None)
        slow = [one for one in record["recoveries"] if (one["seconds"] or 0) > 10]
        lines = [
            f"{sum(self.blows.values())} blows: " + ", ".join(f"{n} {what}" for what, n in sorted(self.blows.items())),
            f"{record['global_step']} steps, {record['restarts']} restarts, {len(seconds)} recoveries",
        ]  # fmt: skip
        if seconds:
            lines.append(
                f"recovery: median {statistics.median(seconds):.3f} s, 90 % {seconds[len(seconds) * 9 // 10]:.3f} s, "
                f"worst {seconds[-1]:.3f} s"
            )
        return "\n".join([*lines, *(f"slow: {one}" for one in slow)])

    def _blow(self, sizes: tuple[int, ...]) -> None:
        if sizes and self.chance.random() < _SCALE:
            size = self.chance.choice(sizes)
            self._scales.append(self.sandbox.start("kfp-elastic", "scale", "chaos", str(size)))
            self._note(f"scale to {size}")
            return
        kind = self.chance.choices(list(KINDS), [weight for _, weight in KINDS.values()])[0]
        number = self.chance.choices(list(SIGNALS), list(SIGNALS.values()))[0]
        if kind == "zygote":
            if time.monotonic() - self._zygote_at < _ZYGOTE_PAUSE:
                return
            self._zygote_at = time.monotonic()
        found = [
            pid for pid, command in self.sandbox.processes()
            if KINDS[kind][0] in command and not any(other in command for other in _OTHERS)
        ]  # fmt: skip
        if found:
            pid = self.chance.choice(sorted(found))
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                return
            self._note(f"{number.name} {kind}", f" {pid}")

    def _note(self, what: str, detail: str = "") -> None:
        self.blows[what] += 1
        self.told.append(f"{time.time():.3f} {what}{detail}")
        with (self.sandbox.folder / "blows.txt").open("a") as file:
            file.write(self.told[-1] + "\n")


@pytest.fixture
def storm(sandbox: Any, wait: Callable[..., Any]) -> Storm:
    """A storm for one job of this test."""
    return Storm(sandbox, wait)
