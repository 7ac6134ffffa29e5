"""How long a worker waits for its agent to explain a broken collective."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# In a process of its own: the end of the channel ends the process.
_WORKER = """
import json, os, socket, sys, threading, time
from elastic_runtime.training.channel import AgentLink
agent, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.environ["ELASTIC_CHANNEL"] = str(ours.detach())
link = AgentLink.from_environment(lambda: None)
def say():
    for wait, message in json.loads(sys.argv[1]):
        time.sleep(wait)
        agent.send(json.dumps(message).encode())
for message in json.loads(sys.argv[2]):
    agent.send(json.dumps(message).encode())
if json.loads(sys.argv[2]):
    while link._led:
        time.sleep(0.01)
threading.Thread(target=say, daemon=True).start()
begin = time.monotonic()
print(json.dumps([link.wait_for_change(0.2), time.monotonic() - begin]), flush=True)
os._exit(0)
"""
AWAY, HERE = {"kind": "coordinator", "here": False}, {"kind": "coordinator", "here": True}
CHANGE = {"kind": "change", "round": 3, "planned": False}


@pytest.mark.parametrize(
    ("before", "later", "explained", "least"),
    [
        ([], [], False, 0.2),
        ([], [(0.0, CHANGE)], True, 0.0),
        ([AWAY], [(0.8, CHANGE)], True, 0.8),  # Nobody can know yet: it waits longer than it would else.
        ([AWAY], [(0.8, HERE)], False, 1.0),  # The coordinator is there again, and knows of nothing.
        ([AWAY], [(0.5, HERE), (0.0, CHANGE)], True, 0.5),
    ],
)
def test_time_without_a_coordinator_does_not_count(before, later, explained, least):
    ran = subprocess.run(
        [sys.executable, "-c", _WORKER, json.dumps(later), json.dumps(before)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    found, seconds = json.loads(ran.stdout)
    assert found is explained
    assert seconds >= least - 0.02
