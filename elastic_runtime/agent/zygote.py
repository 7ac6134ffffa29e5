"""The zygote of one machine: `python -P -m elastic_runtime.agent.zygote --control FD --requests FD [--preload a,b] …`.

It has imported torch and what the job names, and forks a worker for each request (see `requests`): a warm start takes
a fraction of a second. It has one thread, keeps no state of the workers and waits for nobody: each fork is first a
keeper, which answers and watches. So the death of the zygote costs nothing; the supervisor starts another one.

On the control socket it says `preloading` (name) before each import and then `ready` (warnings), or `refused`
(error) if it cannot fork safely, and ends; later it answers `ping` with `pong`.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import replace

from elastic_runtime.agent import forked, main_program
from elastic_runtime.agent.keeper import keep
from elastic_runtime.agent.preloading import NotForkSafe, limit_threads, preload
from elastic_runtime.agent.requests import CHANNEL, Program, receive, send_message
from elastic_runtime.processes import tree
from elastic_runtime.processes.title import set_title

__all__ = ["main"]

_LOADED_AT_START = frozenset(sys.modules) - {"elastic_runtime"}


class _Server:
    """The loop; in each worker it returns the program to run."""

    def __init__(self, control: socket.socket, requests: socket.socket) -> None:
        self._control = control
        self._requests = requests
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> Program | None:
        """Fork workers until the supervisor is gone; return None then, and the program in a worker."""
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        for descriptor in (self._control.fileno(), self._requests.fileno(), self._wake):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._wake in ready:
                with suppress(BlockingIOError):
                    os.read(self._wake, 4096)
                tree.reap()
            try:
                if self._control.fileno() in ready:
                    receive(self._control)
                    with suppress(BlockingIOError):
                        send_message(self._control, "pong")
                if self._requests.fileno() in ready and (program := self._fork()) is not None:
                    return program
            except BlockingIOError:
                continue
            except (EOFError, BrokenPipeError):
                return None

    def _fork(self) -> Program | None:
        _, descriptors = receive(self._requests)
        if len(descriptors) < 3:  # None was free here for all of them; who asked sees its link closed.
            for descriptor in descriptors:
                os.close(descriptor)
            return None
        link = socket.socket(fileno=descriptors[0])
        # What is buffered here would be written again by each fork.
        _flush()
        try:
            pid = os.fork()
        except OSError as error:
            with suppress(OSError):
                send_message(link, "failed", error=str(error))
            pid = -1
        if pid:
            link.close()
            for descriptor in descriptors[1:]:
                os.close(descriptor)
            return None
        body, log, *channel = descriptors[1:]
        self._close()
        keep(link, (body, log, *channel))
        return _take_over(body, log, channel)

    def _close(self) -> None:
        self._control.close()
        self._requests.close()
        signal.set_wakeup_fd(-1)
        os.close(self._wake)
        os.close(self._waker)


def _take_over(body: int, log: int, channel: list[int]) -> Program:
    """Give the worker its standard streams and read what it is to run."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, place in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, place, inheritable=True)
    os.close(nothing)
    os.close(log)
    size = os.fstat(body).st_size
    program = Program.from_bytes(os.pread(body, size, 0))
    os.close(body)
    if channel:
        return replace(program, environment={**program.environment, CHANNEL: str(channel[0])})
    return program


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def main() -> None:
    """Serve until the supervisor is gone; in a worker, run its program and end as it ends."""
    parser = argparse.ArgumentParser(prog="zygote")
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--preload", default="")
    parser.add_argument("--path", help="what the program has first on its import path")
    parser.add_argument("room", nargs="?")
    given = parser.parse_args()
    tree.die_with_parent(os.getppid(), signal.SIGKILL)
    control, requests = socket.socket(fileno=given.control), socket.socket(fileno=given.requests)
    for connection in (control, requests):
        connection.set_inheritable(False)
    set_title(["elastic-zygote", f"--preload={given.preload}"])
    limit_threads()
    logger = forked.RootLogger()
    names = [name for name in given.preload.split(",") if name]
    try:
        warnings = preload(names, given.path, lambda name: send_message(control, "preloading", name=name))
    except (NotForkSafe, ImportError) as error:
        with suppress(OSError):
            send_message(control, "refused", error=str(error))
        os._exit(1)
    send_message(control, "ready", warnings=warnings)
    program = _Server(control, requests).serve()
    if program is None:
        os._exit(0)
    set_title([sys.executable, *program.words()])
    logger.restore()
    forked.become(program)
    entry = main_program.path_entry(program)
    if entry is not None:
        main_program.forget_shadowed(entry, keep=_LOADED_AT_START)
    main_program.run(program)


if __name__ == "__main__":
    main()
