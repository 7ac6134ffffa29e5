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
from contextlib import suppress
from pathlib import Path
from typing import Any

from elastic_runtime.agent.config import AgentConfig, fingerprint
from elastic_runtime.agent.environment import worker_environment
from elastic_runtime.agent.last_words import last_error, last_report
from elastic_runtime.agent.protocol import Channel
from elastic_runtime.agent.requests import Program
from elastic_runtime.agent.spawned import SpawnedWorker
from elastic_runtime.agent.stores import Stores
from elastic_runtime.agent.uplink import Uplink
from elastic_runtime.agent.warm import Ended, Failed, Gone, Lost, Refused, Started, WarmWorker
from elastic_runtime.agent.worker import Slot
from elastic_runtime.membership.actions import Place
from elastic_runtime.membership.members import Worker
from elastic_runtime.membership.secret import read_secret
from elastic_runtime.processes import tree

__all__ = ["NodeAgent"]

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
_WATCH = 0.5
"""Seconds between two looks at workers that are stopped, and at the store."""
_STOPPED_PATIENCE = 3.0
"""Seconds that a worker may be stopped (SIGSTOP) before it is killed: its peers wait for it."""
_LAST_WORDS = 1.0


class NodeAgent:
    """The workers of one node and the loop that watches them."""

    def __init__(
        self, config: AgentConfig, node: str, *, supervisor: Channel | None, requests: socket.socket | None
    ) -> None:
        """Serve the coordinator that `config` names. `supervisor` is whoever started this agent; with its end we end.

        `requests` is where the zygote is asked for workers; without it they are started by exec.
        """
        self._config = config
        self._node = node
        self._supervisor = supervisor
        self._requests = requests
        self._selector = selectors.DefaultSelector()
        self._slots: dict[int, Slot] = {}
        self._copy: dict[str, Any] | None = None
        self._fingerprint = fingerprint(config.program)
        logs = Path(config.job_dir) / "logs"
        self._logs = logs
        self._stores = Stores(logs / f"store-{node}.log", address=config.store_host, requests=requests)
        self._uplink = Uplink(
            config.coordinator, read_secret(Path(config.secret)), node=node, selector=self._selector,
            on_open=self._on_coordinator, on_message=self._on_order, on_close=self._on_coordinator_gone,
            silence=config.silence if supervisor is None else None,
        )  # fmt: skip
        self._leaving = ""
        """Why this agent ends; empty while it does not."""
        self._dismissed = False
        self._leave_by: float | None = None
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

    def _helpers(self) -> set[int]:
        """Return the processes of this agent that are no workers, and are collected by whoever started them."""
        return self._stores.processes

    def _patience(self) -> float:
        now = time.monotonic()
        moments = [self._watched + _WATCH]
        moments += [slot.kill_at for slot in self._slots.values() if slot.kill_at is not None]
        moments += [self._leave_by] if self._leave_by is not None else []
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

    def _begin(self, slot: Slot) -> None:
        """Start the process of a slot."""
        slot.channel, slot.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            log = os.open(slot.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                number = slot.theirs.fileno()
                if self._requests is not None:
                    slot.handle = WarmWorker(self._requests, slot.program, log=log, channel=number)
                else:
                    slot.handle = SpawnedWorker(slot.program, log=log, channel=number)
            finally:
                os.close(log)
        except OSError as error:
            slot.ended = (127, str(error))
            self._report_end(slot)
            return
        self._selector.register(slot.handle, selectors.EVENT_READ, lambda: self._on_process(slot))
        self._selector.register(slot.channel, selectors.EVENT_READ, lambda: self._on_worker(slot))
        if slot.handle.pid is not None:
            self._on_started(slot, slot.handle.pid)

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

    def _stop(self, slots: list[Slot], grace: float | None = None) -> None:
        """End workers politely: SIGTERM, after the grace SIGKILL. One that has not started never runs."""
        for slot in slots:
            slot.known.state = "ending"
            if slot.handle is not None and slot.handle.pid is None and slot.ended is None:
                if slot.handle.cancel():
                    slot.ended = (-signal.SIGTERM, "")
                    self._unregister(slot)
                    self._report_end(slot)
                    continue
                self._on_process(slot)
            if slot.handle is not None:
                slot.handle.send_signal(signal.SIGTERM)
                # A stopped worker (SIGSTOP) acts on no signal but these two.
                slot.handle.send_signal(signal.SIGCONT)
                self._kill_later(slot, self._config.grace if grace is None else grace)

    def _kill_later(self, slot: Slot, grace: float) -> None:
        when = time.monotonic() + grace
        slot.kill_at = when if slot.kill_at is None else min(slot.kill_at, when)

    def _kill(self, slot: Slot, why: str = "") -> None:
        slot.kill_at = None
        slot.said = slot.said or why
        if slot.handle is not None:
            slot.handle.send_signal(signal.SIGKILL)

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

    # --- workers -----------------------------------------------------------------------------------------------

    def _on_process(self, slot: Slot) -> None:
        """Something happened to a worker's process."""
        if self._slots.get(slot.slot) is not slot or slot.handle is None:
            return
        for event in slot.handle.read():
            match event:
                case Started(pid):
                    self._on_started(slot, pid)
                case Ended(code):
                    words = slot.said or (last_error(slot.log, slot.log_start, code) if code >= 0 else "")
                    slot.ended = (code, words)
                    self._say_end(slot)
                case Gone():
                    self._unregister(slot)
                    self._forget(slot)
                    return
                case Failed(error):
                    slot.ended = (127, error)
                    self._unregister(slot)
                    self._report_end(slot)
                    return
                case Refused() | Lost():
                    self._unregister(slot)
                    slot.close()
                    self._requests = None if event == Refused() else self._requests
                    self._begin(slot)
                    return

    def _on_started(self, slot: Slot, pid: int) -> None:
        if slot.theirs is not None:
            slot.theirs.close()  # Now only the worker has it: its end shows.
            slot.theirs = None
        slot.known.pid = pid
        self._uplink.send("started", **slot.identity, pid=pid)
        if self._supervisor is not None:
            keeper = slot.handle.keeper if slot.handle is not None else None
            place = {"rank": slot.known.rank, "round": slot.known.round, "log": slot.known.log}
            self._tell_supervisor("started", **place, pid=pid, keepers=[keeper] if keeper else [])
        if slot.known.state == "ending" and slot.handle is not None:
            slot.handle.send_signal(signal.SIGTERM)

    def _report_end(self, slot: Slot) -> None:
        """Tell of a worker's end, and forget it once a coordinator knows and nothing of it is left."""
        self._say_end(slot)
        self._forget(slot)

    def _say_end(self, slot: Slot) -> None:
        assert slot.ended is not None
        code, words = slot.ended
        # The budget depends on the step, and the coordinator hears of steps only now and then.
        step, round_ = (0, -1) if code == 0 else last_report(Path(self._config.job_dir) / "metrics.jsonl")
        self._uplink.send("exited", **slot.identity, code=code, message=words, step=step, round=round_)

    def _forget(self, slot: Slot) -> None:
        if self._slots.get(slot.slot) is slot and (self._uplink.is_open or self._leaving):
            del self._slots[slot.slot]
            slot.close()
        if not self._slots and self._requests is None:
            # What workers that we started ourselves left behind in sessions of their own; keepers do it for theirs.
            tree.kill_descendants(2.0, keep=self._helpers())

    def _drop(self, slot: Slot) -> None:
        self._unregister(slot)
        self._slots.pop(slot.slot, None)
        slot.close()

    def _unregister(self, slot: Slot) -> None:
        for source in (slot.handle, slot.channel):
            if source is not None:
                with suppress(KeyError, ValueError):
                    self._selector.unregister(source)

    def _on_worker(self, slot: Slot) -> None:
        """A worker said something on its channel."""
        try:
            for message in slot.hear():
                self._on_word(slot, message)
        except EOFError:
            if slot.channel is not None:
                with suppress(KeyError, ValueError):
                    self._selector.unregister(slot.channel)

    def _on_word(self, slot: Slot, message: dict[str, Any]) -> None:
        known, kind = slot.known, message.get("kind")
        with suppress(KeyError, TypeError, ValueError):
            if kind == "hello":
                known.in_place, known.state = True, "starting"
                known.rank = known.round = -1
                self._uplink.send("hello", **slot.identity)
                if not self._uplink.is_open:
                    slot.tell("coordinator", here=False)
            elif kind == "ready":
                known.state = "ready"
                known.step, known.torn, known.fresh = (
                    int(message["step"]),
                    bool(message["torn"]),
                    bool(message["fresh"]),
                )
                self._uplink.send(
                    "ready", **slot.identity, step=known.step, torn=known.torn, fresh=known.fresh,
                    round=int(message["round"]), told=int(message["told"]),
                )  # fmt: skip
            elif kind == "joined":
                known.joined, known.fresh, known.torn = True, False, False
                self._uplink.send("joined", **slot.identity, round=int(message["round"]))
            elif kind == "finished":
                known.state, known.step, known.fresh = "finished", int(message["step"]), False
                self._uplink.send("finished", **slot.identity, step=known.step)

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

    def _tell_supervisor(self, kind: str, **details: Any) -> None:
        if self._supervisor is not None:
            with suppress(OSError):
                self._supervisor.send(kind, **details)

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

    def _watch_stopped(self, slot: Slot, now: float) -> None:
        """Kill a worker that somebody stopped: its peers wait for it, and cannot know."""
        if slot.handle is not None and slot.handle.keeper is not None and tree.is_stopped(slot.handle.keeper):
            # It alone can say how the worker ended. Nobody but us has a use for it, so it is woken.
            with suppress(OSError):
                os.kill(slot.handle.keeper, signal.SIGCONT)
        if slot.handle is None or slot.handle.pid is None or not tree.is_stopped(slot.handle.pid):
            slot.stopped_since = None
        elif slot.stopped_since is None:
            slot.stopped_since = now
        elif now - slot.stopped_since >= _STOPPED_PATIENCE and slot.kill_at is None:
            self._kill(slot, f"stopped by a signal for {_STOPPED_PATIENCE:.0f} s, and killed for that")
