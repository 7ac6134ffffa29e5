"""Which stores a worker serves itself: real ones, in processes that see what an agent's workers see."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import closing

# The agent's store is served here; the variable is what torchrun sets.
SCRIPT = """
import os, sys
from datetime import timedelta
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1], TORCHELASTIC_USE_AGENT_STORE="True",
                  RANK="0", WORLD_SIZE="1")
import torch.distributed as dist
from elastic_runtime.worker.own_stores import serve_own_stores
served = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
serve_own_stores(); serve_own_stores()
options = {"env": {}, "own": dict(init_method="tcp://127.0.0.1:" + sys.argv[2], rank=0, world_size=1)}
for name in ("own", "env"):
    before = served.num_keys()
    dist.init_process_group("gloo", timeout=timedelta(seconds=20), **options[name])
    dist.barrier()
    print(name, served.num_keys() > before, os.environ["TORCHELASTIC_USE_AGENT_STORE"])
    dist.destroy_process_group()
"""


def test_only_the_rounds_own_store_is_the_agents() -> None:
    ports = []
    for _ in range(2):
        with closing(socket.create_server(("127.0.0.1", 0))) as probe:
            ports.append(str(probe.getsockname()[1]))
    done = subprocess.run([sys.executable, "-c", SCRIPT, *ports], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines == ["own False True", "env True True"]
