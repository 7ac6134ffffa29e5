"""Hosts the TCP store of each round: `python -P -m elastic_runtime.supervisor.store_host FD`.

Supervisor and agents do not load torch, and the store must not live in a worker, for it would die with it. The
supervisor binds the listening socket of a round, so that the port is known at once and no other process can take it,
and passes it here over the unix socket FD; workers that connect early wait in its backlog. The two newest stores
are kept. A ping is answered with pong, so that the supervisor knows that this process serves.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from elastic_runtime.processes import tree


def main() -> int:
    """Serve until the supervisor closes its end."""
    tree.die_with_parent(os.getppid(), signal.SIGKILL)
    control = socket.socket(fileno=int(sys.argv[1]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
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
