"""The machine lock among real processes."""

from __future__ import annotations

import signal
import sys

from elastic_runtime.membership.leadership import MachineLock

HOLD = """
import sys, time
from pathlib import Path
from elastic_runtime.membership.leadership import MachineLock
lease = MachineLock(Path(sys.argv[1])).acquire(60)
print(lease.term, flush=True)
time.sleep(3600)
"""


def test_a_killed_holder_frees_it_and_a_paused_one_does_not(sandbox, tmp_path):
    path = tmp_path / "leader"
    for term in (1, 3, 5):
        holder = sandbox.start(sys.executable, "-c", HOLD, path)
        assert int(holder.stdout.readline()) == term
        lock = MachineLock(path)
        holder.send_signal(signal.SIGSTOP)
        assert lock.acquire(0.2) is None
        holder.kill()
        lease = lock.acquire(30)
        assert lease.term == term + 1
        holder.communicate(timeout=30)
        lease.release()


def test_many_that_want_it_at_once_get_terms_of_their_own(sandbox, tmp_path):
    path = tmp_path / "leader"
    script = HOLD.replace("time.sleep(3600)", "lease.release()").replace(
        "lease = ", "lock = MachineLock(Path(sys.argv[1]))\nfor _ in range(50):\n  lease = lock.acquire(60); print(lease.term, flush=True); lease.release()\nlease = "
    )  # fmt: skip
    processes = [sandbox.start(sys.executable, "-c", script, path) for _ in range(3)]
    terms = []
    for process in processes:
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        terms += [int(line) for line in out.split()]
    assert sorted(terms) == list(range(1, 154))
