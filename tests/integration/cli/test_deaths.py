"""Processes of a job are killed or stopped while somebody looks, or just before."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_runtime.jobs import ending
from elastic_runtime.jobs.lookup import find_job


def ready(document: dict[str, Any]) -> bool:
    return document["state"] == "running" and document["global_step"] > 0


def test_status_after_the_coordinator_was_killed_or_stopped(control: Any) -> None:
    control.start("beta", "--nodes", "2")
    before = control.until("beta", ready, "a step")
    for term, number in ((2, signal.SIGKILL), (3, signal.SIGSTOP)):
        old = control.document("status", "beta")["coordinator"]["pid"]
        os.kill(old, number)
        # One look is enough: it waits for the successor, which knows everything.
        after = control.document("status", "beta")
        assert after["term"] == term
        assert after["coordinator"]["pid"] != old
        for key in ("state", "world_size", "desired", "restarts", "round", "min", "max", "global_step"):
            assert after[key] == before[key], key
        workers = [[(n["agent_pid"], w["rank"], w["pid"]) for n in d["nodes"] for w in n["workers"]]
                   for d in (before, after)]  # fmt: skip
        assert workers[0] == workers[1], "nobody stopped for it"
    lost = [event for event in after["events"] if event["kind"] == "coordinator_lost"]
    assert ["was killed by SIGKILL" in event["cause"] for event in lost] == [True, False]
    # Told to a coordinator that dies right after: still done by the one that follows.
    os.kill(after["coordinator"]["pid"], signal.SIGKILL)
    assert control.document("scale", "beta", "2", "--wait", "30")["reached"] is True
    control("stop", "beta")


def test_a_job_whose_supervisor_was_killed(sandbox: Any, control: Any, wait: Callable[..., Any]) -> None:
    started = control.start("gamma")
    document = control.until("gamma", ready, "a step")
    os.kill(document["supervisor"], signal.SIGKILL)
    # Told in this very moment, it returns when the guard has killed the rest.
    stopped = control.document("stop", "gamma")
    assert (stopped["state"], stopped["was_running"]) == ("failed", False)
    assert sandbox.processes() == []
    document = control.document("status", "gamma")
    assert (document["state"], document["nodes"], document["coordinator"], document["exit_code"]) == (
        "failed", [], None, 1,
    )  # fmt: skip
    assert "was killed, and left no record" in document["reason"]
    assert "is over (failed: its supervisor" in control.error("scale", "gamma", "1")
    page = Path(control("report", "gamma").stdout.strip())
    assert "left no record" in page.read_text()
    assert not (Path(started["folder"]) / "secret").exists()
    # The same name starts again, and is not taken for the one before.
    control.start("gamma")
    control.until("gamma", ready, "a step of the second run")
    # A launcher that is killed takes its job along.
    launcher = next(pid for pid, line in sandbox.processes() if "run --detach" in line)
    os.kill(launcher, signal.SIGKILL)
    assert control.until("gamma", lambda d: not d["nodes"], "the end")["state"] == "stopped"
    control("stop", "gamma")


def test_a_supervisor_that_was_stopped_is_woken_to_stop_its_job(sandbox: Any, control: Any) -> None:
    run = sandbox.start("kfp-elastic", "run", "--name", "delta", control.script)
    _wait_known(control, "delta")
    document = control.until("delta", ready, "a step")
    os.kill(document["supervisor"], signal.SIGSTOP)
    os.kill(document["coordinator"]["pid"], signal.SIGKILL)
    seen = control.document("status", "delta")
    assert (seen["state"], seen["coordinator"]) == ("running", None), "as the folder says"
    assert [worker["pid"] for node in seen["nodes"] for worker in node["workers"]] == [
        worker["pid"] for node in document["nodes"] for worker in node["workers"]
    ]
    assert control.document("stop", "delta")["state"] == "stopped"
    assert not {pid for pid, _ in sandbox.processes()} - {run.pid}, "nothing but its launcher, at most"
    out, err = run.communicate(timeout=30)
    assert run.returncode == 130, out + err


def test_a_supervisor_that_does_not_end_is_killed_and_its_run_was_stopped(
    sandbox: Any, control: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sandbox.start("kfp-elastic", "run", "--name", "epsilon", "--grace", "1", control.script)
    _wait_known(control, "epsilon")
    supervisor = control.until("epsilon", ready, "a step")["supervisor"]
    over = threading.Event()

    def hold() -> None:
        while not over.wait(0.001):
            try:
                os.kill(supervisor, signal.SIGSTOP)
            except ProcessLookupError:
                return

    monkeypatch.setenv("XDG_STATE_HOME", sandbox.environment["XDG_STATE_HOME"])
    monkeypatch.setattr(ending, "_MARGIN", 1.0)
    # As if the machine gave it no time at all: it cannot be woken.
    monkeypatch.setattr(ending._Process, "wake", lambda self: None)
    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert ending.end(find_job("epsilon")) is True
    finally:
        over.set()
        holder.join()
    out, err = run.communicate(timeout=30)
    assert run.returncode == 130, out + err
    document = control.document("status", "epsilon")
    assert (document["state"], document["exit_code"]) == ("stopped", 130)
    assert "did not end and was killed" in document["reason"]
    assert not (Path(document["folder"]) / "secret").exists()


def test_a_second_stop_does_not_shorten_the_grace_but_may(sandbox: Any, control: Any) -> None:
    control.start("zeta", "--grace", "60", arguments=["--stubborn"])
    control.until("zeta", ready, "a step")
    first = sandbox.start("kfp-elastic", "stop", "zeta", cwd=control.elsewhere)
    ended = control.until("zeta", lambda d: d["state"] == "stopped", "the first stop's signal")
    assert ended["supervisor"] is not None, "its worker still has its grace"
    assert first.poll() is None
    control("stop", "zeta", "--grace", "1")
    out, err = first.communicate(timeout=30)
    assert first.returncode == 0, out + err


def _wait_known(control: Any, name: str) -> None:
    """Wait until a job in the foreground has begun."""
    folder = Path(control.sandbox.environment["XDG_STATE_HOME"]) / "kfp-elastic" / "jobs" / name
    control.wait(lambda: (folder / "job.json").exists(), what=f"the start of {name}")
