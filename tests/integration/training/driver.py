"""A small stand-in for agent, coordinator and zygote: forks real workers and speaks the channel's protocol.

    python driver.py SCRIPT WORKERS FOLDER

Commands are JSON lines on stdin, events JSON lines on stdout. Everything real is real: processes, signals, sockets.
"""

from __future__ import annotations

import json
import os
import runpy
import selectors
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

from elastic_runtime.processes.tree import die_with_parent

torch.set_num_threads(1)


class Worker:
    def __init__(self, number: int, pid: int, channel: socket.socket) -> None:
        self.number, self.pid, self.channel = number, pid, channel
        self.pidfd = os.pidfd_open(pid)
        self.ready: dict[str, Any] | None = None
        self.rank: int | None = None
        self.round = -1
        self.finished = False
        self.gone = False


class Driver:
    def __init__(self, script: str, folder: Path) -> None:
        self.script, self.folder = script, folder
        self.workers: dict[int, Worker] = {}
        self.selector = selectors.DefaultSelector()
        self.round = -1
        self.newest = -1
        self.forming = True
        self.first = True
        self.wanted = 0
        self.spawned = 0
        self.leaving: set[int] = set()
        self.port = self.start_store()

    def start_store(self) -> int:
        reader, writer = os.pipe()
        parent = os.getpid()
        if os.fork() == 0:
            die_with_parent(parent)
            store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
            os.write(writer, f"{store.port}\n".encode())
            signal.pause()
        os.close(writer)
        with os.fdopen(reader) as lines:
            return int(lines.readline())

    def say(self, event: str, **facts: Any) -> None:
        print(json.dumps({"event": event, "time": time.time(), **facts}), flush=True)

    def spawn(self, environment: dict[str, str]) -> None:
        number, self.spawned = self.spawned, self.spawned + 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent(parent)
            ours.close()
            for worker in self.workers.values():
                worker.channel.close()
                if worker.pidfd >= 0:
                    os.close(worker.pidfd)
            run_worker(self.script, self.folder, number, theirs.detach(), self.port, environment)
        theirs.close()
        worker = self.workers[number] = Worker(number, pid, ours)
        self.selector.register(ours, selectors.EVENT_READ, worker)
        self.selector.register(worker.pidfd, selectors.EVENT_READ, worker)
        self.say("spawned", worker=number, pid=pid)

    def tell(self, worker: Worker, **message: Any) -> None:
        try:
            worker.channel.send(json.dumps(message).encode())
        except OSError:
            self.say("unreachable", worker=worker.number)

    def members(self) -> list[Worker]:
        return [one for one in self.workers.values() if not one.gone and one.rank is not None]

    def change(self, planned: bool) -> None:
        self.newest += 1
        self.forming = True
        for worker in self.members():
            worker.ready = None
            worker.finished = False
            self.tell(worker, kind="change", round=self.newest, planned=planned)

    def form(self) -> None:
        """Send go when every member, and at first every wanted worker, is ready."""
        joining = [one for one in self.workers.values() if not one.gone and one.ready is not None]
        if not self.forming or any(one.ready is None for one in self.members()) or not joining:
            return
        if self.first and len(joining) < self.wanted:
            return
        self.first = False
        self.newest = self.round = max(self.newest, self.round + 1)
        self.forming = False
        world = len(joining)
        free = set(range(world))
        for one in sorted(joining, key=lambda one: one.number):
            if one.rank is not None and one.rank in free:
                free.discard(one.rank)
            else:
                one.rank = None
        for one in joining:
            if one.rank is None:
                one.rank = min(free)
                free.discard(one.rank)
        whole = [one for one in joining if not one.ready["fresh"] and not one.ready["torn"]]
        best = max(whole, key=lambda one: (one.ready["step"], -one.rank), default=None)
        source = -1 if best is None else best.rank
        for one in joining:
            one.ready, one.round = None, self.round
            self.tell(one, kind="go", round=self.round, term=1, rank=one.rank, local_rank=one.rank,
                      world_size=world, group_rank=0, group_world_size=1, local_world_size=world,
                      store=["127.0.0.1", self.port], source=source)  # fmt: skip
        ranks = {str(one.number): one.rank for one in joining}
        self.say("go", round=self.round, world=world, source=source, ranks=ranks)

    def heard(self, worker: Worker) -> None:
        try:
            packet = worker.channel.recv(65536)
        except ConnectionError:
            packet = b""
        if not packet:
            self.selector.unregister(worker.channel)
            return
        message = json.loads(packet)
        self.say("said", worker=worker.number, **message)
        if worker.gone:
            return
        if message["kind"] == "ready" and worker.number in self.leaving:
            worker.gone = True
            self.tell(worker, kind="leave")
            self.form()
        elif message["kind"] == "ready" and message["round"] == worker.round:
            worker.ready = message
            if not self.forming and worker.rank is None:
                self.change(planned=True)
            elif not self.forming:
                self.change(planned=False)  # it could not go on and says so: the others must come along
                worker.ready = message
            self.form()
        elif message["kind"] == "finished" and not self.forming:
            worker.finished = True
            if all(one.finished for one in self.members()):
                for one in self.members():
                    self.tell(one, kind="release")

    def ended(self, worker: Worker) -> None:
        self.selector.unregister(worker.pidfd)
        _, status = os.waitpid(worker.pid, 0)
        os.close(worker.pidfd)
        worker.pidfd = -1
        self.say("exit", worker=worker.number, code=os.waitstatus_to_exitcode(status))
        self.lose(worker)

    def lose(self, worker: Worker) -> None:
        if worker.gone:
            return
        member = worker.rank is not None
        released = worker.finished
        worker.gone = True
        if member and not released:
            self.change(planned=False)
        self.form()

    def command(self, order: dict[str, Any]) -> None:
        worker = self.workers.get(order.get("worker", -1))
        if order["do"] == "spawn":
            self.spawn(order.get("environment", {}))
        elif order["do"] == "lose" and worker:  # a silent host: the others are told, it is not
            self.lose(worker)
        elif (
            order["do"] == "leave" and worker
        ):  # a polite departure: it gets `leave` as the answer to its ready
            self.leaving.add(worker.number)
            self.change(planned=True)
        elif order["do"] == "change":
            self.change(planned=order["planned"])

    def run(self, workers: int) -> None:
        self.wanted = workers
        for _ in range(workers):
            self.spawn({})
        self.selector.register(0, selectors.EVENT_READ, "stdin")
        rest = b""
        while True:
            for key, _ in self.selector.select():
                if key.data == "stdin":
                    data = os.read(0, 65536)
                    if not data:
                        return
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        self.command(json.loads(line))
                elif key.fileobj is key.data.channel:
                    self.heard(key.data)
                else:
                    self.ended(key.data)


def run_worker(
    script: str, folder: Path, number: int, channel: int, port: int, environment: dict[str, str]
) -> None:
    code = 1
    try:
        log = os.open(folder / f"worker-{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.update(
            RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            ELASTIC_CHANNEL=str(channel), ELASTIC_JOB_DIR=str(folder), ELASTIC_OUTPUT_DIR=str(folder / "output"),
            GLOO_SOCKET_IFNAME="lo", TEST_WORKER=str(number), **environment,
        )  # fmt: skip
        torch.manual_seed(1000 + number)
        sys.argv = [script]
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    Driver(sys.argv[1], Path(sys.argv[3])).run(int(sys.argv[2]))
