"""The guard: whatever happens to it, its command or its starter, no process is left."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

GUARD = [sys.executable, "-P", "-m", "elastic_runtime.processes.guard"]
# A child, a grandchild in a session of its own, and one whose parent is gone.
FAMILY = "setsid sleep 600 & (sleep 600 &) ; sleep 600 & touch ready; "


@pytest.mark.parametrize(
    ("command", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $$", 143)]
)
def test_it_returns_what_the_command_returned(sandbox: Any, command: str, code: int) -> None:
    assert sandbox.run(*GUARD, "--", "sh", "-c", command).returncode == code


def test_a_command_that_does_not_exist_is_one_error(sandbox: Any) -> None:
    done = sandbox.run(*GUARD, "--", "no-such-command")
    assert done.returncode == 127
    assert done.stderr == "error: cannot start 'no-such-command': No such file or directory\n"
    assert sandbox.run(*GUARD).returncode == 2


def test_what_the_command_leaves_behind_is_killed_and_it_returns_at_once(sandbox: Any) -> None:
    assert sandbox.run(*GUARD, "--", "sh", "-c", FAMILY + "exit 3", timeout=10).returncode == 3
    assert sandbox.processes() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_command_and_all_below_it(
    sandbox: Any, wait: Callable[..., Any], number: int
) -> None:
    process = sandbox.start(*GUARD, "--", "sh", "-c", FAMILY + "wait")
    wait((sandbox.folder / "ready").exists)
    process.send_signal(number)
    process.communicate(timeout=10)
    assert process.returncode == 143
    assert sandbox.processes() == []


def test_a_command_that_ignores_sigterm_is_killed_after_the_grace(
    sandbox: Any, wait: Callable[..., Any]
) -> None:
    process = sandbox.start(
        *GUARD, "--grace", "0.2", "--", "sh", "-c", "trap '' TERM; touch ready; sleep 600 & wait; wait"
    )
    wait((sandbox.folder / "ready").exists)
    process.terminate()
    process.communicate(timeout=10)
    assert process.returncode == 137


def test_a_second_signal_ends_the_grace(sandbox: Any, wait: Callable[..., Any]) -> None:
    script = "import signal, time, pathlib\nsignal.signal(15, lambda *_: pathlib.Path('asked').touch())\n"
    script += "pathlib.Path('ready').touch()\nwhile True: time.sleep(1)"
    process = sandbox.start(*GUARD, "--grace", "600", "--", sys.executable, "-c", script)
    wait((sandbox.folder / "ready").exists)
    process.terminate()
    wait((sandbox.folder / "asked").exists)
    process.terminate()
    process.communicate(timeout=10)
    assert process.returncode == 137


def test_user_signals_reach_the_command(sandbox: Any, wait: Callable[..., Any]) -> None:
    script = "import signal, sys, time, pathlib\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(9))\n"
    script += "pathlib.Path('ready').touch()\ntime.sleep(600)"
    process = sandbox.start(*GUARD, "--", sys.executable, "-c", script)
    wait((sandbox.folder / "ready").exists)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=10)
    assert process.returncode == 9


def test_the_death_of_the_starter_ends_everything(sandbox: Any, wait: Callable[..., Any]) -> None:
    starter = "import subprocess, sys\nsubprocess.Popen(sys.argv[1:], start_new_session=True).wait()"
    process = sandbox.start(sys.executable, "-c", starter, *GUARD, "--", "sh", "-c", FAMILY + "wait")
    wait((sandbox.folder / "ready").exists)
    process.kill()
    process.communicate()
    sandbox.assert_no_process_left()


@pytest.mark.parametrize("attempt", range(6))
def test_the_death_of_a_starter_with_threads_is_told_once(
    sandbox: Any, wait: Callable[..., Any], attempt: int
) -> None:
    """The kernel sends the signal for each thread that the guard is handed on to; how many come is chance."""
    starter = (
        "import subprocess, sys, threading, time\n"
        "for _ in range(3):\n    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "subprocess.Popen(sys.argv[1:], start_new_session=True).wait()"
    )
    command = "trap 'sleep 0.3; touch saved; exit' TERM; touch ready; while :; do sleep 0.05; done"
    process = sandbox.start(sys.executable, "-c", starter, *GUARD, "--grace", "60", "--", "sh", "-c", command)
    wait((sandbox.folder / "ready").exists)
    process.kill()
    process.communicate()
    wait(lambda: not sandbox.processes(), what="the end of all")
    assert (sandbox.folder / "saved").exists(), "the command had its grace"


def test_a_starter_that_is_gone_before_the_guard_comes_up_is_noticed(sandbox: Any) -> None:
    gone = sandbox.start("true")
    gone.communicate()
    done = sandbox.run(*GUARD, "--parent", str(gone.pid), "--", "sleep", "600", timeout=10)
    assert done.returncode != 0


def test_a_guard_below_a_guard_is_cleared_too(sandbox: Any, wait: Callable[..., Any]) -> None:
    process = sandbox.start(
        *GUARD, "--", *GUARD, "--grace", "600", "--", "sh", "-c", "trap '' TERM;" + FAMILY + "wait; wait"
    )
    wait((sandbox.folder / "ready").exists)
    inner = [pid for pid, command in sandbox.processes() if "--grace 600" in command and pid != process.pid]
    os.kill(max(inner), signal.SIGKILL)
    process.communicate(timeout=10)
    assert sandbox.processes() == []
