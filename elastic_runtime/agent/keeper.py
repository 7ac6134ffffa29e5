"""The keeper of one forked worker: a fork of the zygote that outlives it, and the worker's parent.

It is a subreaper, so everything that the worker leaves behind, also in sessions of its own, comes to it and is killed
when the worker has ended. It knows the worker's status whatever became of the zygote. When its link closes, because
the agent that asked for the worker is gone or wants it no more, it kills everything and ends; when it is killed
itself, the kernel kills the worker.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from typing import NoReturn

from elastic_runtime.agent.requests import send_message
from elastic_runtime.processes import tree
from elastic_runtime.processes.title import set_title

__all__ = ["keep"]

_PATIENCE = 5.0


def keep(link: socket.socket, others: Iterable[int]) -> None:
    """Fork the worker, and return in it once it may run; in the keeper this does not return.

    The descriptors `others` are the worker's, and closed in the keeper.
    """
    keeper = os.getpid()
    start, started = os.pipe()
    try:
        worker = os.fork()
        if worker:
            os.close(start)
            _watch(worker, started, link, others)
    except OSError as error:
        with suppress(OSError):
            send_message(link, "failed", error=str(error))
        os._exit(1)
    except BaseException:  # In the keeper nothing may go on to what the worker does.
        if os.getpid() == keeper:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        raise
    tree.die_with_parent(keeper, signal.SIGKILL)
    os.close(started)
    link.close()
    os.setsid()
    # The byte comes when the agent knows of this worker; without it, it asks for another one.
    may_run = os.read(start, 1)
    os.close(start)
    if not may_run:
        os._exit(1)


def _watch(worker: int, started: int, link: socket.socket, others: Iterable[int]) -> NoReturn:
    set_title(["elastic-keeper", f"--worker={worker}"])
    for descriptor in others:
        os.close(descriptor)
    tree.become_subreaper()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pidfd = os.pidfd_open(worker)
    try:
        send_message(link, "started", [pidfd], pid=worker, keeper=os.getpid())
        os.write(started, b"x")
        os.close(started)
    except OSError:
        _end(worker, None)
    poll = select.poll()
    for descriptor in (link.fileno(), pidfd, wake):
        poll.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if pidfd in ready:
            _end(worker, link)
        if link.fileno() in ready:
            _end(worker, None)
        with suppress(BlockingIOError):
            os.read(wake, 4096)
        # Orphans of the worker that ended.
        tree.reap_others({worker})


def _end(worker: int, link: socket.socket | None) -> NoReturn:
    """End the worker, if it has not, and all that came of it; say how it ended before the rest is killed."""
    try:
        if link is None:
            os.kill(worker, signal.SIGKILL)
        else:
            os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
        # What it started (loaders, shells) shares its process group. As long as it is not collected, nobody else can
        # have the group's number.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker, signal.SIGKILL)
        if link is not None:
            _, status = os.waitpid(worker, 0)
            with suppress(OSError):
                send_message(link, "ended", code=os.waitstatus_to_exitcode(status))
        tree.kill_descendants(_PATIENCE)
    finally:
        os._exit(0)
