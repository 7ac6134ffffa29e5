"""Runs one job on this machine: starts its processes and keeps them there, follows logs and progress, and tells."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_runtime.agent.environment import DEFAULTS
from elastic_runtime.agent.main_program import path_entry
from elastic_runtime.agent.requests import Program
from elastic_runtime.agent.zygote_handle import ZygoteHandle
from elastic_runtime.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from elastic_runtime.jobs.folder import JobFolder, write_json
from elastic_runtime.jobs.spec import JobSpec
from elastic_runtime.membership.secret import create_secret
from elastic_runtime.processes import tree
from elastic_runtime.supervisor.coordinator import CoordinatorHandle
from elastic_runtime.supervisor.logs import LogStream
from elastic_runtime.supervisor.node import NodeHandle
from elastic_runtime.supervisor.progress import Progress
from elastic_runtime.wording import counted

__all__ = ["LocalJob"]

_POLL = 0.05
_HEARTBEAT = 1.0
_LEAVE_PATIENCE = 3.0
"""Seconds beyond the grace in which agents must have ended; the guard's patience, 8 seconds, is longer than both."""
_SAME_SIGNAL = 1.0
"""Seconds in which a second signal is the first one again: torchx signals the group, and the guard passes it on."""
_MOST_COORDINATORS = 20
"""Coordinators that may be lost without a finished step between them."""
_EXIT_CODES = {"succeeded": EXIT_OK, "failed": EXIT_FAILED, "stopped": EXIT_INTERRUPTED}


@dataclass(frozen=True)
class _Done:
    state: str
    reason: str


class LocalJob:
    """One job: its coordinator, zygote and agents, its logs, and how it ends. What happens, the coordinator decides."""

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
        self._nodes: dict[str, NodeHandle] = {}
        self._wanted: list[str] = [str(node) for node in range(spec.nodes.maximum)]
        self._not_before: dict[str, float] = {}
        self._selector = selectors.DefaultSelector()
        self._stream = LogStream(limit=log_limit)
        self._progress = Progress(folder.path / "metrics.jsonl")
        self._wake: socket.socket | None = None
        self._done: _Done | None = None
        self._signalled: float | None = None
        self._last_turn = self._last_beat = time.monotonic()
        self._behind = False
        self._started = time.time()
        self._largest_world = 0
        self._round = -1
        self._restarts = 0
        self._told_progress: tuple[int, int] | None = None
        self._copy: dict[str, Any] | None = None
        """What the coordinator after this one should know, in case that no agent is left to tell it."""
        self._step_at_loss = -1
        self._lost_in_a_row = 0
        secret = folder.path / "secret"
        for stale in (secret, folder.path / "leader"):
            stale.unlink(missing_ok=True)
        self._coordinator = CoordinatorHandle(
            folder.path / "coordinator.json", folder.logs / "coordinator.log", create_secret(secret),
            self._selector, self._on_coordinator,
        )  # fmt: skip
        program = Program(
            script=spec.program.script,
            module=spec.program.module,
            environment={**DEFAULTS, **os.environ, **spec.environment},
            cwd=os.getcwd(),  # noqa: PTH109 - as the environment has it
        )
        self._zygote = ZygoteHandle(
            folder.logs / "zygote.log",
            preload=spec.preload,
            entry=path_entry(program),
            environment=program.environment,
        )

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
        try:
            try:
                # Before all else, for its imports take longer than everything until the first step.
                self._zygote.start()
                self._configure()
                self._coordinator.start()
                if said:
                    self._tell("earlier", said)
                while self._done is None:
                    self._turn()
            except OSError as error:
                # A full disk, no process or descriptor left: the job cannot be led any more, and says so.
                self._done = _Done("failed", f"the supervisor cannot go on: {error}")
            return self._finish(self._done)
        finally:
            self._shut_down()

    def _configure(self) -> None:
        """Write what coordinator and agents are to know."""
        # Here, while the zygote is under way: these imports are a third of this process's.
        from elastic_runtime.agent.config import AgentConfig
        from elastic_runtime.membership.coordinator import CoordinatorConfig

        spec, path = self._spec, self._folder.path
        secret = str(path / "secret")
        CoordinatorConfig(
            name=self._name, nodes=str(spec.nodes), workers=spec.nodes.workers, max_restarts=spec.max_restarts,
            lock=str(path / "leader"), secret=secret, heartbeat=spec.heartbeat, wait_limit=spec.wait_limit,
        ).write(path / "coordinator.json")  # fmt: skip
        AgentConfig(
            name=self._name, program=spec.program, arguments=list(spec.arguments),
            environment=dict(spec.environment), workers=spec.nodes.workers, nodes=spec.nodes.maximum,
            max_restarts=spec.max_restarts, grace=spec.grace, job_dir=str(path),
            output_dir=spec.output_dir or str(path / "output"), coordinator=self._coordinator.address,
            secret=secret,
        ).write(path / "agent.json")  # fmt: skip

    def _turn(self) -> None:
        self._wait(0.0 if self._behind else _POLL)
        self._read_progress()
        self._behind = self._stream.pump()
        line = self._progress.show(self._restarts, round_=self._round)
        if line is not None:
            self._stream.say(line)
        self._keep_nodes()
        self._check_liveness()

    def _wait(self, timeout: float) -> None:
        ready = [key for key, _ in self._selector.select(timeout)]
        # Signals first: one to the whole group ends the agents too, and that is the job's end, not their loss.
        for key in sorted(ready, key=lambda key: key.fileobj is not self._wake):
            key.data()

    def _keep_nodes(self) -> None:
        """Start the agents that should be there and are not."""
        if self._done is not None:
            return
        now = time.monotonic()
        for node in self._wanted:
            if node not in self._nodes and now >= self._not_before.get(node, now):
                self._spawn(node)

    def _spawn(self, node: str) -> None:
        log = self._folder.logs / f"agent-{node}.log"
        handle = NodeHandle(
            node, log, config=self._folder.path / "agent.json", requests=self._zygote.requests
        )
        self._nodes[node] = handle
        self._selector.register(handle.channel, selectors.EVENT_READ, lambda: self._on_channel(handle))
        self._folder.event("agent", node=node, pid=handle.pid)

    def _check_liveness(self) -> None:
        """Kill what does not answer. A pause of this process itself is not held against the others."""
        now = time.monotonic()
        passed, self._last_turn = min(now - self._last_turn, 2 * _HEARTBEAT), now
        for said in self._zygote.watch(passed):
            self._tell("zygote", said)
        if said := self._coordinator.watch():
            self._on_coordinator_lost(said)
        tree.reap_others(self._children())
        if now - self._last_beat >= _HEARTBEAT:
            beat, self._last_beat = min(now - self._last_beat, 2 * _HEARTBEAT), now
            for handle in list(self._nodes.values()):
                if handle.silent(beat):
                    self._tell_hung(handle)

    def _on_coordinator_lost(self, said: str) -> None:
        self._tell("coordinator_lost", said)
        self._lost_in_a_row = self._lost_in_a_row + 1 if self._progress.step == self._step_at_loss else 1
        self._step_at_loss = self._progress.step
        if self._lost_in_a_row > _MOST_COORDINATORS:
            log = self._folder.logs / "coordinator.log"
            self._done = _Done("failed", f"{said}, for the {self._lost_in_a_row}th time in a row (see {log})")

    def _tell_hung(self, handle: NodeHandle) -> None:
        text = f"node {handle.node}: its agent no longer answers: killing it"
        self._tell("node_hung", text, node=handle.node)

    def _children(self) -> set[int]:
        found = {pid for pid in (self._zygote.pid, self._coordinator.pid) if pid is not None}
        # The keepers are our children once the zygote that forked them is gone.
        return found.union(*({handle.pid} | handle.keepers for handle in self._nodes.values()))

    def _read_progress(self) -> None:
        recovering = self._progress.recoveries and self._progress.recoveries[-1].seconds is None
        if (
            self._progress.read()
            and recovering
            and (recovery := self._progress.recoveries[-1]).seconds is not None
        ):
            again = counted(recovery.steps_lost or 0, "step")
            self._tell(
                "recovered",
                f"training again after {recovery.seconds:.{1 if recovery.seconds >= 1 else 3}f} s, {again} done again",
                **recovery.as_dict(),
                step=self._progress.line["step"],
            )
        self._tell_progress()

    def _tell_progress(self) -> None:
        """Tell the coordinator how far the job is, if it does not know."""
        now = (self._progress.step, self._progress.round)
        if now != self._told_progress and now[1] >= 0:
            self._told_progress = now
            self._coordinator.send("progress", step=now[0], round=now[1])

    # --- what coordinator, agents and signals say ----------------------------------------------------------------

    def _on_coordinator(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "welcome":
            self._folder.event("coordinator", pid=self._coordinator.pid, term=message["term"])
            self._told_progress = None
            self._tell_progress()
            if self._copy is not None:
                self._coordinator.send("copy", copy=self._copy)
        elif kind == "copy":
            self._copy = message["copy"]
        elif kind == "wanted":
            self._wanted = list(message["nodes"])
        elif kind == "state":
            self._round, self._restarts = message["round"], message["restarts"]
            self._largest_world = max(self._largest_world, message["world_size"])
        elif kind == "silent":
            handle = self._nodes.get(message["node"])
            if handle is not None and handle.pid == message["pid"]:
                self._tell_hung(handle)
                handle.kill()
        elif kind == "done":
            self._done = self._done or _Done(message["state"], message["reason"])
        elif kind == "event":
            self._on_event(message["event"], message["text"], message["details"])

    def _on_event(self, kind: str, text: str, details: dict[str, Any]) -> None:
        if details.get("member"):
            self._read_progress()
            cause = {
                "node_lost": f"node {details.get('node')} lost",
                "node_leaving": f"node {details.get('node')} left",
                "store_lost": "store host lost",
            }.get(kind, f"rank {details.get('rank')}: {details.get('cause', text)}")
            self._progress.failed(
                cause, time.time(), round_=details.get("round", -1),
                consequence=bool(details.get("consequence")),
            )  # fmt: skip
        self._tell(kind, text, **details)

    def _on_channel(self, handle: NodeHandle) -> None:
        try:
            for message in handle.channel.receive():
                handle.heard()
                if message["kind"] == "placed":
                    self._stream.rename(message["log"], message["rank"])
                elif message["kind"] == "started":
                    handle.keep(message["keepers"])
                    if message["log"] is not None:
                        self._stream.follow(message["log"], self._folder.log_of(message["log"]))
                        self._folder.event("worker", node=handle.node, rank=message["rank"],
                                           round=message["round"], pid=message["pid"])  # fmt: skip
        except EOFError:
            self._selector.unregister(handle.channel)
            handle.close()
            handle.wait(5.0)
            handle.end_keepers(5.0)
            del self._nodes[handle.node]
            tree.kill_descendants(5.0, keep=self._children())
            # The coordinator sees the loss as well, and may want the node later or not at all.
            self._not_before[handle.node] = time.monotonic() + _POLL

    def _on_signals(self, received: bytes) -> None:
        for number in received:
            if number in (signal.SIGUSR1, signal.SIGUSR2):
                for handle in self._nodes.values():
                    os.kill(handle.pid, number)
            elif self._signalled is None:
                self._signalled = time.monotonic()
                self._done = self._done or _Done("stopped", f"{signal.Signals(number).name} received")
            elif time.monotonic() - self._signalled >= _SAME_SIGNAL:
                for handle in self._nodes.values():
                    handle.send("leave", grace=0.0)

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
            "coordinator": list(self._coordinator.address),
            "program": {"script": program.script, "module": program.module, "sha256": program.sha256()},
            "arguments": list(self._spec.arguments),
            "nodes": str(self._spec.nodes),
            "workers_per_node": self._spec.nodes.workers,
            "max_restarts": self._spec.max_restarts,
            "started": self._started,
        }

    def _finish(self, done: _Done) -> int:
        self._coordinator.send("stop", reason=done.reason)
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
                    "global_step": self._progress.now,
                    "world_size": self._largest_world,
                    "restarts": min(self._restarts, self._spec.max_restarts),
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
        self._coordinator.close()
        self._zygote.close()
        self._selector.close()
        for name in ("secret", "agent.json", "coordinator.json", "leader"):
            Path(self._folder.path / name).unlink(missing_ok=True)
