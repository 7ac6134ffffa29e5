"""The coordinator process: `python -P -m elastic_runtime.membership.coordinator --config FILE --listen FD`.

It holds the job's membership, and nothing that a later one could not learn from the agents: its death costs nothing.
It leads only while it holds the job's lock, whose term counts up from one coordinator to the next.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic_runtime.jobs.folder import write_json
from elastic_runtime.jobs.nodes import parse_nodes
from elastic_runtime.membership.leadership.machine_lock import MachineLock
from elastic_runtime.membership.machine import Membership
from elastic_runtime.membership.secret import read_secret
from elastic_runtime.membership.server import Server
from elastic_runtime.membership.service import Service
from elastic_runtime.processes import tree

__all__ = ["CoordinatorConfig", "main"]

_TICK = 0.1
_BEAT = 1.0
"""Most seconds between two words that are asked of an agent; a quarter of a short heartbeat is less."""
_LINGER = 10.0
"""Seconds after the job's end in which those that are connected may still hear of it."""
_ACQUIRE = 30.0


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """One job as its coordinator sees it."""

    name: str
    """Job name."""
    nodes: str
    """Sizes, as `--nodes` takes them."""
    workers: int
    """Workers of a node."""
    max_restarts: int
    lock: str
    """Path of the lock that makes a coordinator the leader."""
    secret: str
    """Path of the file with the job's secret."""
    heartbeat: float = 5.0
    """Seconds after which an agent that says nothing is taken for lost."""
    wait_limit: float = 600.0
    """Seconds below the minimum after which the job fails."""
    managed: bool = True
    """Whether somebody starts and stops agents as the coordinator says, all on this machine and called 0, 1, 2 …;
    others come by themselves, from any host and by any name."""

    def write(self, path: Path) -> None:
        """Write it for `read`."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> CoordinatorConfig:
        """Read what `write` wrote."""
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        document.pop("schema")
        return cls(**document)


async def _lead(config: CoordinatorConfig, listener: socket.socket) -> int:
    secret = read_secret(Path(config.secret))
    lock = MachineLock(Path(config.lock))
    lease = lock.acquire(_ACQUIRE)
    if lease is None:
        sys.stderr.write(f"error: another coordinator has held {config.lock} for {_ACQUIRE:.0f} s\n")
        return 1
    machine = Membership(
        parse_nodes(config.nodes, config.workers),
        max_restarts=config.max_restarts,
        now=time.monotonic(),
        term=lease.term,
        managed=config.managed,
        wait_limit=config.wait_limit,
    )
    service = Service(machine, name=config.name, heartbeat=config.heartbeat)
    server = Server(listener, secret, service)
    service.attach(server)
    server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    beat, over = 0.0, None
    while not stop.is_set() and (over is None or (time.monotonic() < over and server.connections)):
        service.tick()
        now = time.monotonic()
        if now >= beat:
            beat = now + min(_BEAT, config.heartbeat / 4)
            service.beat()
        if service.done is not None and over is None:
            over = now + _LINGER
        try:
            await asyncio.wait_for(stop.wait(), _TICK)
        except TimeoutError:
            continue
    await server.stop()
    lock.release()
    return 0


def main() -> int:
    """Lead the job until it is over."""
    parser = argparse.ArgumentParser(prog="coordinator")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--listen", type=int, required=True)
    given = parser.parse_args()
    tree.die_with_parent(os.getppid(), signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # They go to the whole group; the supervisor says what follows.
    return asyncio.run(_lead(CoordinatorConfig.read(given.config), socket.socket(fileno=given.listen)))


if __name__ == "__main__":
    sys.exit(main())
