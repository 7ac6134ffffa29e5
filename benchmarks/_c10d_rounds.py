"""The rival of `membership_scale.py`: torch's `DynamicRendezvousHandler` with the c10d store.

N handlers in threads of three processes, for each costs two connections and a thread: the last process holds one
handler, and is killed for the re-forming. `python _c10d_rounds.py PORT FIRST COUNT NODES` is one of these processes.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

__all__ = ["RIVAL_LIMIT", "rival"]

RIVAL_LIMIT = 75.0
"""Seconds in which a round must come about."""
LIMIT = 60.0
"""Seconds in which the processes must have started and connected."""


def run_handlers(port: int, first: int, count: int, nodes: int) -> None:
    """Be `count` of the rival's nodes, in a thread each; every line on standard input is one more rendezvous."""
    from concurrent.futures import ThreadPoolExecutor

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    def make(number: int) -> RendezvousHandler:
        return get_rendezvous_handler(
            RendezvousParameters(
                "c10d", f"127.0.0.1:{port}", "scale", 1, nodes, local_addr="127.0.0.1", is_host=number == 0
            )
        )

    def meet(handler: RendezvousHandler) -> float:
        handler.next_rendezvous()
        return time.monotonic()

    handlers = [make(first)]
    print("host", flush=True)
    sys.stdin.readline()
    handlers += [make(number) for number in range(first + 1, first + count)]
    print("made", flush=True)
    with ThreadPoolExecutor(count) as pool:
        for _ in sys.stdin:
            print(max(pool.map(meet, handlers)), flush=True)
    os._exit(0)  # Its keep-alive threads would go on for a while.


def rival(nodes: int, *, reform: bool) -> tuple[float | None, float | None]:
    """Return the rival's seconds to form a round of `nodes`, and to form the next one after a loss; None: too long."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    half = nodes // 2
    with ExitStack() as stack:
        groups = []
        for first, count in ((0, half), (half, nodes - half - 1), (nodes - 1, 1)):
            command = [sys.executable, __file__, str(port), str(first), str(count), str(nodes)]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            groups.append(process)
            hear([process], LIMIT)  # The first one holds the store.
        tell(groups)
        if hear(groups, LIMIT) is None:
            return None, None
        began = tell(groups)
        formed = hear(groups, RIVAL_LIMIT)
        if formed is None:
            return None, None
        form = max(map(float, formed)) - began
        if not reform:
            return form, None
        groups[-1].kill()
        began = tell(groups[:-1])
        again = hear(groups[:-1], RIVAL_LIMIT)
        return form, None if again is None else max(map(float, again)) - began


def tell(groups: list[subprocess.Popen[bytes]]) -> float:
    """Let them go on; return when."""
    now = time.monotonic()
    for process in groups:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    return now


def hear(groups: list[subprocess.Popen[bytes]], limit: float) -> list[str] | None:
    """Return the next line of each; None if one says nothing within `limit` seconds, or has ended."""
    deadline, lines = time.monotonic() + limit, []
    for process in groups:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return None
        line = process.stdout.readline().decode()
        if not line:
            return None
        lines.append(line)
    return lines


if __name__ == "__main__":
    run_handlers(*(int(word) for word in sys.argv[1:5]))
