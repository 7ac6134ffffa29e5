"""A script that knows nothing of elasticity is scaled: all its workers are started anew on another number of nodes."""

from __future__ import annotations

import os
from typing import Any

# Without torch, so that a start costs no import; rank 0 saves every step, and everybody goes on from what is saved.
SCRIPT = """
import os, pathlib, sys, time
from elastic_runtime import worker

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
saved = pathlib.Path("saved")
step = int(saved.read_text()) if saved.exists() else 0
with open("starts", "a") as starts:
    starts.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {rank} {world} {step} {os.getpid()}\\n")
while not os.path.exists("finish"):
    step += 1
    if rank == 0:
        pathlib.Path("saving").write_text(str(step))
        os.replace("saving", "saved")
        worker.log(step=step, samples=step)
    time.sleep(0.01)
"""


def test_an_unmodified_script_is_scaled_down_and_up_again(sandbox: Any, control: Any) -> None:
    script = sandbox.script(SCRIPT, "plain.py")
    control.start("plain", "--nodes", "1:3", "--max-restarts", "0", script=script)
    first = control.until("plain", lambda d: d["world_size"] == 3 and d["global_step"] > 20, "training")
    assert [len(node["workers"]) for node in first["nodes"]] == [1, 1, 1]
    for size in (2, 3):
        reached = control.document("scale", "plain", str(size), "--wait", "60")
        assert (reached["reached"], reached["world_size"], reached["desired"]) == (True, size, size)
        before = first["global_step"]
        first = control.until("plain", lambda d, b=before: d["global_step"] > b + 20, "going on")
        assert len(first["nodes"]) == size, "no agent is left that has nothing to do"
    (sandbox.folder / "finish").touch()
    last = control.until("plain", lambda d: d["state"] not in ("running", "recovering"), "its end")
    assert (last["state"], last["restarts"]) == ("succeeded", 0), "scaling is not charged"
    starts: dict[int, dict[int, tuple[int, int, int]]] = {}
    for line in (sandbox.folder / "starts").read_text().splitlines():
        round_, rank, world, step, pid = map(int, line.split())
        assert rank not in starts.setdefault(round_, {}), "no rank twice in a round"
        starts[round_][rank] = (world, step, pid)
    assert [sorted(ranks) for _, ranks in sorted(starts.items())] == [[0, 1, 2], [0, 1], [0, 1, 2]]
    assert [{world for world, _, _ in ranks.values()} for _, ranks in sorted(starts.items())] == [
        {3},
        {2},
        {3},
    ]
    resumed = [ranks[0][1] for _, ranks in sorted(starts.items())]
    assert resumed[0] == 0
    assert resumed[0] < resumed[1] < resumed[2], "each went on from what the one before had saved"
    pids = [pid for ranks in starts.values() for _, _, pid in ranks.values()]
    assert len(set(pids)) == 8
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]  # noqa: PTH110 - a process, not a file
    kinds = [event["kind"] for event in last["events"]]
    assert kinds.count("resize") == 2
    assert not {"worker_failed", "node_lost", "pause"} & set(kinds)
