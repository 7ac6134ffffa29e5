"""Runs one job on this machine: the I/O around `rounds.RoundMachine`."""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from elastic_runtime.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from elastic_runtime.jobs.folder import JobFolder, tail, write_json
from elastic_runtime.jobs.spec import JobSpec
from elastic_runtime.processes import tree
from elastic_runtime.supervisor import rounds
from elastic_runtime.supervisor.environment import Place, worker_environment
from elastic_runtime.supervisor.logs import LogStream
from elastic_runtime.supervisor.node import NodeHandle
from elastic_runtime.supervisor.progress import Progress, counted
from elastic_runtime.supervisor.store import StoreHost

__all__ = ["LocalJob"]

_POLL = 0.05
_HEARTBEAT = 1.0
_STOP_PATIENCE = 15.0
"""Seconds beyond the grace in which a node must have stopped its workers; then its agent is killed."""
_LEAVE_PATIENCE = 3.0
"""The same at the end of the job; the guard's patience, 8 seconds, is longer than this and the usual grace."""
_SAME_SIGNAL = 1.0
"""Seconds in which a second signal is the first one again: torchx signals the group, and the guard passes it on."""
_EXIT_CODES = {"succeeded": EXIT_OK, "failed": EXIT_FAILED, "stopped": EXIT_INTERRUPTED}
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:\s?", re.MULTILINE)
_LAST_LINE = re.compile(r"[A-Za-z_][\w.]*(: .*)?$")
_WAYS_OUT = (1, 2)
"""Exit codes of `sys.exit("text")` and argparse: they explain themselves in the last line instead of a traceback."""


class LocalJob:
    """One job: its agents, its store, its logs, and how it ends."""

    def __init__(
        self, spec: JobSpec, folder: JobFolder, *, name: str, app_id: str = "", log_limit: int = 1 << 30
    ) -> None:
        """Prepare the job `name` in `folder`, which the caller has created and locked.

        `app_id` tells this run from an earlier one in the same folder.
        """
        self._app_id = app_id
        self._spec = spec
        self._folder = folder
        self._name = name
        self._machine = rounds.RoundMachine(spec.nodes, max_restarts=spec.max_restarts, now=time.monotonic())
        self._nodes: dict[int, NodeHandle] = {}
        self._store = StoreHost(folder.logs / "store.log")
        self._stream = LogStream(limit=log_limit)
        self._progress = Progress(folder.path / "metrics.jsonl")
        self._selector = selectors.DefaultSelector()
        self._log_starts: dict[int, int] = {}
        self._wake: socket.socket | None = None
        self._done: rounds.Done | None = None
        self._stop_by: float | None = None
        self._signalled: float | None = None
        self._last_turn = self._last_beat = time.monotonic()
        self._behind = False
        self._started = time.time()
        self._largest_world = 0

    def run(self) -> int:
        """Run the job to its end and return its exit code."""
        wake, waker = socket.socketpair()
        self._wake = wake
        for end in (wake, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda *_: None)
        # What a killed agent's workers leave behind comes to us, and is killed.
        tree.become_subreaper()
        self._selector.register(wake, selectors.EVENT_READ, lambda: self._on_signals(wake.recv(64)))
        said = self._folder.begin(self._description())
        if said:
            self._tell("earlier", said)
        try:
            try:
                self._do(self._machine.begin())
                while self._done is None:
                    self._turn()
            except OSError as error:
                # A full disk, no process or descriptor left: the job cannot be led any more, and says so.
                self._machine.stop("")
                self._done = rounds.Done("failed", f"the supervisor cannot go on: {error}")
            return self._finish(self._done)
        finally:
            self._shut_down()

    def _turn(self) -> None:
        self._wait(0.0 if self._behind else _POLL)
        self._read_progress()
        self._behind = self._stream.pump()
        line = self._progress.show(self._machine.restarts, round_=self._machine.round)
        if line is not None:
            self._stream.say(line)
        self._do(self._machine.tick(time.monotonic()))
        self._check_liveness()

    def _wait(self, timeout: float) -> None:
        ready = [key for key, _ in self._selector.select(timeout)]
        # Signals first: one to the whole group ends the agents too, and that is the job's end, not their loss.
        for key in sorted(ready, key=lambda key: key.fileobj is not self._wake):
            key.data()

    def _check_liveness(self) -> None:
        """Kill what does not answer. A pause of this process itself is not held against the others."""
        now = time.monotonic()
        passed, self._last_turn = min(now - self._last_turn, 2 * _HEARTBEAT), now
        how = self._store.lost(passed)
        if how:
            self._tell("store_lost", f"the store host {how}")
            actions = self._machine.store_lost(how)
            if actions:
                self._note_failure("store host lost")
            self._do(actions)
        tree.reap_others(self._children())
        if now - self._last_beat >= _HEARTBEAT:
            beat, self._last_beat = min(now - self._last_beat, 2 * _HEARTBEAT), now
            for handle in list(self._nodes.values()):
                if handle.silent(beat):
                    self._tell("node_hung", f"node {handle.node}: its agent no longer answers: killing it",
                               node=handle.node)  # fmt: skip
        if self._machine.phase != "stopping":
            self._stop_by = None
        elif self._stop_by is not None and now >= self._stop_by:
            self._stop_by = now + _STOP_PATIENCE
            for node in set(self._machine.active) & set(self._nodes):
                self._tell("node_hung", f"node {node}: its workers do not end: killing its agent", node=node)
                self._nodes[node].kill()

    def _children(self) -> set[int]:
        store = self._store.pid
        return {handle.pid for handle in self._nodes.values()} | ({store} if store is not None else set())

    def _read_progress(self) -> None:
        recovering = self._progress.recoveries and self._progress.recoveries[-1].seconds is None
        if self._progress.read():
            self._machine.progressed(self._progress.step, self._progress.round)
            if recovering and (recovery := self._progress.recoveries[-1]).seconds is not None:
                again = counted(recovery.steps_lost or 0, "step")
                self._tell(
                    "recovered",
                    f"training again after {recovery.seconds:.1f} s, {again} done again",
                    **recovery.as_dict(),
                    step=self._progress.line["step"],
                )

    # --- what the agents and signals say -----------------------------------------------------------------------

    def _on_channel(self, handle: NodeHandle) -> None:
        try:
            for message in handle.channel.receive():
                self._on_message(handle, message)
        except EOFError:
            self._selector.unregister(handle.channel)
            handle.close()
            handle.wait(5.0)
            del self._nodes[handle.node]
            tree.kill_descendants(5.0, keep=self._children())
            if self._machine.phase != "done":
                self._tell("node_lost", f"node {handle.node} lost: its agent is gone", node=handle.node)
                self._note_failure(f"node {handle.node} lost")
            self._do(self._machine.node_lost(handle.node, time.monotonic()))

    def _on_message(self, handle: NodeHandle, message: dict[str, Any]) -> None:
        now = time.monotonic()
        kind = message["kind"]
        handle.heard()
        if kind == "ready":
            self._do(self._machine.node_ready(handle.node, now))
        elif kind == "stopped":
            self._do(self._machine.node_stopped(handle.node, now))
        elif kind == "leaving":
            if self._machine.phase != "done":
                self._tell("node_leaving", f"node {handle.node} leaves: {message['signal']} received",
                           node=handle.node)  # fmt: skip
            actions = self._machine.node_leaving(handle.node, now)
            if actions:
                self._note_failure(f"node {handle.node} left")
            self._do(actions)
        elif kind == "started":
            self._folder.event("workers", node=handle.node, round=message["round"], pids=message["pids"])
        elif kind == "exited" and message["round"] == self._machine.round:
            self._on_worker_exit(handle.node, message, now)

    def _on_worker_exit(self, node: int, message: dict[str, Any], now: float) -> None:
        rank, code = message["rank"], message["code"]
        failure = None
        if code != 0:
            self._read_progress()
            error = message.get("error") or self._last_error(rank, code)
            failure = rounds.Failure(node=node, rank=rank, code=code, message=error, step=self._progress.step)
            told = self._machine.phase == "running" or not failure.is_consequence
            if told and self._machine.is_failure(failure):
                text = f"rank {rank} on node {node}: {failure.cause} after step {failure.step}"
                self._tell("worker_failed", text, node=node, rank=rank, code=code, cause=failure.cause,
                           step=failure.step)  # fmt: skip
            if self._machine.is_failure(failure):
                self._note_failure(f"rank {rank}: {failure.cause}", consequence=failure.is_consequence)
        self._do(self._machine.worker_exited(failure, node=node, rank=rank, now=now))

    def _note_failure(self, cause: str, *, consequence: bool = False) -> None:
        if self._machine.phase in ("running", "stopping"):
            self._progress.failed(cause, time.time(), round_=self._machine.round, consequence=consequence)

    def _last_error(self, rank: int, code: int) -> str:
        """Return the last line of the traceback that ends the rank's log of this round, if there is one.

        Without one, a worker that ended by `sys.exit` is taken to have said why in its last line.
        """
        path = self._folder.log_of(rank)
        start = self._log_starts.get(rank, 0)
        size = path.stat().st_size if path.exists() else 0
        text = tail(path, min(1 << 16, max(0, size - start)))
        # torch puts the rank before each line of a traceback once a process group exists.
        text = _RANK_PREFIX.sub("", text)
        trace = text.rfind("Traceback (most recent call last):")
        if trace < 0:
            words = text.split("\n") if code in _WAYS_OUT else []
            last = next((line.strip()[-500:] for line in reversed(words) if line.strip()), "")
            return f"exit code {code}, last line: {last}" if last else ""
        lines = [line for line in text[trace:].splitlines()[1:] if _LAST_LINE.match(line)]
        return lines[-1].strip()[:500] if lines else ""

    def _on_signals(self, received: bytes) -> None:
        for number in received:
            if number in (signal.SIGUSR1, signal.SIGUSR2):
                for handle in self._nodes.values():
                    os.kill(handle.pid, number)
            elif self._signalled is None:
                self._signalled = time.monotonic()
                self._do(self._machine.stop(f"{signal.Signals(number).name} received"))
            elif time.monotonic() - self._signalled >= _SAME_SIGNAL:
                for handle in self._nodes.values():
                    handle.send("leave", grace=0.0)

    # --- what to do --------------------------------------------------------------------------------------------

    def _do(self, actions: Iterable[rounds.Action]) -> None:
        for action in actions:
            match action:
                case rounds.Spawn(node):
                    self._spawn(node)
                case rounds.Start(number, groups):
                    self._start(number, dict(groups))
                case rounds.Stop(nodes):
                    self._stop_by = time.monotonic() + self._spec.grace + _STOP_PATIENCE
                    for node in nodes:
                        if node in self._nodes:
                            self._nodes[node].send("stop", grace=self._spec.grace)
                case rounds.Pause(_, seconds, cause):
                    self._tell(
                        "pause",
                        f"waiting {seconds:.0f} s before the next try: {cause} again",
                        seconds=seconds,
                    )
                case rounds.Done():
                    self._done = action

    def _spawn(self, node: int) -> None:
        handle = NodeHandle(node, self._folder.logs / f"agent-{node}.log", grace=self._spec.grace)
        self._nodes[node] = handle
        self._selector.register(handle.channel, selectors.EVENT_READ, lambda: self._on_channel(handle))
        self._folder.event("agent", node=node, pid=handle.pid)

    def _start(self, number: int, groups: dict[int, int]) -> None:
        host, port = self._store.new_store()
        world = self._machine.world_size
        self._largest_world = max(self._largest_world, world)
        if not self._store.alive():
            self._tell("store_lost", "the store host did not start; trying again")
        workers = self._spec.nodes.workers
        for node, group in groups.items():
            assigned = []
            for local_rank in range(workers):
                rank = group * workers + local_rank
                log = self._folder.log_of(rank)
                self._log_starts[rank] = log.stat().st_size if log.exists() else 0
                self._stream.follow(rank, log)
                assigned.append(
                    {
                        "rank": rank,
                        "local_rank": local_rank,
                        "command": [sys.executable, *self._spec.program.command(), *self._spec.arguments],
                        "environment": worker_environment(
                            self._spec,
                            self._folder,
                            place=Place(
                                number=number, group=group, rank=rank, local_rank=local_rank, world=world
                            ),
                            name=self._name,
                            store=(host, port),
                        ),
                        "log": str(log),
                    }
                )
            self._nodes[node].send("start", round=number, workers=assigned)
        self._tell(
            "round",
            f"round {number}: {counted(world, 'worker')} on {counted(len(groups), 'node')}",
            round=number,
            world_size=world,
        )

    # --- how it is told ----------------------------------------------------------------------------------------

    def _tell(self, kind: str, text: str, **details: Any) -> None:
        self._folder.event(kind, text=text, **details)
        self._stream.pump()
        self._stream.say(f"[elastic] {text}")

    def _description(self) -> dict[str, Any]:
        program = self._spec.program
        return {
            "name": self._name,
            "app_id": self._app_id,
            "pid": os.getpid(),
            "program": {"script": program.script, "module": program.module, "sha256": program.sha256()},
            "arguments": list(self._spec.arguments),
            "nodes": str(self._spec.nodes),
            "workers_per_node": self._spec.nodes.workers,
            "max_restarts": self._spec.max_restarts,
            "started": self._started,
        }

    def _finish(self, done: rounds.Done) -> int:
        for handle in self._nodes.values():
            handle.send("leave", grace=self._spec.grace)
        deadline = time.monotonic() + self._spec.grace + _LEAVE_PATIENCE
        while self._nodes and time.monotonic() < deadline:
            self._wait(0.0 if self._behind else _POLL)
            self._behind = self._stream.pump()
        for handle in self._nodes.values():
            handle.kill()
            handle.wait(1.0)
        self._read_progress()
        code = _EXIT_CODES[done.state]
        ended = time.time()
        text = f"job {done.state}: {done.reason}"
        with suppress(OSError):  # The record below says the same, and whether the disk is full.
            self._folder.event("ended", text=text, state=done.state)
        try:
            write_json(
                self._folder.record_file,
                {
                    "name": self._name,
                    "app_id": self._app_id,
                    "state": done.state,
                    "reason": done.reason,
                    "exit_code": code,
                    "global_step": self._progress.step,
                    "world_size": self._largest_world,
                    "restarts": min(self._machine.restarts, self._spec.max_restarts),
                    "max_restarts": self._spec.max_restarts,
                    "started": self._started,
                    "ended": ended,
                    "seconds": ended - self._started,
                    "recoveries": [recovery.as_dict() for recovery in self._progress.recoveries],
                    "events": self._folder.events(),
                },
            )
        finally:
            # After the record, for it may be much.
            self._stream.drain()
        self._stream.say(f"[elastic] {text}")
        return code

    def _shut_down(self) -> None:
        for handle in self._nodes.values():
            handle.close()
            handle.wait(2.0)
        self._store.close()
        self._selector.close()
