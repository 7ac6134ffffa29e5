"""A training job is scaled from the command line while somebody looks at it all the time."""

from __future__ import annotations

import json
import threading
from typing import Any

# Trains for ever on next to nothing, and can change its workers in place.
TRAINER = """
import time
import torch
from torch import nn
import elastic_runtime as elastic

net = nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
dataset = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))

def train(job):
    model = job.attach(model=net, optimizer=optimizer)
    for step in job.steps(dataset, global_batch=16, epochs=1_000_000):
        for inputs, targets in step:
            step.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)

elastic.run(train)
"""
STATES = {"pending", "forming", "running", "recovering"}


def test_status_is_whole_at_every_moment_of_a_scaling(sandbox: Any, control: Any) -> None:
    script = sandbox.script(TRAINER, "trainer.py")
    control.start("theta", "--nodes", "1:3", "--max-restarts", "0", script=script)
    first = control.until("theta", lambda d: d["world_size"] == 3 and d["global_step"] > 0, "training")
    assert control.document("scale", "theta", "2", "--wait", "60")["world_size"] == 2
    over, seen = threading.Event(), []

    def look() -> None:
        while not over.is_set():
            seen.append(sandbox.run("kfp-elastic", "status", "--json", "theta", cwd=control.elsewhere))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for size in (3, 1, 3):
            reached = control.document("scale", "theta", str(size), "--wait", "60")
            assert (reached["reached"], reached["world_size"], reached["desired"]) == (True, size, size)
    finally:
        over.set()
        watcher.join()
    steps = -1
    assert seen
    for done in seen:
        assert (done.returncode, done.stderr) == (0, "")
        document = json.loads(done.stdout)
        assert document["state"] in STATES
        assert (document["min"], document["max"], document["restarts"], document["term"]) == (1, 3, 0, 1)
        assert document["desired"] in (1, 2, 3)
        assert document["global_step"] >= steps
        steps = document["global_step"]
        ranks = [w["rank"] for n in document["nodes"] for w in n["workers"] if w["rank"] is not None]
        if document["state"] == "running":
            assert sorted(ranks)[: document["world_size"]] == list(range(document["world_size"]))
        assert len(ranks) == len(set(ranks))
    last = control.document("status", "theta")
    assert last["global_step"] > first["global_step"]
    assert last["nodes"][0]["workers"][0]["pid"] == first["nodes"][0]["workers"][0]["pid"], (
        "it went on in place"
    )
    sizes = [event["desired"] for event in last["events"] if event["kind"] == "scale"]
    assert sizes == [2, 3, 1, 3]
    control("stop", "theta")
    assert control.document("status", "theta")["state"] == "stopped"
