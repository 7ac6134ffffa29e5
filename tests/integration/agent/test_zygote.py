"""The zygote, its keepers and its clients when something goes wrong at an unlucky moment."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_runtime.agent.requests import receive
from elastic_runtime.agent.warm import Ended, Gone, Lost, Refused, Started

SLEEPER = "import pathlib, sys, time\nprint('up', flush=True)\nwhile not pathlib.Path('finish').exists():\n    time.sleep(0.01)\nsys.exit(7)\n"
FAMILY = """
import os, pathlib, subprocess, sys, time
name = sys.argv[1]
subprocess.Popen(["sleep", "601"])
subprocess.Popen(["setsid", "sleep", "601"])
subprocess.run(["sh", "-c", "setsid sleep 601 & exit 0"])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        pathlib.Path(f"{name}-daemon").write_text(str(os.getpid()))
        time.sleep(601)
    os._exit(0)
os.wait()
while not pathlib.Path(f"{name}-daemon").exists():
    time.sleep(0.01)
pathlib.Path(f"{name}-up").touch()
while not pathlib.Path("finish").exists():
    time.sleep(0.01)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def descendants(pid: int) -> set[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            parents[int(entry.name)] = int(fields[1])
        except (OSError, ValueError, IndexError):
            continue
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in {pid, *found}} - found:
        found |= more
    return found


def started(nursery: Any, worker: Any) -> None:
    assert [type(event) for event in nursery.next(worker)] == [Started]


def test_requests_made_before_the_zygote_is_up_are_served_when_it_is(nursery: Callable[..., Any]) -> None:
    box = nursery()
    (box.folder / "train.py").write_text("print('ran')")
    workers = [box.ask(box.program("train.py")) for _ in range(3)]
    assert all(worker.read() == [] for worker in workers)
    box.start()
    for worker in workers:
        assert [type(event) for event in box.all(worker)] == [Started, Ended, Gone]
    assert box.log.read_text() == "ran\n" * 3
    assert box.told == []


def test_the_death_of_the_zygote_costs_nothing(nursery: Callable[..., Any]) -> None:
    """A worker lives on and its exit code is known; a request made meanwhile is served by the next zygote."""
    box = nursery()
    box.start()
    (box.folder / "train.py").write_text(SLEEPER)
    first = box.ask(box.program("train.py"))
    started(box, first)
    before = box.handle.pid
    os.kill(before, signal.SIGKILL)
    second = box.ask(box.program("train.py"))
    box.until(lambda: box.told)
    assert box.told == ["the zygote was killed by SIGKILL; another one is started"]
    started(box, second)
    assert box.handle.pid != before
    assert alive(first.pid)
    (box.folder / "finish").touch()
    assert box.all(first) == [Ended(7), Gone()]
    assert box.all(second) == [Ended(7), Gone()]


def test_a_request_that_died_with_the_zygote_is_known_never_to_have_run(nursery: Callable[..., Any]) -> None:
    box = nursery()
    box.start()
    (box.folder / "train.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    os.kill(box.handle.pid, signal.SIGSTOP)
    worker = box.ask(box.program("train.py"))
    # The packet goes the way it would if the zygote had read it and died before its fork.
    _, descriptors = receive(box.handle._receiver)
    for descriptor in descriptors:
        os.close(descriptor)
    assert worker.read() == [Lost()]
    assert not (box.folder / "ran").exists()
    assert box.watch(20.0) == ["the zygote no longer answered; another one is started"]
    again = box.ask(box.program("train.py"))
    assert [type(event) for event in box.all(again)] == [Started, Ended, Gone]
    assert (box.folder / "ran").exists()


def test_a_zygote_that_is_paused_for_a_while_goes_on(nursery: Callable[..., Any]) -> None:
    box = nursery()
    box.start()
    (box.folder / "train.py").write_text("print('ran')")
    pid = box.handle.pid
    os.kill(pid, signal.SIGSTOP)
    for _ in range(10):
        assert box.watch(1.0) == []
    worker = box.ask(box.program("train.py"))
    os.kill(pid, signal.SIGCONT)
    assert box.all(worker)[-1] == Gone()
    box.until(lambda: box.watch(0.0) == [] and box.handle._silence == 0.0)
    assert box.handle.pid == pid


def test_a_zygote_that_dies_again_and_again_is_given_up_and_requests_are_refused(
    nursery: Callable[..., Any],
) -> None:
    box = nursery()
    box.handle.start()
    worker = box.ask(box.program("train.py"))
    for _ in range(3):
        pid = box.handle.pid
        os.kill(pid, signal.SIGKILL)
        box.until(lambda pid=pid: box.handle.pid != pid)
    assert box.handle.given_up
    assert box.told[-1].startswith("the zygote was lost 3 times in a row and was killed by SIGKILL")
    assert box.all(worker) == [Refused()]
    assert box.all(box.ask(box.program("train.py"))) == [Refused()]


@pytest.mark.parametrize("how", ["ends", "is killed", "client closes", "keeper is killed"])
def test_what_a_worker_leaves_behind_goes_with_it_and_nothing_else_does(
    nursery: Callable[..., Any], how: str
) -> None:
    box = nursery()
    box.start()
    (box.folder / "train.py").write_text(FAMILY)
    one, other = (box.ask(box.program("train.py", name)) for name in ("one", "other"))
    for worker in (one, other):
        started(box, worker)
    box.until(lambda: (box.folder / "one-up").exists() and (box.folder / "other-up").exists())
    pid, keeper = one.pid, one.keeper
    mine, theirs = descendants(keeper), descendants(other.keeper)
    assert len(mine) == len(theirs) == 5
    if how == "ends":
        (box.folder / "finish").touch()
        assert box.all(one) == [Ended(0), Gone()]
    elif how == "is killed":
        one.send_signal(signal.SIGKILL)
        assert box.all(one) == [Ended(-9), Gone()]
        assert not any(map(alive, mine)), "gone before the client is told"
    elif how == "client closes":
        one.close()
        box.until(lambda: not any(map(alive, mine)))
    else:
        os.kill(keeper, signal.SIGKILL)
        assert box.all(one) == [Ended(-9), Gone()]
        box.until(lambda: not alive(pid))
        for left in filter(alive, mine):  # They came to this process' reaper: the guard of a job kills them.
            os.kill(left, signal.SIGKILL)
    if how != "ends":
        assert all(map(alive, theirs))
        (box.folder / "finish").touch()
    assert box.all(other)[-1] == Gone()
    assert not any(map(alive, theirs))


def test_a_worker_that_is_cancelled_before_the_zygote_is_up_never_runs(nursery: Callable[..., Any]) -> None:
    box = nursery()
    (box.folder / "train.py").write_text("import pathlib, sys; pathlib.Path(sys.argv[1]).touch()")
    unwanted = box.ask(box.program("train.py", "unwanted"))
    assert unwanted.cancel()
    wanted = box.ask(box.program("train.py", "wanted"))
    box.start()
    assert [type(event) for event in box.all(wanted)] == [Started, Ended, Gone]
    assert not (box.folder / "unwanted").exists()
    assert not wanted.cancel(), "it has ended"


def test_cancelling_at_any_moment_leaves_nothing_running(nursery: Callable[..., Any]) -> None:
    box = nursery()
    box.start()
    (box.folder / "train.py").write_text(
        "import os, pathlib, time; pathlib.Path(f'{os.getpid()}.pid').touch(); time.sleep(600)"
    )
    outcomes = []
    for number in range(40):
        worker = box.ask(box.program("train.py"))
        for _ in range(number * 500):
            pass  # The moment itself is the input.
        outcomes.append(worker.cancel())
        if outcomes[-1]:
            running = [path for path in box.folder.glob("*.pid") if alive(int(path.stem))]
            assert running == [], "cancelled workers are gone at once"
        else:
            worker.send_signal(signal.SIGKILL)
            started_or_ended = box.all(worker)
            assert started_or_ended[-1] == Gone()
    assert any(outcomes)


def test_signals_reach_the_worker_alone_and_none_its_successor(nursery: Callable[..., Any]) -> None:
    box = nursery()
    box.start()
    (box.folder / "train.py").write_text(
        "import pathlib, signal, sys, time\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(11))\n"
        "pathlib.Path('up').touch()\ntime.sleep(600)"
    )
    worker = box.ask(box.program("train.py"))
    worker.send_signal(signal.SIGUSR1)  # Not there yet: nothing happens.
    started(box, worker)
    box.until((box.folder / "up").exists)
    worker.send_signal(signal.SIGUSR1)
    assert box.all(worker) == [Ended(11), Gone()]
    worker.send_signal(signal.SIGKILL)


def test_five_hundred_workers_leave_neither_descriptors_nor_zombies(nursery: Callable[..., Any]) -> None:
    box = nursery()
    box.start()
    (box.folder / "train.py").write_text("import os; os._exit(0)")

    def count() -> tuple[int, int]:
        zygote = Path(f"/proc/{box.handle.pid}")
        return len(list((zygote / "fd").iterdir())), len(descendants(box.handle.pid))

    before, ours = count(), len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(100):
        workers = [box.ask(box.program("train.py")) for _ in range(5)]
        for worker in workers:
            assert box.all(worker)[-2:] == [Ended(0), Gone()]
            worker.close()
            box.workers.remove(worker)
    box.until(lambda: count() == before)
    assert len(list(Path("/proc/self/fd").iterdir())) == ours


def test_a_request_that_finds_no_place_in_the_zygote_is_lost_and_the_next_served(
    nursery: Callable[..., Any],
) -> None:
    box = nursery()
    box.start()
    # The limit on processes does not bind root, so the descriptors of the request find no place here instead.
    descriptors = resource.prlimit(box.handle.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(box.handle.pid, resource.RLIMIT_NOFILE, (7, descriptors[1]))
    assert box.all(box.ask(box.program("train.py"))) == [Lost()]
    resource.prlimit(box.handle.pid, resource.RLIMIT_NOFILE, descriptors)
    (box.folder / "train.py").write_text("print('ran')")
    assert box.run(box.program("train.py")) == (0, "ran\n")
