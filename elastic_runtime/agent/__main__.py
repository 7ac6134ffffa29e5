"""The agent process: `python -P -m elastic_runtime.agent --config FILE --node NAME [--channel FD] [--zygote FD]`.

It starts its workers as the coordinator says, by the zygote of the machine or, where there is none to be had, itself,
and reports how each ends, within milliseconds. When the supervisor is gone, or on SIGTERM, it stops its workers and
ends; when the agent itself is killed, its workers are killed with all they left behind. SIGUSR1 and SIGUSR2 are
passed on to the workers.

Without a channel there is no supervisor: the agent is started by hand, on a host of its own, and has a zygote of its
own. The workers then meet at the network interface that GLOO_SOCKET_IFNAME names, and at the `store_host` of the
configuration.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from pathlib import Path

from elastic_runtime.agent.config import AgentConfig
from elastic_runtime.agent.lone import LoneAgent
from elastic_runtime.agent.node import NodeAgent
from elastic_runtime.agent.protocol import Channel
from elastic_runtime.processes import tree


def main() -> int:
    """Run the agent of one node."""
    parser = argparse.ArgumentParser(prog="agent")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--channel", type=int, help="socket to the supervisor; with its end we end")
    parser.add_argument("--zygote", type=int, help="where workers are asked for")
    given = parser.parse_args()
    tree.die_with_parent(os.getppid(), signal.SIGTERM)
    tree.become_subreaper()
    sockets = []
    for number in (given.channel, given.zygote):
        sockets.append(None if number is None else socket.socket(fileno=number))
        if (taken := sockets[-1]) is not None:
            taken.set_inheritable(False)
    config = AgentConfig.read(given.config)
    if sockets[0] is not None:
        return NodeAgent(config, given.node, supervisor=Channel(sockets[0]), requests=sockets[1]).run()
    return LoneAgent(config, given.node).run()


if __name__ == "__main__":
    sys.exit(main())
