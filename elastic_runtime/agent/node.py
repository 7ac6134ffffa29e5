"""The agent of one node: it does what the coordinator says with its workers, and says what they do.

It keeps what a new coordinator must know, so that a coordinator's death costs nothing: the workers train on, and the
agent tells everything again to the one that comes next.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from pathlib import Path
from typing import Any

from elastic_runtime.agent.config import AgentConfig, fingerprint
from elastic_runtime.agent.crew import Crew
from elastic_runtime.agent.environment import worker_environment
from elastic_runtime.agent.protocol import Channel
from elastic_runtime.agent.requests import Program
from elastic_runtime.agent.stores import Stores
from elastic_runtime.agent.uplink import Uplink
from elastic_runtime.agent.worker import Slot
from elastic_runtime.membership.actions import Place
from elastic_runtime.membership.members import Worker
from elastic_runtime.membership.secret import read_secret
from elastic_runtime.processes import tree

__all__ = ["NodeAgent"]

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
_WATCH = 0.5
"""Seconds between two looks at workers that are stopped, and at the store."""
_LAST_WORDS = 1.0


class NodeAgent(Crew):
    """The workers of one node and the loop that watches them."""

    def __init__(
        self, config: AgentConfig, node: str, *, supervisor: Channel | None, requests: socket.socket | None
    ) -> None:
        """Serve the coordinator that `config` names. `supervisor` is whoever started this agent; with its end we end.

        `requests` is where the zygote is asked for workers; without it they are started by exec.
        """
        logs = Path(config.job_dir) / "logs"
        stores = Stores(logs / f"store-{node}.log", address=config.store_host, requests=requests)
        super().__init__(config, supervisor=supervisor, requests=requests, stores=stores)
        self._node = node
        self._copy: dict[str, Any] | None = None
        self._fingerprint = fingerprint(config.program)
        self._logs = logs
        self._uplink = Uplink(
            config.coordinator, read_secret(Path(config.secret)), node=node, selector=self._selector,
            on_open=self._on_coordinator, on_message=self._on_order, on_close=self._on_coordinator_gone,
            silence=config.silence if supervisor is None else None,
        )  # fmt: skip
        self._dismissed = False
        self._watched = time.monotonic()
        self._told_keepers: set[int] = set()

    def run(self) -> int:
        """Work until told to leave; return the exit code."""
        wake, waker = socket.socketpair()
        for end in (wake, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        self._selector.register(wake, selectors.EVENT_READ, lambda: self._on_signals(wake.recv(64)))
        if self._supervisor is not None:
            self._selector.register(self._supervisor, selectors.EVENT_READ, self._on_supervisor)
            self._supervisor.send("ready")
        try:
            while not (self._leaving and not self._slots):
                self._uplink.tick()
                for key, _ in self._selector.select(self._patience()):
                    key.data()
                self._on_time()
        finally:
            for slot in self._slots.values():
                slot.close()
            self._stores.close()
        signal.set_wakeup_fd(-1)
        # Who is told politely does not have to find out.
        self._uplink.flush(_LAST_WORDS)
        self._uplink.close()
        return 0

    def _patience(self) -> float:
        now = time.monotonic()
        moments = [self._watched + _WATCH]
        moments += [slot.kill_at for slot in self._slots.values() if slot.kill_at is not None]
        moments += [moment] if (moment := self._uplink.next_event) is not None else []
        return max(0.0, min(moments) - now)

    # --- the coordinator ---------------------------------------------------------------------------------------

    def _on_coordinator(self) -> None:
        self._join()
        for slot in self._slots.values():
            if slot.known.in_place:
                slot.tell("coordinator", here=True)

    def _on_coordinator_gone(self) -> None:
        """Tell workers that nobody can explain for now why a peer is gone: they wait for it."""
        for slot in self._slots.values():
            if slot.known.in_place:
                slot.tell("coordinator", here=False)

    def _join(self) -> None:
        """A coordinator is there: tell it everything."""
        for slot in self._slots.values():
            slot.known.pid = slot.handle.pid or 0 if slot.handle is not None else 0
        self._uplink.send(
            "join",
            node=self._node,
            pid=os.getpid(),
            host=socket.gethostname(),
            workers=self._config.workers,
            fingerprint=self._fingerprint,
            store=self._stores.next,
            running=[slot.known.as_dict() for slot in self._slots.values()],
            copy=self._copy,
        )
        if self._leaving and not self._dismissed:
            self._uplink.send("leaving", signal=self._leaving)
        for slot in list(self._slots.values()):
            if slot.ended is not None:
                self._report_end(slot)

    def _on_order(self, message: dict[str, Any]) -> None:
        """The coordinator wants something."""
        kind = message["kind"]
        if "copy" in message:
            self._copy = message["copy"]
        slots = [slot for number in message.get("slots", ()) if (slot := self._slots.get(number)) is not None]
        if kind == "ping":
            self._uplink.send("pong")
        elif kind == "start":
            self._start(message)
        elif kind == "go":
            self._go(message)
        elif kind == "change":
            for slot in slots:
                known = slot.known
                known.told = max(known.told, message["round"])
                known.at_once = known.at_once or not message["planned"]
                slot.tell("change", round=message["round"], planned=message["planned"])
        elif kind == "leave":
            for slot in slots:
                slot.known.state = "ending"
                slot.tell("leave")
                self._kill_later(slot, self._config.grace)
        elif kind == "release":
            for slot in slots:
                slot.tell("release")
        elif kind == "stop":
            self._stop(slots)
        elif kind == "kill":
            for slot in slots:
                self._kill(slot, "killed by its agent, as the coordinator said")
        elif kind == "dismiss":
            self._dismissed = True
            self._leave(message["reason"], self._config.grace)

    def _start(self, message: dict[str, Any]) -> None:
        store = (message["store"][0], int(message["store"][1]))
        for given in message["places"]:
            place = Place(**given)
            old = self._slots.get(place.slot)
            if old is not None:  # Its end has not been seen yet, or was not believed.
                self._drop(old)
            self._slots[place.slot] = self._new_slot(place, message["round"], store)
            self._begin(self._slots[place.slot])
        self._take_store(store)

    def _new_slot(self, place: Place, round_: int, store: tuple[str, int]) -> Slot:
        config = self._config
        known = Worker(node=self._node, slot=place.slot, spawn=place.spawn, state="training",
                       rank=place.rank, round=round_, log=place.log)  # fmt: skip
        program = Program(
            script=config.program.script,
            module=config.program.module,
            arguments=config.arguments,
            environment=worker_environment(config, place, round_=round_, store=store),
            cwd=os.getcwd(),  # noqa: PTH109 - as the environment has it
        )
        log = self._logs / f"rank-{place.log}.log"
        size = log.stat().st_size if log.exists() else 0
        return Slot(known=known, program=program, log=log, log_start=size)

    def _go(self, message: dict[str, Any]) -> None:
        store = (message["store"][0], int(message["store"][1]))
        self._take_store(store)
        common = {key: message[key] for key in ("round", "term", "store", "source")}
        for given in message["places"]:
            place = Place(**given)
            slot = self._slots.get(place.slot)
            if slot is None or slot.known.spawn != place.spawn:
                continue
            known = slot.known
            known.state, known.rank, known.round = "training", place.rank, message["round"]
            known.joined = known.at_once = False
            known.told = max(known.told, known.round)
            self._tell_supervisor("placed", log=known.log, rank=place.rank)
            slot.tell(
                "go", **common, rank=place.rank, local_rank=place.slot, world_size=place.world_size,
                group_rank=place.group_rank, group_world_size=place.group_world_size,
                local_world_size=place.local_world_size,
            )  # fmt: skip

    def _take_store(self, store: tuple[str, int]) -> None:
        """Serve the store of the round if it is ours, and offer one for the next."""
        if self._stores.use(store):
            self._uplink.send("store", store=self._stores.next)

    # --- stopping ----------------------------------------------------------------------------------------------

    def _leave(self, why: str, grace: float) -> None:
        """End this agent: its workers first, with `grace` seconds."""
        self._leaving = self._leaving or why
        self._stop(list(self._slots.values()), grace)

    def _leave_politely(self, why: str) -> None:
        """End this agent, told by a signal: workers that can leave at a step boundary do so first."""
        if self._leaving:
            return
        self._leaving = why
        self._uplink.send("leaving", signal=why)
        in_place = [slot for slot in self._slots.values() if slot.known.in_place and self._uplink.is_open]
        self._stop([slot for slot in self._slots.values() if slot not in in_place])
        for slot in in_place:
            self._kill_later(slot, self._config.grace)

    # --- supervisor, signals, time -----------------------------------------------------------------------------

    def _on_supervisor(self) -> None:
        assert self._supervisor is not None
        try:
            for message in self._supervisor.receive():
                if message["kind"] == "ping":
                    self._tell_supervisor("pong")
                elif message["kind"] == "leave":
                    self._dismissed = True
                    self._leave("the job ends", message["grace"])
        except EOFError:
            self._selector.unregister(self._supervisor)
            self._supervisor = None
            self._dismissed = True
            self._leave("the supervisor is gone", 0.0)

    def _on_signals(self, received: bytes) -> None:
        for number in received:
            if number in (signal.SIGUSR1, signal.SIGUSR2):
                for slot in self._slots.values():
                    if slot.handle is not None:
                        slot.handle.send_signal(signal.Signals(number))
            elif number == signal.SIGCHLD:
                handles = [slot.handle for slot in self._slots.values() if slot.handle is not None]
                tree.reap_others({handle.pid for handle in handles if handle.pid} | self._helpers())
            else:
                self._leave_politely(signal.Signals(number).name)

    def _on_time(self) -> None:
        now = time.monotonic()
        for slot in list(self._slots.values()):
            if slot.kill_at is not None and now >= slot.kill_at:
                self._kill(slot)
        if now - self._watched < _WATCH:
            return
        passed, self._watched = min(now - self._watched, 2 * _WATCH), now
        self._look_around(passed)
        for slot in self._slots.values():
            self._watch_stopped(slot, now)
        if how := self._stores.lost(passed):
            self._uplink.send("store_lost", how=how)
        if (keepers := self._stores.processes) != self._told_keepers:
            self._told_keepers = keepers
            none = {"rank": None, "round": None, "log": None, "pid": None}
            self._tell_supervisor("started", **none, keepers=sorted(keepers))

    def _look_around(self, seconds: float) -> None:
        """Do what else is to be done every half second; `seconds` have gone by."""
