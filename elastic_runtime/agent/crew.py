"""The workers of a node: starting them, hearing them, ending them, and saying what they do."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from elastic_runtime.agent.config import AgentConfig
from elastic_runtime.agent.last_words import last_error, last_report
from elastic_runtime.agent.protocol import Channel
from elastic_runtime.agent.spawned import SpawnedWorker
from elastic_runtime.agent.stores import Stores
from elastic_runtime.agent.uplink import Uplink
from elastic_runtime.agent.warm import Ended, Failed, Gone, Lost, Refused, Started, WarmWorker
from elastic_runtime.agent.worker import Slot
from elastic_runtime.processes import tree

__all__ = ["Crew"]

_STOPPED_PATIENCE = 3.0
"""Seconds that a worker may be stopped (SIGSTOP) before it is killed: its peers wait for it."""


class Crew:
    """What an agent does with its workers, whoever tells it to."""

    _uplink: Uplink

    def __init__(
        self,
        config: AgentConfig,
        *,
        supervisor: Channel | None,
        requests: socket.socket | None,
        stores: Stores,
    ) -> None:
        """Have no workers yet. `requests` is where the zygote is asked for them; without it: by exec."""
        self._config = config
        self._supervisor = supervisor
        self._requests = requests
        self._stores = stores
        self._selector = selectors.DefaultSelector()
        self._slots: dict[int, Slot] = {}
        self._leaving = ""
        """Why this agent ends; empty while it does not."""

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

    # --- what they do ------------------------------------------------------------------------------------------

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

    def _helpers(self) -> set[int]:
        """Return the processes of this agent that are no workers, and are collected by whoever started them."""
        return self._stores.processes

    def _tell_supervisor(self, kind: str, **details: Any) -> None:
        if self._supervisor is not None:
            with suppress(OSError):
                self._supervisor.send(kind, **details)
