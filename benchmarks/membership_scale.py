"""What a round costs with 64 to 1,024 nodes: the coordinator in one process, the agents' ends of it in another.

The coordinator is the real one (`Membership`, `Service` and `Server`), the agents speak its authenticated protocol
over real sockets and answer at once, as agents with workers that recover in place do; what is measured is membership
alone. For N nodes:

- `form_N_s`: from the first node's `join` to the last node's `go`, with the handshakes of all but the first;
- `reform_N_s`: a node's connection breaks; until the last survivor has the `go` of the next round;
- `rejoin_N_s`: that node connects again, with no process left; until the last node has its `go`;
- `messages_per_node_N`, `bytes_per_node_N`: what forming took, in both directions, handshake and TCP payload included;
- `reform_messages_per_node_N`, `reform_bytes_per_node_N`: the same for re-forming.

The rival is torch's `DynamicRendezvousHandler` with the c10d store: N handlers in threads, as far as it follows in
`RIVAL_LIMIT` seconds. Its handlers are connected before its clock starts. For its re-forming one handler's process
is killed and all others are told in the same moment, which favours it: torchrun has to find out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import secrets
import selectors
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from _c10d_rounds import RIVAL_LIMIT, rival
from _harness import Result, options

from elastic_runtime.jobs.nodes import NodeRange
from elastic_runtime.membership.connection import Connection
from elastic_runtime.membership.machine import Membership
from elastic_runtime.membership.server import Server
from elastic_runtime.membership.service import Service
from elastic_runtime.membership.sockets import listen, raise_descriptor_limit

SIZES = (64, 128, 256, 512, 1024)
RIVAL_FORMS = (64, 128, 256)
RIVAL_REFORMS = (64,)
LIMIT = 60.0
"""Seconds after which a try of ours counts as hung."""
_TCP_INFO = "=8B24I4Q"
"""The part of the kernel's `struct tcp_info` that ends with tcpi_bytes_acked and tcpi_bytes_received."""


# --- the coordinator's process ------------------------------------------------------------------------------------


async def lead(listener: socket.socket, secret: bytes, nodes: int) -> None:
    """Lead one job of up to `nodes` nodes that come by themselves, until standard input ends."""
    machine = Membership(
        NodeRange(minimum=1, maximum=nodes), max_restarts=10, now=time.monotonic(), managed=False
    )
    service = Service(machine, name="scale", heartbeat=30.0)
    server = Server(listener, secret, service)
    service.attach(server)
    server.start()
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, over.set)
    beat = 0.0
    while not over.is_set():
        service.tick()
        if time.monotonic() >= beat:
            beat = time.monotonic() + 1.0
            service.beat()
        try:
            await asyncio.wait_for(over.wait(), 0.1)
        except TimeoutError:
            continue
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"cpu": used.ru_utime + used.ru_stime, "memory": used.ru_maxrss * 1024}), flush=True)


@contextmanager
def coordinator(nodes: int) -> Iterator[tuple[tuple[str, int], bytes, dict[str, Any]]]:
    """Run a coordinator; yields its address, the secret, and a dictionary that holds what it used after its end."""
    secret, used = secrets.token_bytes(32), {}
    with listen() as listener:
        address = listener.getsockname()[:2]
        process = subprocess.Popen(
            [sys.executable, __file__, "--coordinator", str(nodes), "--listen", str(listener.fileno())],
            pass_fds=(listener.fileno(),), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert process.stdin is not None
    try:
        process.stdin.write(secret.hex() + "\n")
        process.stdin.flush()
        yield address, secret, used
        out, _ = process.communicate("", timeout=LIMIT)
        used.update(json.loads(out))
    finally:
        process.kill()
        process.wait()


# --- the agents' process ------------------------------------------------------------------------------------------


class Agent:
    """A node as the coordinator sees it: one worker that recovers in place and is always ready at once."""

    def __init__(self, fleet: Fleet, name: str, address: tuple[str, int], secret: bytes) -> None:
        """Begin to connect."""
        self.fleet, self.name = fleet, name
        self.messages = 0
        self.round = self.rank = -1
        self.gone_at = 0.0
        """When its newest `go` came."""
        self.fresh, self.stores = True, 0
        self.worker: dict[str, int] = {}
        self.connection = Connection(address, secret, role="agent", info={"node": name}, timeout=LIMIT)

    def say(self, kind: str, **details: Any) -> None:
        """Send a message."""
        self.messages += 1
        self.connection.send({"kind": kind, **details})

    def hear(self, message: dict[str, Any]) -> None:
        """Answer as an agent does."""
        self.messages += 1
        kind = message["kind"]
        if kind == "ping":
            self.say("pong")
        elif kind == "welcome":
            self.fleet.joined_at = self.fleet.joined_at or time.monotonic()
            self.say(
                "join", node=self.name, pid=os.getpid(), host="simulated", workers=1, store=self._store(),
                fingerprint={"script": "0" * 64, "torch": "2.13.0"}, running=[], copy=None,
            )  # fmt: skip
        elif kind == "start":
            (place,) = message["places"]
            self.worker = {"slot": place["slot"], "spawn": place["spawn"]}
            self.say("started", **self.worker, pid=os.getpid())
            self.say("hello", **self.worker)
            self._ready(told=-1)
            self._renew(message["store"])
        elif kind == "change":
            self._ready(told=message["round"])
        elif kind == "go":
            (place,) = message["places"]
            self.round, self.rank, self.fresh = message["round"], place["rank"], False
            self.gone_at = time.monotonic()
            self._renew(message["store"])
            self.say("joined", **self.worker, round=self.round)
        elif kind != "copy":
            raise SystemExit(f"node {self.name}: did not expect {message}")

    def _ready(self, *, told: int) -> None:
        step = 0 if self.fresh else 100 + self.round
        self.say("ready", **self.worker, step=step, torn=False, fresh=self.fresh, round=self.round, told=told)

    def _store(self) -> list[Any]:
        return [f"host-{self.name}", 20_000 + self.stores]

    def _renew(self, used: list[Any]) -> None:
        if used == self._store():
            self.stores += 1
            self.say("store", store=self._store())

    def bytes(self) -> int:
        """Return the bytes of TCP payload that went over its connection so far, in both directions."""
        size = struct.calcsize(_TCP_INFO)
        with socket.socket(fileno=os.dup(self.connection.fileno())) as same:
            info = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
        return sum(struct.unpack(_TCP_INFO, info)[-2:])


class Fleet:
    """All simulated agents in one loop."""

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        """Prepare."""
        self.address, self.secret = address, secret
        self.selector = selectors.EpollSelector()
        self.agents: dict[str, Agent] = {}
        self.joined_at = 0.0
        """When the first `join` since it was set to 0 was sent."""

    def add(self, name: str) -> None:
        """Connect a node."""
        agent = self.agents[name] = Agent(self, name, self.address, self.secret)
        self.selector.register(agent.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, agent)

    def kill(self, agent: Agent) -> float:
        """End a node's connection as the death of its process does; return when."""
        del self.agents[agent.name]
        self.selector.unregister(agent.connection)
        now = time.monotonic()
        agent.connection.close()
        return now

    def until_round(self, number: int, size: int) -> float:
        """Serve until every agent has its place in round `number` of `size` nodes; return when the last one got it."""
        deadline = time.monotonic() + LIMIT
        missing = {name for name, agent in self.agents.items() if agent.round < number}
        while missing:
            if time.monotonic() > deadline:
                raise SystemExit(f"{len(missing)} of {size} nodes have no place in round {number}")
            for agent in self.serve():
                if agent.round >= number:
                    missing.discard(agent.name)
        assert {agent.rank for agent in self.agents.values()} == set(range(size)), (
            "the ranks of a round are 0 …"
        )
        assert {agent.round for agent in self.agents.values()} == {number}
        return max(agent.gone_at for agent in self.agents.values())

    def serve(self) -> list[Agent]:
        """Do what there is to do; return the agents that something happened to."""
        heard = []
        for key, events in self.selector.select(0.1):
            agent: Agent = key.data
            connection = agent.connection
            if events & selectors.EVENT_WRITE:
                connection.on_writable()
            if events & selectors.EVENT_READ:
                connection.on_readable()
            for message in connection.messages():
                agent.hear(message)
            if connection.closed is not None:
                raise SystemExit(f"node {agent.name}: {connection.closed}")
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_write else 0)
            if wanted != key.events:
                self.selector.modify(connection, wanted, agent)
            heard.append(agent)
        return heard

    def traffic(self) -> tuple[int, int]:
        """Return the messages and bytes of all nodes so far."""
        agents = self.agents.values()
        return sum(agent.messages for agent in agents), sum(agent.bytes() for agent in agents)

    def close(self) -> None:
        """Hang up."""
        for agent in list(self.agents.values()):
            self.kill(agent)
        self.selector.close()


def measure(nodes: int, changes: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Form a round of `nodes` nodes, then lose and regain a node `changes` times: figures of one coordinator."""
    with coordinator(nodes) as (address, secret, used):
        with closing(Fleet(address, secret)) as fleet:
            for number in range(nodes):
                fleet.add(f"node-{number}")
            form = fleet.until_round(0, nodes) - fleet.joined_at
            messages, size = fleet.traffic()
            figures = {"form": form, "messages": messages / nodes, "bytes": size / nodes}
            reforms, rejoins, told, sent = [], [], [], []
            for change in range(changes):
                # Rank 0 holds the store of the round, so its loss is the dearest: it is the first.
                rank = change * nodes // changes
                victim = next(agent for agent in fleet.agents.values() if agent.rank == rank)
                settle(fleet)
                killed = fleet.kill(victim)
                before = fleet.traffic()
                reforms.append(fleet.until_round(2 * change + 1, nodes - 1) - killed)
                after = fleet.traffic()
                told.append((after[0] - before[0]) / (nodes - 1))
                sent.append((after[1] - before[1]) / (nodes - 1))
                fleet.joined_at = 0.0
                fleet.add(victim.name)
                rejoins.append(fleet.until_round(2 * change + 2, nodes) - fleet.joined_at)
            figures |= {"reform": statistics.median(reforms), "reform_worst": max(reforms)}
            figures |= {"rejoin": statistics.median(rejoins)}
            figures |= {"reform_messages": statistics.median(told), "reform_bytes": statistics.median(sent)}
    return figures, used


def settle(fleet: Fleet) -> None:
    """Let what is still under way arrive: until nothing happened for a tenth of a second."""
    while fleet.serve():
        pass


# --- both ---------------------------------------------------------------------------------------------------------


def main() -> None:
    """Measure both sides, print a table and the figures."""
    arguments = options(__doc__ or "", repeats=5, quick=1)
    raise_descriptor_limit()
    result = Result("membership_scale")
    rows = [("nodes", "form", "reform", "worst", "rejoin", "messages", "bytes", "reform", "bytes", "coordinator CPU",
             "c10d form", "c10d reform")]  # fmt: skip
    stopped = False
    for nodes in SIZES:
        tries = []
        for _ in range(arguments.repeats):
            figures, used = measure(nodes, changes=3)
            tries.append(figures)
        best = {name: statistics.median(one[name] for one in tries) for name in tries[0]}
        for name in ("form", "reform", "rejoin"):
            result.figures[f"{name}_{nodes}_s"] = best[name]
        result.figures[f"reform_worst_{nodes}_s"] = max(one["reform_worst"] for one in tries)
        for name in ("messages", "bytes", "reform_messages", "reform_bytes"):
            result.figures[f"{name}_per_node_{nodes}"] = round(best[name], 1)
        form = reform = None
        follows = nodes in RIVAL_FORMS and not stopped and not (arguments.quick and nodes > SIZES[0])
        if follows:
            form, reform = rival(nodes, reform=nodes in RIVAL_REFORMS and not arguments.quick)
            stopped = form is None
            for name, value in (("form", form), ("reform", reform)):
                if value is not None:
                    result.figures[f"c10d_{name}_{nodes}_s"] = value
        rows.append(
            (
                f"{nodes:,}", _seconds(best["form"]), _seconds(best["reform"]),
                _seconds(result.figures[f"reform_worst_{nodes}_s"]), _seconds(best["rejoin"]),
                f"{best['messages']:.1f}", f"{best['bytes']:.0f}", f"{best['reform_messages']:.1f}",
                f"{best['reform_bytes']:.0f}", _seconds(used["cpu"]),
                (f"> {RIVAL_LIMIT:.0f} s" if stopped else _seconds(form)) if follows else "–",
                _seconds(reform) if follows else "–",
            )
        )  # fmt: skip
        print(f"{nodes} nodes measured", file=sys.stderr)
    largest, smallest = SIZES[-1], SIZES[0]
    result.figures["form_growth"] = (
        result.figures[f"form_{largest}_s"] / result.figures[f"form_{smallest}_s"]
    ) / (largest / smallest)
    result.figures["reform_growth"] = (
        result.figures[f"reform_{largest}_s"] / result.figures[f"reform_{smallest}_s"]
    ) / (largest / smallest)
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print(
        "messages and bytes are those of one node; growth: 1 is linear from the smallest to the largest job"
    )
    if stopped:
        print(f"c10d did not form its largest round here within {RIVAL_LIMIT:.0f} s")
    result.show(as_json=arguments.json, repeats=arguments.repeats)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f} s"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--coordinator"]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--coordinator", type=int)
        parser.add_argument("--listen", type=int)
        given = parser.parse_args()
        key = bytes.fromhex(os.read(0, 65).decode().strip())
        profile = os.environ.get("MEMBERSHIP_SCALE_PROFILE")
        if profile:
            import cProfile

            with cProfile.Profile() as profiler:
                asyncio.run(lead(socket.socket(fileno=given.listen), key, given.coordinator))
            profiler.dump_stats(Path(profile))
        else:
            asyncio.run(lead(socket.socket(fileno=given.listen), key, given.coordinator))
    else:
        main()
