"""Hosts: network namespaces on a bridge, whose cables can be cut, with an agent in each and the coordinator in one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from elastic_runtime.agent.config import AgentConfig
from elastic_runtime.jobs.spec import Program
from elastic_runtime.membership.channel_errors import ChannelError
from elastic_runtime.membership.connection import request
from elastic_runtime.membership.coordinator import CoordinatorConfig
from elastic_runtime.membership.secret import create_secret, read_secret

NAMES = ("amber", "birch-2", "cedar", "dune")
HEARTBEAT = 1.0
HERE = Path(__file__).parent
_PORT = 29400


def ip(*words: str) -> None:
    """Run `ip`, which says why it failed."""
    ran = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if ran.returncode:
        raise OSError(f"ip {' '.join(words)}: {ran.stderr.strip()}")


class Network:
    """One bridge with a cable to each host, and a second bridge for the half of a network that is cut in two."""

    def __init__(self, hosts: tuple[str, ...]) -> None:
        """Name everything; nothing is made yet."""
        self._tag = f"ke{uuid.uuid4().hex[:6]}"
        # 198.18.0.0/15 is kept for tests of networks (RFC 2544).
        self._net = f"198.{18 + os.getpid() % 2}.{uuid.uuid4().int % 256}"
        self._numbers = {host: number for number, host in enumerate(hosts, 1)}

    def namespace(self, host: str) -> str:
        """Return the name of the host's namespace."""
        return f"{self._tag}-{self._numbers[host]}"

    def address(self, host: str) -> str:
        """Return the host's address."""
        return f"{self._net}.{self._numbers[host]}"

    def make(self) -> None:
        """Make bridges, namespaces and cables. Raises `OSError` where that is not allowed."""
        for bridge in ("a", "b"):
            ip("link", "add", f"{self._tag}{bridge}", "type", "bridge")
            ip("link", "set", f"{self._tag}{bridge}", "up")
        ip("address", "add", f"{self._net}.254/24", "dev", f"{self._tag}a")
        for host in self._numbers:
            space, cable = self.namespace(host), self._cable(host)
            ip("netns", "add", space)
            ip("link", "add", cable, "type", "veth", "peer", "name", "cable0", "netns", space)
            ip("link", "set", cable, "master", f"{self._tag}a", "up")
            ip("-n", space, "address", "add", f"{self.address(host)}/24", "dev", "cable0")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", "cable0", "up")

    def cut(self, host: str) -> None:
        """Cut the cable of a host."""
        ip("link", "set", self._cable(host), "down")

    def mend(self, host: str) -> None:
        """Mend the cable of a host."""
        ip("link", "set", self._cable(host), "up")

    def split(self, *hosts: str) -> None:
        """Cut these hosts, which still reach each other, off from the others."""
        for host in hosts:
            ip("link", "set", self._cable(host), "master", f"{self._tag}b")

    def heal(self, *hosts: str) -> None:
        """Bring them together again."""
        for host in hosts:
            ip("link", "set", self._cable(host), "master", f"{self._tag}a")

    def remove(self) -> None:
        """Remove all that is there, whatever failed before."""
        for host in self._numbers:
            subprocess.run(["ip", "link", "delete", self._cable(host)], capture_output=True, timeout=20)
            subprocess.run(["ip", "netns", "delete", self.namespace(host)], capture_output=True, timeout=20)
        for bridge in ("a", "b"):
            subprocess.run(["ip", "link", "delete", f"{self._tag}{bridge}"], capture_output=True, timeout=20)

    def _cable(self, host: str) -> str:
        return f"{self._tag}v{self._numbers[host]}"


class Cluster:
    """A job on hosts: what a launcher for several machines will do, done by hand."""

    names = NAMES
    heartbeat = HEARTBEAT

    def __init__(self, sandbox: Any, network: Network, *, minimum: int = 2) -> None:
        """Prepare the job; `coordinator` is a host of its own."""
        self.network = network
        self.folder = sandbox.folder / "job"
        self._sandbox = sandbox
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.folder.mkdir()
        self.script = Path(shutil.copy(HERE / "train_script.py", self.folder))
        create_secret(self.folder / "secret")
        self.secret = read_secret(self.folder / "secret")
        self.coordinator = (network.address("coordinator"), _PORT)
        CoordinatorConfig(
            name="hosts", nodes=f"{minimum}:{len(NAMES)}", workers=1, max_restarts=3, heartbeat=HEARTBEAT,
            lock=str(self.folder / "leader"), secret=str(self.folder / "secret"), managed=False,
        ).write(self.folder / "coordinator.json")  # fmt: skip

    def lead(self) -> None:
        """Start the coordinator; its socket is made in its own network."""
        listen = (
            "import os, socket, sys\n"
            f"s = socket.create_server({self.coordinator!r}, backlog=64)\n"
            "s.set_inheritable(True)\n"
            "os.execv(sys.executable, [sys.executable, '-P', '-m', 'elastic_runtime.membership.coordinator',"
            f" '--config', {str(self.folder / 'coordinator.json')!r}, '--listen', str(s.fileno())])\n"
        )
        self._start("coordinator", "coordinator", [sys.executable, "-P", "-c", listen])

    def join(self, name: str, *, script: Path | None = None, secret: Path | None = None) -> None:
        """Start the agent of a host, by hand."""
        folder = self.folder / name
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        AgentConfig(
            name="hosts", program=Program(script=str(script or self.script)), workers=1, nodes=len(NAMES),
            max_restarts=3, grace=3.0, job_dir=str(folder), output_dir=str(folder / "output"),
            coordinator=self.coordinator, secret=str(secret or self.folder / "secret"),
            store_host=self.network.address(name), silence=2 * HEARTBEAT,
        ).write(folder / "agent.json")  # fmt: skip
        command = [sys.executable, "-P", "-m", "elastic_runtime.agent"]
        self._start(name, name, [*command, "--config", str(folder / "agent.json"), "--node", name])

    def _start(self, key: str, host: str, command: list[str]) -> None:
        with (self.folder / f"{key}.log").open("ab") as log:
            self._processes[key] = subprocess.Popen(
                ["ip", "netns", "exec", self.network.namespace(host), *command],
                env={
                    **self._sandbox.environment, "GLOO_SOCKET_IFNAME": "cable0", "OMP_NUM_THREADS": "1",
                    "TEST_JOB": str(self.folder), "TEST_HOST": host,
                },
                cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def said(self, key: str) -> str:
        """Return what the agent or coordinator printed."""
        return (self.folder / f"{key}.log").read_text(encoding="utf-8")

    def kill(self, key: str) -> None:
        """Kill a process, and collect it."""
        self._processes[key].kill()
        self._processes[key].wait(10)

    def code(self, key: str, timeout: float = 60) -> int:
        """Wait for the end of an agent or of the coordinator, and return its exit code."""
        return self._processes[key].wait(timeout)

    def status(self) -> dict[str, Any]:
        """Ask the coordinator; empty if it cannot be reached."""
        try:
            return request(self.coordinator, self.secret, {"kind": "status"}, timeout=2)
        except ChannelError:
            return {}

    def start(self, *, epochs: int) -> None:
        """Start all: the job is over after 20 steps for each of `epochs`."""
        (self.folder / "epochs").write_text(str(epochs))
        self.lead()
        for name in self.names:
            self.join(name)

    def finish(self) -> list[dict[str, Any]]:
        """Let the workers train as fast as they can, and return what each host's worker says at its end."""
        (self.folder / "fast").touch()
        for key in [*self.names, "coordinator"]:
            assert self.code(key) == 0, self.said(key)
        return [json.loads((self.folder / f"{name}.end").read_text()) for name in self.names]

    def trains(self, world: int) -> bool:
        """Whether a round of `world` workers runs, and each of them trains."""
        status = self.status()
        states = [worker["state"] for node in status.get("nodes", ()) for worker in node["workers"]]
        return (status.get("state"), status.get("world_size"), states) == (
            "running",
            world,
            ["training"] * world,
        )

    def steps(self, name: str) -> list[dict[str, Any]]:
        """Return what a host's worker noted: step (committed), round, pid and time."""
        path = self.folder / f"{name}.steps"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def metrics(self) -> list[dict[str, Any]]:
        """Return the steps that were reported, on all hosts, in the order of time."""
        lines = []
        for name in NAMES:
            path = self.folder / name / "metrics.jsonl"
            text = path.read_text() if path.exists() else ""
            lines += [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return sorted(lines, key=lambda line: line["time"])

    def other_secret(self) -> Path:
        """Return the file of a secret that is not this job's."""
        create_secret(self.folder / "other-secret")
        return self.folder / "other-secret"

    def answer_to_join(self, name: str, *, seen: int) -> dict[str, Any]:
        """Return what the coordinator says to an agent that has seen a coordinator of the term `seen`."""
        copy = {
            "term": seen, "round": 7, "world_size": 4, "in_place": True, "finishing": False, "desired": 4,
            "fingerprint": None, "round_of_step": 7, "losses": {"excluded": {}, "exclusions": {}},
            "budget": {"used": 0, "step": 9, "last": None, "repeats": 0, "step_at_failure": -1},
        }  # fmt: skip
        join = {
            "kind": "join", "node": name, "pid": 1, "host": name, "workers": 1, "fingerprint": None,
            "store": ["127.0.0.1", 1], "running": [], "copy": copy,
        }  # fmt: skip
        return request(self.coordinator, self.secret, join, role="agent", timeout=10)

    def of_host(self, name: str) -> list[tuple[int, str]]:
        """Return every process of a host, as far as it came of this test."""
        found = []
        for pid, command in self._sandbox.processes():
            with suppress(OSError):
                if f"TEST_HOST={name}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes() + b"\0":
                    found.append((pid, command))
        return found

    def close(self) -> None:
        """End what still runs."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait(10)


@pytest.fixture
def network() -> Iterator[Network]:
    """A network of the four hosts and the coordinator's; skips where none may be made."""
    made = Network((*NAMES, "coordinator"))
    try:
        try:
            made.make()
        except OSError as error:
            pytest.skip(f"no right to make a network namespace: {error}")
        yield made
    finally:
        made.remove()


@pytest.fixture
def cluster(sandbox: Any, network: Network) -> Iterator[Cluster]:
    """A job on the hosts of `network`; nothing of it is left."""
    made = Cluster(sandbox, network)
    try:
        yield made
    finally:
        made.close()
