"""A candidate as a process: `candidate.py NAME FOLDER CANDIDATES_JSON LEASE`. Prints a line of JSON for what happens."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from elastic_runtime.membership.leadership.candidates import CandidateList
from elastic_runtime.membership.leadership.lease import Keeper
from elastic_runtime.membership.secret import read_secret

name, folder = sys.argv[1], Path(sys.argv[2])
candidates = {key: tuple(at) for key, at in json.loads(sys.argv[3]).items()}


def say(what: str, term: int) -> None:
    print(
        json.dumps({"what": what, "name": name, "term": term, "pid": os.getpid(), "at": time.monotonic()}),
        flush=True,
    )


stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
service = CandidateList(
    name,
    candidates,
    secret=read_secret(folder / "secret"),
    vote_file=folder / f"vote-{name}",
    lease=float(sys.argv[4]),
)
while not stopped:
    lease = service.acquire(0.5)
    if lease is None:
        continue
    say("leads", lease.term)
    lost: list[int] = []
    keeper = Keeper(lease, lambda lease, lost=lost: lost.append(lease.term))
    while not lost and not stopped:
        time.sleep(0.01)
    keeper.stop()
    # What it would decide now, as if it had not noticed: is its lease valid?
    say("lost" if lost else "releases", lease.term)
    assert not lost or not lease.valid(time.monotonic())
service.close()
