"""Hosts the TCP store of each round: `python -P -m elastic_runtime.agent.store_host`, or a fork of the zygote.

Agents do not load torch, and the store must not live in a worker, for it would die with it. The
agent binds the listening socket of a round, so that the port is known at once and no other process can take it,
and passes it here over the unix socket whose number is in ELASTIC_CHANNEL; workers that connect early wait in its
backlog. The two newest stores are kept. A ping is answered with pong, so that the agent knows that this process
serves.
"""

from __future__ import annotations

import os
import socket
import sys

from elastic_runtime.agent.requests import CHANNEL


def main() -> int:
    """Serve until the agent closes its end."""
    control = socket.socket(fileno=int(os.environ[CHANNEL]))
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, but not declared

    stores: list[TCPStore] = []
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 256, 1)
        if not message:
            return 0
        if message == b"ping":
            control.send(b"pong")
            continue
        host, port = message.decode().split()
        stores.append(
            TCPStore(host, int(port), None, True, wait_for_workers=False, master_listen_fd=descriptors[0])
        )
        del stores[:-2]


if __name__ == "__main__":
    sys.exit(main())
