"""The coordinator of torchrun's agents: `python -P -m elastic_runtime.membership.rendezvous_service --listen FD …`.

Agent to coordinator
    hello       node, run_id, minimum, maximum, round, rank, world, member: the first message of every connection
    join        store: [host, port] that the node offers for the next round; met  round; close; pong
Coordinator to agent
    proceed     round, rank, world, store; begin  round; again  round: see `rendezvous_rounds`
    state       waiting, closed, spare (it has had no place): whenever one of them has changed for this node
    refused     reason: this is not the coordinator of its job
    ping
It outlives the agent that started it, and ends when it has had no agent for two seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_runtime.membership.rendezvous_rounds import Again, Begin, Proceed, Reply, Rounds
from elastic_runtime.membership.secret import read_secret
from elastic_runtime.membership.server import Server
from elastic_runtime.membership.service import Transport
from elastic_runtime.membership.session import Peer

__all__ = ["RendezvousService", "main"]

_TICK = 0.1
_BEAT = 1.0
_LONELY = 2.0
"""Seconds without an agent after which it ends."""
_FIRST = 15.0
"""The same while there has not been one yet."""


class RendezvousService:
    """Handler of the server's connections (see `server.Handler`)."""

    def __init__(
        self, rounds: Rounds, *, run_id: str, heartbeat: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        """Lead the job `run_id`. An agent that says nothing for `heartbeat` seconds is taken for lost."""
        self.rounds = rounds
        self._run_id = run_id
        self._heartbeat = heartbeat
        self._clock = clock
        self._transport: Transport | None = None
        self._nodes: dict[int, str] = {}
        self._connections: dict[str, int] = {}
        self._told: dict[str, tuple[int, bool]] = {}
        self._last_tick = clock()
        self._paused = 0.0

    def attach(self, transport: Transport) -> None:
        """Use `transport` from now on."""
        self._transport = transport

    def on_open(self, connection: int, peer: Peer) -> None:
        """A client has proved itself; it says who it is next."""

    def on_message(self, connection: int, message: dict[str, Any]) -> None:
        """An authentic message came; one that makes no sense ends the connection."""
        try:
            self._on_message(connection, message)
        except (KeyError, TypeError, ValueError, IndexError):
            assert self._transport is not None
            self._transport.close(connection)

    def _on_message(self, connection: int, message: dict[str, Any]) -> None:
        kind, now = message["kind"], self._clock()
        if kind == "pong":
            return
        if kind == "hello":
            self._hello(connection, message, now)
            return
        node = self._nodes[connection]
        if kind == "join":
            host, port = message["store"]
            self._told[node] = (0, self._told[node][1])
            self._do(self.rounds.join(node, (str(host), int(port)), now))
        elif kind == "met":
            self._do(self.rounds.met(node, int(message["round"]), now))
        elif kind == "close":
            self.rounds.close()
            self._do([])
        else:
            raise ValueError("an agent says no such thing")

    def _hello(self, connection: int, message: dict[str, Any], now: float) -> None:
        assert self._transport is not None
        ours = (self._run_id, self.rounds.minimum, self.rounds.maximum)
        theirs = (str(message["run_id"]), int(message["minimum"]), int(message["maximum"]))
        if ours != theirs:
            what = "the coordinator there leads --rdzv-id {!r} with --nnodes {}:{}, this node has --rdzv-id {!r} with "
            reason = (what + "--nnodes {}:{}: give all nodes the same, or another port").format(
                *ours, *theirs
            )
            self._send(connection, {"kind": "refused", "reason": reason})
            self._transport.close(connection)
            return
        node = str(message["node"])
        place = {name: int(message[name]) for name in ("round", "rank", "world")}
        if (old := self._connections.get(node)) is not None:
            self._nodes.pop(old, None)
            self._transport.close(old)
        self._nodes[connection], self._connections[node] = node, connection
        self._told[node] = (0, False)
        self._do(self.rounds.connected(node, now, **place, member=bool(message["member"])))

    def on_close(self, connection: int, why: str) -> None:
        """The connection is gone."""
        node = self._nodes.pop(connection, None)
        if node is not None:
            del self._connections[node]
            self._do(self.rounds.lost(node, self._clock()))

    def tick(self) -> None:
        """Time went by; call it about ten times a second. A pause of this process is not held against the others."""
        now = self._clock()
        if now - self._last_tick > 1.0:
            self._paused = now + self._heartbeat
        self._last_tick = now
        self._do(self.rounds.tick(now))

    def beat(self) -> None:
        """Ask every agent for a word, and give up those that said none for too long. Call it every second or so."""
        now = self._clock()
        assert self._transport is not None
        for node, connection in list(self._connections.items()):
            heard = self._transport.last_heard(connection)
            if heard is not None and now - heard > self._heartbeat and now > self._paused:
                del self._connections[node], self._nodes[connection]
                self._transport.close(connection)
                self._do(self.rounds.lost(node, now))
            else:
                self._send(connection, {"kind": "ping"})

    def _do(self, replies: list[Reply]) -> None:
        for reply in replies:
            connection = self._connections.get(reply.node)
            if connection is None:
                continue
            match reply:
                case Proceed(round=number, rank=rank, world=world, store=store):
                    place = {"round": number, "rank": rank, "world": world, "store": list(store)}
                    self._send(connection, {"kind": "proceed", **place})
                case Begin(round=number):
                    self._told[reply.node] = (0, self._told[reply.node][1])
                    self._send(connection, {"kind": "begin", "round": number})
                case Again(round=number):
                    self._send(connection, {"kind": "again", "round": number})
        for node, waiting in self.rounds.all_waiting().items():
            state = (waiting, self.rounds.closed)
            if state != self._told.get(node) and (connection := self._connections.get(node)) is not None:
                self._told[node] = state
                self._state(connection, waiting)
        if self.rounds.closed:
            for node, connection in list(self._connections.items()):
                if not self._told[node][1]:
                    self._told[node] = (0, True)
                    self._state(connection, 0)

    def _state(self, connection: int, waiting: int) -> None:
        closed, spare = self.rounds.closed, self.rounds.is_spare(self._nodes[connection])
        self._send(connection, {"kind": "state", "waiting": waiting, "closed": closed, "spare": spare})

    def _send(self, connection: int, message: dict[str, Any]) -> None:
        assert self._transport is not None
        self._transport.send(connection, message)


async def _serve(given: argparse.Namespace) -> None:
    rounds = Rounds(given.minimum, given.maximum, now=time.monotonic(), last_call=given.last_call)
    service = RendezvousService(rounds, run_id=given.run_id, heartbeat=given.heartbeat)
    server = Server(socket.socket(fileno=given.listen), read_secret(given.secret), service)
    service.attach(server)
    server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    beat, lonely = 0.0, time.monotonic() + _FIRST
    while not stop.is_set():
        now = time.monotonic()
        if server.connections:
            lonely = now + _LONELY
        elif now >= lonely or rounds.closed:
            break
        service.tick()
        if now >= beat:
            beat = now + min(_BEAT, given.heartbeat / 4)
            service.beat()
        try:
            await asyncio.wait_for(stop.wait(), _TICK)
        except TimeoutError:
            continue
    await server.stop()


def main() -> int:
    """Lead the rounds until nobody is there any more."""
    parser = argparse.ArgumentParser(prog="rendezvous_service")
    parser.add_argument("--listen", type=int, required=True)
    parser.add_argument("--secret", type=Path, required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--minimum", type=int, required=True)
    parser.add_argument("--maximum", type=int, required=True)
    parser.add_argument("--last-call", type=float, required=True)
    parser.add_argument("--heartbeat", type=float, required=True)
    asyncio.run(_serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
