"""An agent that is started by hand and finds nobody."""

from __future__ import annotations

import socket
import sys

from elastic_runtime.agent.config import AgentConfig
from elastic_runtime.jobs.spec import Program
from elastic_runtime.membership.secret import create_secret


def test_an_agent_that_finds_no_coordinator_gives_up_and_says_why(sandbox):
    create_secret(sandbox.folder / "secret")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    config = sandbox.folder / "agent.json"
    AgentConfig(
        name="alone", program=Program(script=str(sandbox.script("print('never')"))), workers=1, nodes=1,
        max_restarts=0, grace=1.0, job_dir=str(sandbox.folder / "job"), output_dir=str(sandbox.folder / "output"),
        coordinator=("127.0.0.1", port), secret=str(sandbox.folder / "secret"), patience=1.0,
    ).write(config)  # fmt: skip
    ran = sandbox.run(
        sys.executable, "-P", "-m", "elastic_runtime.agent", "--config", config, "--node", "gpu-a"
    )
    assert ran.returncode == 1
    where = f"coordinator at 127.0.0.1:{port}: Connection refused"
    assert f"[elastic] {where}" in ran.stderr
    assert ran.stderr.splitlines()[-1] == f"[elastic] node gpu-a ends: no coordinator for 1 s: {where}"
