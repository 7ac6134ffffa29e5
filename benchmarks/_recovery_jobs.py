"""One try of the recovery benchmark: its processes on either side, the steps that they finish, and their sure end."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from elastic_runtime.errors import ElasticError
from elastic_runtime.jobs.folder import tail
from elastic_runtime.membership.channel_errors import ChannelTimeout
from elastic_runtime.membership.connection import Connection
from elastic_runtime.membership.secret import read_secret

__all__ = ["LIMIT", "Mark", "NotRecovered", "Ours", "Torchrun", "Try", "pss_mb", "stop_whole_node"]

LIMIT = 120.0
"""Seconds after which a try has not recovered."""
_POLL = 0.01
_MARKER = "RECOVERY_BENCHMARK_TRY"
_LOG_TAIL = 3000
_ANSWER = 10.0


class NotRecovered(Exception):
    """A step that was waited for did not come within `LIMIT`; the text holds the tails of the logs."""


@dataclass(frozen=True)
class Mark:
    """A finished optimizer step of one worker."""

    time: float
    """When, as `time.time` says."""
    pid: int
    rank: int
    world: int
    round: int

    @property
    def life(self) -> tuple[int, int]:
        """What changes when the worker is another process, or in another round."""
        return self.pid, self.round


class Try:
    """Some processes, which all carry a marker in their environment, and the steps of their workers."""

    def __init__(self, base: Path, name: str) -> None:
        """Use the folder `name` in `base`."""
        self.folder = base / name
        self.folder.mkdir()
        self.marks: list[Mark] = []
        self._read = 0
        self._marker = uuid.uuid4().hex
        self._logs: list[Path] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def start(
        self, command: Sequence[str], *, cwd: Path | None = None, **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start a process of this try, with more environment `variables`."""
        log = self.folder / f"log-{len(self._logs)}"
        self._logs.append(log)
        environment = {**os.environ, _MARKER: self._marker, "OMP_NUM_THREADS": "1", **variables}
        with log.open("wb") as file:
            return subprocess.Popen(
                command, env=environment, cwd=cwd, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip

    def end(self) -> None:
        """Kill every process that came of this try, wherever it went, and remove the folder."""
        deadline = time.monotonic() + 20
        while (pids := list(_marked(self._marker))) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- steps ---------------------------------------------------------------------------------------------------

    def look(self) -> list[Mark]:
        """Read the steps that came meanwhile; return all."""
        with contextlib.suppress(FileNotFoundError), (self.folder / "steps").open("rb") as file:
            file.seek(self._read)
            content = file.read()
            content = content[: content.rfind(b"\n") + 1]
            self._read += len(content)
            for line in content.decode().splitlines():
                when, *numbers = line.split()
                self.marks.append(Mark(float(when), *map(int, numbers)))
        return self.marks

    def wait(self, wanted: Callable[[Mark], bool], what: str, *, limit: float = LIMIT) -> Mark:
        """Return the first step that is `wanted`, in the order of their ends. Raises `NotRecovered`."""
        deadline = time.monotonic() + limit
        seen = 0
        while True:
            found = [mark for mark in self.look()[seen:] if wanted(mark)]
            seen = len(self.marks)
            if found:
                return min(found, key=lambda mark: mark.time)
            if time.monotonic() > deadline:
                raise NotRecovered(f"{what}: not within {limit:.0f} s\n{self.tails()}")
            time.sleep(_POLL)

    def first_step(self, world: int) -> Mark:
        """Return the first step of all of a world of this size."""
        return self.wait(lambda mark: mark.world == world, f"first step of {world} workers")

    def steady(self, world: int, steps: int = 20) -> None:
        """Wait until `world` living workers have finished `steps` steps each in a world of that size. No figure.

        Raises `NotRecovered`.
        """
        deadline = time.monotonic() + LIMIT
        counts: dict[int, tuple[tuple[int, int], int]] = {}
        seen = 0
        while True:
            for mark in self.look()[seen:]:
                now, (before, count) = (mark.world, mark.round), counts.get(mark.pid, ((0, 0), 0))
                counts[mark.pid] = (now, count + 1 if now == before else 1)
            seen = len(self.marks)
            alive = [(size, count) for pid, ((size, _), count) in counts.items() if _is_alive(pid)]
            if len(alive) == world and all(size == world and count >= steps for size, count in alive):
                return
            if time.monotonic() > deadline:
                raise NotRecovered(f"{world} workers do not train\n{self.tails()}")
            time.sleep(_POLL)

    def next_step(self, event: float, what: str, *, world: int | None = None, limit: float = LIMIT) -> float:
        """Return the seconds from `event` to the first step of a new round or of new processes, of `world` workers.

        A step that was under way at the event, and was finished by the workers of before, is none. Raises
        `NotRecovered`.
        """
        before = {mark.life for mark in self.look() if mark.time <= event}
        found = self.wait(
            lambda mark: (
                mark.time > event and mark.life not in before and (world is None or mark.world == world)
            ),
            what,
            limit=limit,
        )
        return found.time - event

    def longest_gap(self, begin: float, end: float) -> float:
        """Return the longest time from one finished step of any worker to the next between two moments."""
        times = sorted(mark.time for mark in self.look() if begin <= mark.time <= end)
        edges = [begin, *times, end]
        return max(later - earlier for earlier, later in itertools.pairwise(edges))

    def pids(self) -> dict[int, int]:
        """Return the living processes by rank."""
        latest = {mark.pid: mark.rank for mark in self.look()}
        return {rank: pid for pid, rank in latest.items() if _is_alive(pid)}

    def tails(self) -> str:
        """Return the ends of the logs."""
        logs = [*self._logs, *sorted(self.folder.glob("job/logs/*.log"))]
        return "\n".join(f"--- {log.name}\n{tail(log, _LOG_TAIL)}" for log in logs)


class Torchrun(Try):
    """The rival: torchrun as its documentation starts it."""

    def __init__(self, base: Path, name: str) -> None:
        super().__init__(base, name)
        self.agents: list[subprocess.Popen[bytes]] = []
        self._port = 0

    def one_node(self, script: Path, workers: int) -> float:
        """Start workers on one node; return when."""
        started = time.time()
        options = ["--standalone", f"--nproc-per-node={workers}"]
        self.agents.append(self.start([*_torchrun(), *options, str(script), str(self.folder)]))
        return started

    def node(self, script: Path, nodes: str) -> subprocess.Popen[bytes]:
        """Start one more node with one worker; the first one hosts the rendezvous.

        Each round has a store of its own. By default all rounds share one, and torch 2.13 then does not get over a node
        that joins: rank 0 does not tell it where the store is, and each waits for the other until both give up.
        """
        self._port = self._port or _free_port()
        options = [
            f"--nnodes={nodes}", "--nproc-per-node=1", "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self._port}", f"--rdzv-id={self.folder.name}",
        ]  # fmt: skip
        agent = self.start(
            [*_torchrun(), *options, str(script), str(self.folder)], TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"
        )
        self.agents.append(agent)
        if len(self.agents) == 1:
            deadline = time.monotonic() + LIMIT
            while not _listens(self._port):
                if time.monotonic() > deadline:
                    raise NotRecovered(f"torchrun's rendezvous does not listen\n{self.tails()}")
                time.sleep(_POLL)
        return agent

    def worker_of(self, agent: subprocess.Popen[bytes]) -> int:
        """Return the process id of the one worker of a node."""
        pids = set(self.pids().values())
        return next(pid for pid in pids if _parent(pid) == agent.pid)


class Ours(Try):
    """`kfp-elastic run` in the foreground."""

    def run(self, script: Path, *options: str) -> float:
        """Start a job; return when."""
        program = Path(sys.executable).with_name("kfp-elastic")
        started = time.time()
        job = self.folder / "job"
        self.start(
            [str(program), "run", f"--state-dir={job}", *options, str(script), "--", str(self.folder)],
            cwd=script.parent,
        )
        return started

    @property
    def heartbeat(self) -> float:
        """Seconds after which the coordinator gives up an agent that says nothing."""
        document = json.loads((self.folder / "job" / "coordinator.json").read_text())
        return float(document["heartbeat"])

    def ask(self, **message: Any) -> dict[str, Any]:
        """Ask the coordinator; one that is being replaced is asked again."""
        job = self.folder / "job"
        deadline = time.monotonic() + LIMIT
        while True:
            host, port = json.loads((job / "job.json").read_text())["coordinator"]
            try:
                return _answer((host, port), read_secret(job / "secret"), message)
            except (ElasticError, OSError) as error:
                if time.monotonic() > deadline:
                    raise NotRecovered(f"the coordinator does not answer: {error}\n{self.tails()}") from error
                time.sleep(_POLL)

    def nodes(self) -> dict[int, tuple[int, int]]:
        """Return agent and worker, as process ids, of each node with one worker, by the worker's rank."""
        found = {}
        for node in self.ask(kind="status")["nodes"]:
            for worker in node["workers"]:
                if worker["rank"] is not None and worker["pid"]:
                    found[int(worker["rank"])] = (int(node["agent_pid"]), int(worker["pid"]))
        return found

    def wait_for_nodes(self, count: int) -> dict[int, tuple[int, int]]:
        """Return `nodes` once there are `count`."""
        deadline = time.monotonic() + LIMIT
        while len(found := self.nodes()) != count:
            if time.monotonic() > deadline:
                raise NotRecovered(f"{len(found)} nodes train, not {count}\n{self.tails()}")
            time.sleep(_POLL)
        return found


def stop_whole_node(agent: int, worker: int) -> None:
    """Stop all processes of a node of ours, as a machine that hangs: agent, worker and the worker's keeper."""
    for pid in (agent, _parent(worker), worker):
        os.kill(pid, signal.SIGSTOP)


def pss_mb(pids: Sequence[int]) -> float:
    """Return the memory of processes in MiB, what they share with others counted in proportion."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total / 1024


def _answer(address: tuple[str, int], secret: bytes, message: dict[str, Any]) -> dict[str, Any]:
    """Return the coordinator's answer, which comes after the greeting that it has for everybody."""
    end = time.monotonic() + _ANSWER
    with (
        contextlib.closing(Connection(address, secret, role="control", timeout=_ANSWER)) as connection,
        selectors.DefaultSelector() as selector,
    ):
        connection.send(message)
        while connection.closed is None and time.monotonic() < end:
            write = selectors.EVENT_WRITE if connection.wants_write else 0
            selector.register(connection, selectors.EVENT_READ | write)
            for _, ready in selector.select(_POLL):
                if ready & selectors.EVENT_WRITE:
                    connection.on_writable()
                if ready & selectors.EVENT_READ:
                    connection.on_readable()
            selector.unregister(connection)
            connection.tick()
            for answer in connection.messages():
                if answer["kind"] != "welcome":
                    return answer
        raise connection.closed or ChannelTimeout("no answer")


def _torchrun() -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--max-restarts=100"]


def _marked(marker: str) -> Iterator[int]:
    wanted = f"{_MARKER}={marker}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0") and _is_alive(int(entry.name)):
                    yield int(entry.name)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
