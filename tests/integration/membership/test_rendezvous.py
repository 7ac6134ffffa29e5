"""torchrun with the backend `elastic`: real agents, workers and coordinators, killed for real."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_runtime.errors import InputError
from elastic_runtime.membership.channel_errors import WrongSecretError
from elastic_runtime.membership.rendezvous import RendezvousConfig
from elastic_runtime.membership.secret import create_secret

SLEEPER = """
import json, os, signal, sys, time
from pathlib import Path
folder, name = Path(sys.argv[1]), os.environ["NODE"]
signal.signal(signal.SIGTERM, signal.SIG_DFL)
keys = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
place = {"pid": os.getpid(), "agent": os.getppid(), **{key: os.environ[key] for key in keys}}
(folder / f"{name}.tmp").write_text(json.dumps(place))
(folder / f"{name}.tmp").rename(folder / f"{name}.json")
while not (folder / "finish").exists():
    time.sleep(0.02)
"""
TRAINER = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
folder, name = Path(sys.argv[1]), os.environ["NODE"]
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step, stop = 0, torch.zeros(1)
while not stop.item():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    step += 1
    place = {"pid": os.getpid(), "step": step, "RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()),
             "MASTER_ADDR": os.environ["MASTER_ADDR"], "MASTER_PORT": os.environ["MASTER_PORT"]}
    (folder / f"{name}.tmp").write_text(json.dumps(place))
    (folder / f"{name}.tmp").rename(folder / f"{name}.json")
    stop = torch.tensor([float((folder / "finish").exists())])
    dist.all_reduce(stop)
dist.destroy_process_group()
"""


class Job:
    """torchrun agents of one job on this machine, all with the same endpoint."""

    def __init__(self, sandbox: Any, wait: Callable[..., Any], script: str, nnodes: str) -> None:
        self.sandbox, self.wait, self.nnodes = sandbox, wait, nnodes
        self.folder: Path = sandbox.folder / "job"
        self.folder.mkdir()
        self.script = sandbox.script(script)
        self.secret = sandbox.folder / "secret"
        create_secret(self.secret)
        self.port = free_port()
        self.agents: dict[str, subprocess.Popen[str]] = {}

    def start(self, *names: str, secret: Path | None = None, run_id: str = "job", nnodes: str = "") -> None:
        for name in names:
            self.agents[name] = self.sandbox.start(
                sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=elastic",
                f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-id={run_id}",
                f"--nnodes={nnodes or self.nnodes}", "--nproc-per-node=1", "--max-restarts=3",
                f"--rdzv-conf=secret_file={secret or self.secret}", self.script, self.folder,
                env={"NODE": name, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def place(self, name: str) -> dict[str, Any]:
        try:
            return dict(json.loads((self.folder / f"{name}.json").read_text()))
        except FileNotFoundError:
            return {}

    def until(self, world: int, *names: str, but: frozenset[int] = frozenset()) -> dict[str, int]:
        """Wait until these run as one world, in processes other than `but`; return their ranks."""

        def together() -> bool:
            places = [self.place(name) for name in names]
            return all(place and place["pid"] not in but for place in places) and (
                {place["WORLD_SIZE"] for place in places} == {str(world)}
                and len({(place["MASTER_ADDR"], place["MASTER_PORT"]) for place in places}) == 1
            )

        self.wait(together, timeout=100, what=f"a world of {world} on {names}")
        ranks = {name: int(self.place(name)["RANK"]) for name in names}
        assert len(set(ranks.values())) == len(names), ranks
        return ranks

    def pids(self, *names: str) -> frozenset[int]:
        return frozenset(self.place(name)["pid"] for name in names)

    def kill(self, name: str) -> None:
        """Kill a node: its agent with its worker."""
        self.agents[name].kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.place(name)["pid"], signal.SIGKILL)
        self.agents.pop(name).communicate()

    def coordinators(self) -> list[int]:
        return [pid for pid, command in self.sandbox.processes() if "rendezvous_service" in command]

    def finish(self) -> None:
        (self.folder / "finish").touch()
        for name, agent in self.agents.items():
            _, errors = agent.communicate(timeout=100)
            assert agent.returncode == 0, f"{name}: {errors[-2000:]}"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_a_killed_node_is_replaced_in_seconds_though_nobody_talks(
    sandbox: Any, wait: Callable[..., Any]
) -> None:
    """Workers that only sleep never notice a lost peer (nor does torchrun's own backend): the coordinator does."""
    job = Job(sandbox, wait, SLEEPER, "2:3")
    job.start("c", "d", "e")
    ranks = job.until(3, "c", "d", "e")
    (coordinator,) = job.coordinators()
    lost = next(name for name, rank in ranks.items() if rank == 0)
    rest = [name for name in ranks if name != lost]
    before = job.pids(*rest)
    job.kill(lost)
    after = job.until(2, *rest, but=before)
    kept = next(name for name in rest if ranks[name] == 1)
    assert after[kept] == 1, "a survivor keeps its rank"
    # Its name sorts first, which must not move anybody.
    again = job.pids(*rest)
    job.start("a")
    with_new = job.until(3, "a", *rest, but=again)
    assert {name: with_new[name] for name in rest} == after
    assert job.coordinators() == [coordinator], "it outlives the agent that started it"
    job.finish()


def test_training_goes_on_after_a_killed_node(sandbox: Any, wait: Callable[..., Any]) -> None:
    job = Job(sandbox, wait, TRAINER, "2:3")
    job.start("a", "b", "c")
    ranks = job.until(3, "a", "b", "c")
    lost = next(name for name, rank in ranks.items() if rank == 0)
    rest = [name for name in ranks if name != lost]
    before = job.pids(*rest)
    killed = time.monotonic()
    job.kill(lost)
    job.until(2, *rest, but=before)
    seconds = time.monotonic() - killed
    # torchrun's own backend takes 43 s for its timers alone; here it is two starts of Python and torch.
    assert seconds < 40
    wait(lambda: all(job.place(name)["step"] > 3 for name in rest), what="more steps")
    job.finish()


def test_a_killed_coordinator_stops_nobody(sandbox: Any, wait: Callable[..., Any]) -> None:
    job = Job(sandbox, wait, SLEEPER, "2:3")
    job.start("a", "b", "c")
    job.until(3, "a", "b", "c")
    before = job.pids("a", "b", "c")
    (first,) = job.coordinators()
    os.kill(first, signal.SIGKILL)
    wait(lambda: job.coordinators() and first not in job.coordinators(), what="another coordinator")
    # That it knows the round is shown by what follows: a loss is noticed, and only the loss.
    job.agents["a"].send_signal(signal.SIGTERM)
    job.agents.pop("a").communicate(timeout=60)
    job.until(2, "b", "c", but=before)
    job.finish()


def test_another_agent_starts_the_coordinator_when_its_host_is_gone(
    sandbox: Any, wait: Callable[..., Any]
) -> None:
    job = Job(sandbox, wait, SLEEPER, "1:2")
    job.start("a", "b")
    job.until(2, "a", "b")
    (coordinator,) = job.coordinators()
    host = parent(coordinator)
    first = next(name for name, agent in job.agents.items() if agent.pid == host)
    other = "b" if first == "a" else "a"
    before = job.pids(other)
    job.agents[first].send_signal(signal.SIGSTOP)  # So that it cannot start another one.
    os.kill(coordinator, signal.SIGKILL)
    job.kill(first)
    job.until(1, other, but=before)
    wait(lambda: [parent(pid) for pid in job.coordinators()] == [job.agents[other].pid], what="another host")
    job.finish()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_who_does_not_belong_to_the_job_is_refused(sandbox: Any, wait: Callable[..., Any]) -> None:
    job = Job(sandbox, wait, SLEEPER, "1:3")
    job.start("a")
    job.until(1, "a")
    before = job.pids("a")
    create_secret(sandbox.folder / "other")
    cases = {
        "b": ({"secret": sandbox.folder / "other"}, r"WrongSecretError: .*127\.0\.0\.1:\d+: .*secret"),
        "c": ({"run_id": "another"}, r"InputError: .*--rdzv-id 'job'.*--rdzv-id 'another'"),
        "d": ({"nnodes": "1:2"}, r"InputError: .*--nnodes 1:3.*--nnodes 1:2"),
        "e": ({"secret": sandbox.folder / "none"}, r"MissingFileError: .*none.*no such file"),
    }
    for name, (given, message) in cases.items():
        job.start(name, **given)  # type: ignore[arg-type]
        agent = job.agents.pop(name)
        _, errors = agent.communicate(timeout=100)
        assert agent.returncode == 1
        assert re.search(message, errors), errors[-2000:]
    assert job.pids("a") == before, "the job goes on as if nothing had been"
    job.finish()


# --- handlers in threads of this process ------------------------------------------------------------------------------


@pytest.fixture
def handlers(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Make handlers of one job; what is left is shut down."""
    from elastic_runtime.membership.rendezvous_handler import ElasticRendezvousHandler

    create_secret(tmp_path / "secret")
    port, made = free_port(), []

    def make(**given: Any) -> ElasticRendezvousHandler:
        fields = {"run_id": "job", "minimum": 1, "maximum": 3, "secret_file": tmp_path / "secret",
                  "last_call_timeout": 0.3, "join_timeout": 60.0, **given}  # fmt: skip
        handler = ElasticRendezvousHandler(RendezvousConfig(host="127.0.0.1", port=port, **fields))
        made.append(handler)
        return handler

    yield make
    for handler in made:
        handler.shutdown()
    for handler in made:
        if (process := handler._client._host._process) is not None:
            process.wait(20)


def meet(*handlers: Any) -> list[Any]:
    """Let them all ask for the next round, as agents in processes of their own do."""
    found: dict[int, Any] = {}

    def ask(number: int) -> None:
        found[number] = handlers[number].next_rendezvous()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(handlers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert len(found) == len(handlers)
    return [found[number] for number in range(len(handlers))]


def test_the_store_of_each_round_is_new_and_shared(
    handlers: Callable[..., Any], wait: Callable[..., Any]
) -> None:
    three = [handlers(), handlers(), handlers()]
    first = meet(*three)
    assert sorted(info.rank for info in first) == [0, 1, 2]
    assert {info.world_size for info in first} == {3}
    first[0].store.set("key", "value")
    assert [info.store.get("key") for info in first] == [b"value"] * 3
    bootstraps = {(i.bootstrap_store_info.master_addr, i.bootstrap_store_info.master_port) for i in first}
    assert len(bootstraps) == 1
    assert [handler.num_nodes_waiting() for handler in three] == [0, 0, 0]
    assert [(handler.get_backend(), handler.get_run_id()) for handler in three] == [("elastic", "job")] * 3
    # One asks for the next round, as after a failed worker: the others learn of it.
    came: list[Any] = []
    thread = threading.Thread(target=lambda: came.append(three[2].next_rendezvous()))
    thread.start()
    wait(lambda: all(handler.num_nodes_waiting() == 1 for handler in three[:2]), what="word of it")
    second = [*meet(*three[:2])]
    thread.join(90)
    second += came
    assert [info.rank for info in second] == [info.rank for info in first], "ranks are stable"
    assert not second[0].store.check(["key"])


def test_after_shutdown_the_job_is_closed_for_all(
    handlers: Callable[..., Any], wait: Callable[..., Any]
) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousClosedError

    two = [handlers(maximum=2), handlers(maximum=2)]
    meet(*two)
    assert two[0].shutdown()
    wait(two[1].is_closed, what="word of it")
    assert two[1].num_nodes_waiting() == 0, "the end of one is no reason to start anew"
    with pytest.raises(RendezvousClosedError, match="over"):
        two[1].next_rendezvous()


def test_a_spare_ends_in_peace_with_the_job(handlers: Callable[..., Any], wait: Callable[..., Any]) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError

    member = handlers(maximum=1)
    meet(member)
    errors: list[Exception] = []

    def wait_for_a_place() -> None:
        try:
            handlers(maximum=1).next_rendezvous()
        except RendezvousGracefulExitError as error:
            errors.append(error)

    thread = threading.Thread(target=wait_for_a_place)
    thread.start()
    wait(lambda: connections(member) == 2, what="the spare")
    assert member.num_nodes_waiting() == 0, "there is no place for it"
    member.shutdown()
    thread.join(60)
    assert [str(error) for error in errors] == ["the job 'job' is over"]


def connections(handler: Any) -> int:
    """Return how many authenticated agents the coordinator of this process has."""
    pid, port = handler._client._host.pid, handler._config.port
    found = 0
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        found += int(words[1].partition(":")[2], 16) == port and words[3] == "01"
    return found


def test_a_paused_coordinator_stops_nobody(handlers: Callable[..., Any], wait: Callable[..., Any]) -> None:
    two = [handlers(heartbeat=0.5), handlers(heartbeat=0.5)]
    meet(*two)
    pid = next(handler._client._host.pid for handler in two if handler._client._host.pid)
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + 3  # Six heartbeats.
    wait(lambda: time.monotonic() > until)
    os.kill(pid, signal.SIGCONT)
    third = handlers(heartbeat=0.5)
    assert third._client.local_host(60), "it is back"
    assert [handler.num_nodes_waiting() for handler in two] == [0, 0]
    third.shutdown()


def test_a_round_that_does_not_come_about_ends_in_one_error(handlers: Callable[..., Any]) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

    alone = handlers(minimum=2, join_timeout=3.0)
    with pytest.raises(RendezvousTimeoutError, match=r"no round in 3 s: fewer than 2 nodes came"):
        alone.next_rendezvous()


def test_wrong_secret_and_other_job_raise_what_is_wrong(handlers: Callable[..., Any], tmp_path: Path) -> None:
    meet(handlers())
    create_secret(tmp_path / "other")
    with pytest.raises(WrongSecretError, match="secret"):
        handlers(secret_file=tmp_path / "other").next_rendezvous()
    with pytest.raises(InputError, match=r"--rdzv-id 'job'.*'another'"):
        handlers(run_id="another").next_rendezvous()


def test_a_silent_node_counts_as_lost_and_comes_back(
    handlers: Callable[..., Any], wait: Callable[..., Any]
) -> None:
    """The thread of one handler is held up, as by SIGSTOP: others learn of it after the heartbeat."""
    two = [handlers(maximum=2, heartbeat=1.0), handlers(maximum=2, heartbeat=1.0)]
    meet(*two)
    client = two[0]._client
    with client._changed:  # It answers no ping as long as this is held.
        client._say("met", round=-5)
        wait(lambda: two[1].num_nodes_waiting() > 0, timeout=20, what="word of the silent node")
    wait(lambda: two[0].num_nodes_waiting() > 0, timeout=20, what="its own word that it has to come")
    assert sorted(info.rank for info in meet(*two)) == [0, 1]
