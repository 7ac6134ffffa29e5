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
from typing import Any

from elastic_runtime.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from elastic_runtime.jobs.folder import JobFolder, tail, write_json
from elastic_runtime.jobs.spec import JobSpec
from elastic_runtime.supervisor import rounds
from elastic_runtime.supervisor.logs import LogStream
from elastic_runtime.supervisor.node import NodeHandle
from elastic_runtime.supervisor.progress import Progress
from elastic_runtime.supervisor.store import StoreHost

__all__ = ["LocalJob"]

_POLL = 0.05
_EXIT_CODES = {"succeeded": EXIT_OK, "failed": EXIT_FAILED, "stopped": EXIT_INTERRUPTED}
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:\s?", re.MULTILINE)
_LAST_LINE = re.compile(r"[A-Za-z_][\w.]*(: .*)?$")


class LocalJob:
    """One job: its agents, its store, its logs, and how it ends."""

    def __init__(self, spec: JobSpec, folder: JobFolder, *, name: str, log_limit: int = 1 << 30) -> None:
        """Prepare the job `name` in `folder`, which the caller has created and locked."""
        self._spec = spec
        self._folder = folder
        self._name = name
        self._machine = rounds.RoundMachine(spec.nodes, max_restarts=spec.max_restarts, now=time.monotonic())
        self._nodes: dict[int, NodeHandle] = {}
        self._store = StoreHost(folder.logs / "store.log")
        self._stream = LogStream(limit=log_limit)
        self._progress = Progress(folder.path / "metrics.jsonl")
        self._selector = selectors.DefaultSelector()
        self._ranks: dict[int, list[int]] = {}
        self._log_starts: dict[int, int] = {}
        self._done: rounds.Done | None = None
        self._started = time.time()
        self._largest_world = 0

    def run(self) -> int:
        """Run the job to its end and return its exit code."""
        wake, waker = socket.socketpair()
        for end in (wake, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda *_: None)
        self._selector.register(wake, selectors.EVENT_READ, lambda: self._on_signals(wake.recv(64)))
        said = self._folder.begin(self._description())
        if said:
            self._tell("earlier", said)
        try:
            self._do(self._machine.begin())
            while self._done is None:
                self._turn()
            return self._finish(self._done)
        finally:
            self._shut_down()

    def _turn(self) -> None:
        for key, _ in self._selector.select(_POLL):
            key.data()
        self._read_progress()
        self._stream.pump()
        line = self._progress.show(self._machine.restarts)
        if line is not None:
            self._stream.say(line)
        self._do(self._machine.tick(time.monotonic()))

    def _read_progress(self) -> None:
        recovering = self._progress.recoveries and self._progress.recoveries[-1].seconds is None
        if self._progress.read():
            self._machine.progressed(self._progress.step)
            if recovering and (recovery := self._progress.recoveries[-1]).seconds is not None:
                self._tell(
                    "recovered",
                    f"training again after {recovery.seconds:.1f} s, {recovery.steps_lost} steps done again",
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
            if self._machine.phase != "done":
                self._tell("node_lost", f"node {handle.node} lost: its agent is gone", node=handle.node)
                self._note_failure(f"node {handle.node} lost")
            self._do(self._machine.node_lost(handle.node, time.monotonic()))

    def _on_message(self, handle: NodeHandle, message: dict[str, Any]) -> None:
        now = time.monotonic()
        kind = message["kind"]
        if kind == "ready":
            self._do(self._machine.node_ready(handle.node, now))
        elif kind == "stopped":
            self._do(self._machine.node_stopped(handle.node, now))
        elif kind == "started":
            self._folder.event("workers", node=handle.node, round=message["round"], pids=message["pids"])
        elif kind == "exited" and message["round"] == self._machine.round:
            self._on_worker_exit(handle.node, message, now)

    def _on_worker_exit(self, node: int, message: dict[str, Any], now: float) -> None:
        rank, code = message["rank"], message["code"]
        failure = None
        if code != 0:
            self._read_progress()
            error = message.get("error") or self._last_error(rank)
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
            self._progress.failed(cause, time.time(), consequence=consequence)

    def _last_error(self, rank: int) -> str:
        """Return the last line of the traceback that ends the rank's log of this round, if there is one."""
        path = self._folder.log_of(rank)
        start = self._log_starts.get(rank, 0)
        size = path.stat().st_size if path.exists() else 0
        text = tail(path, min(1 << 16, max(0, size - start)))
        # torch puts the rank before each line of a traceback once a process group exists.
        text = _RANK_PREFIX.sub("", text)
        trace = text.rfind("Traceback (most recent call last):")
        if trace < 0:
            return ""
        lines = [line for line in text[trace:].splitlines()[1:] if _LAST_LINE.match(line)]
        return lines[-1].strip()[:500] if lines else ""

    def _on_signals(self, received: bytes) -> None:
        for number in received:
            if number in (signal.SIGUSR1, signal.SIGUSR2):
                for handle in self._nodes.values():
                    os.kill(handle.pid, number)
            else:
                self._do(self._machine.stop(f"{signal.Signals(number).name} received"))

    # --- what to do --------------------------------------------------------------------------------------------

    def _do(self, actions: Iterable[rounds.Action]) -> None:
        for action in actions:
            match action:
                case rounds.Spawn(node):
                    self._spawn(node)
                case rounds.Start(number, groups):
                    self._start(number, dict(groups))
                case rounds.Stop(nodes):
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
                        "environment": self._environment(number, group, rank, local_rank, world, host, port),
                        "log": str(log),
                    }
                )
            self._nodes[node].send("start", round=number, workers=assigned)
        self._tell(
            "round", f"round {number}: {world} workers on {len(groups)} nodes", round=number, world_size=world
        )

    def _environment(
        self, number: int, group: int, rank: int, local_rank: int, world: int, host: str, port: int
    ) -> dict[str, str]:
        """Return torchrun's environment contract, the job's folders, and safe defaults for one machine."""
        workers = self._spec.nodes.workers
        threads = max(1, len(os.sched_getaffinity(0)) // (workers * self._spec.nodes.maximum))
        defaults = {
            "OMP_NUM_THREADS": str(threads),
            "PYTHONUNBUFFERED": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TP_SOCKET_IFNAME": "lo",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        }
        return {
            **{key: value for key, value in defaults.items() if key not in os.environ},
            "ELASTIC_JOB_DIR": str(self._folder.path),
            "ELASTIC_OUTPUT_DIR": self._spec.output_dir or str(self._folder.path / "output"),
            "ELASTIC_CHECKPOINT_DIR": str(self._folder.path / "checkpoints"),
            **self._spec.environment,
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(workers),
            "GROUP_RANK": str(group),
            "GROUP_WORLD_SIZE": str(world // workers),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(world),
            "ROLE_NAME": "default",
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(number),
            "TORCHELASTIC_MAX_RESTARTS": str(self._spec.max_restarts),
            "TORCHELASTIC_RUN_ID": self._name,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    # --- how it is told ----------------------------------------------------------------------------------------

    def _tell(self, kind: str, text: str, **details: Any) -> None:
        self._folder.event(kind, text=text, **details)
        self._stream.pump()
        self._stream.say(f"[elastic] {text}")

    def _description(self) -> dict[str, Any]:
        program = self._spec.program
        return {
            "name": self._name,
            "pid": os.getpid(),
            "program": {"script": program.script, "module": program.module, "sha256": program.sha256()},
            "arguments": list(self._spec.arguments),
            "nodes": str(self._spec.nodes),
            "workers_per_node": self._spec.nodes.workers,
            "max_restarts": self._spec.max_restarts,
            "started": self._started,
        }

    def _finish(self, done: rounds.Done) -> int:
        deadline = time.monotonic() + self._spec.grace + 5.0
        for handle in self._nodes.values():
            handle.send("leave", grace=self._spec.grace)
        for handle in list(self._nodes.values()):
            handle.wait(max(0.1, deadline - time.monotonic()))
        self._read_progress()
        self._stream.drain()
        code = _EXIT_CODES[done.state]
        ended = time.time()
        event = self._folder.event("ended", text=f"job {done.state}: {done.reason}", state=done.state)
        write_json(
            self._folder.record_file,
            {
                "name": self._name,
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
        self._stream.say(f"[elastic] {event['text']}")
        return code

    def _shut_down(self) -> None:
        for handle in self._nodes.values():
            handle.close()
            handle.wait(2.0)
        self._store.close()
        self._selector.close()
