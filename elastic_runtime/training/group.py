"""The process group of one round: made, interrupted from another thread, and destroyed, many times in one process."""

from __future__ import annotations

import ctypes
import datetime
import logging
import socket
import sys
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from elastic_runtime.errors import ElasticError
from elastic_runtime.training.channel import Go
from elastic_runtime.training.sockets import shut_down, socket_inodes

__all__ = ["RoundGroup", "Stuck", "backend_for", "is_broken_collective"]

_logger = logging.getLogger(__name__)
_STORE = datetime.timedelta(seconds=30)
_STORE_TRY = datetime.timedelta(seconds=1)
_JOIN = datetime.timedelta(seconds=60)
_COLLECTIVE = datetime.timedelta(minutes=30)
"""torch's own limit for gloo. Silent peers are found by the agent, long before."""
_SLICE = datetime.timedelta(milliseconds=100)
_HOPELESS = 0.2
"""Seconds after an interruption, which takes milliseconds, when a collective is taken for stuck. If it only was slow,
nothing is lost but its buffers."""
_WIDER = 0.5
"""Seconds after which an interruption takes every connection made since the join: those of a script's own groups."""
_SIGNS = ("gloo", "nccl", "connection", "socket", "broken pipe", "timed out", "timeout", "process group")


class Stuck(RuntimeError):
    """A collective of an interrupted group does not end: gloo has lost it. Its buffers and its group are given up."""


def backend_for(device: torch.device) -> str:
    """Return the backend for tensors on `device`: gloo, and NCCL beside it for CUDA."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def is_broken_collective(error: BaseException | None) -> bool:
    """Whether `error`, or what caused it, looks like a collective that lost a peer."""
    if isinstance(error, ElasticError):
        return False
    seen = 0
    while error is not None and seen < 20:
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def _listens(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=_STORE_TRY.total_seconds()).close()
    except TimeoutError:
        return True  # Its queue is full: it is there.
    except OSError:
        return False
    return True


class RoundGroup:
    """The default process group of the present round, if there is one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: frozenset[int] = frozenset()
        self._own: frozenset[int] | None = frozenset()
        self._interrupted: float | None = None
        self._hook = sys.excepthook
        self._stuck: dist.Work | None = None
        self._given_up: list[tuple[Any, dist.Work]] = []
        self.made = False
        """Whether there is a group that this object made."""

    @property
    def sockets(self) -> frozenset[int]:
        """Inodes of the connections of the group."""
        return self._own or frozenset()

    def make(self, go: Go) -> None:
        """Make the group of the round `go`. Raises what torch raises when a peer is lost meanwhile, or `interrupt`
        is called."""
        self._reap()
        self._before, self._own, self._interrupted = socket_inodes(), None, None
        # Every init_process_group wraps the hook once more: a thousand rounds would make a chain of a thousand.
        self._hook = sys.excepthook
        self.made = True
        store = self._connect(go.store)
        prefixed = dist.PrefixStore(f"elastic/{go.term}/{go.round}", store)  # type: ignore[attr-defined]
        dist.init_process_group(
            backend_for(self._device),
            store=prefixed,
            rank=go.rank,
            world_size=go.world_size,
            timeout=_JOIN,
        )
        distributed_c10d._set_pg_timeout(_COLLECTIVE)
        self._own = socket_inodes() - self._before

    def _connect(self, address: tuple[str, int]) -> Any:
        """Return a client of the round's store. Raises `RuntimeError` soon after `interrupt`, or if the store is gone.

        torch tries a port at which nobody listens any more for twice its timeout, and nothing interrupts that: so the
        timeout is short, and it is asked again as long as somebody listens (a store host may still be starting).
        """
        end = time.monotonic() + _STORE.total_seconds()
        while True:
            try:
                store = dist.TCPStore(  # type: ignore[attr-defined]
                    *address, None, is_master=False, timeout=_STORE_TRY, wait_for_workers=False
                )
            except RuntimeError:
                if self._interrupted is not None or time.monotonic() > end or not _listens(address):
                    raise
            else:
                store.set_timeout(_STORE)
                return store

    def make_from_environment(self) -> None:
        """Make the group that torchrun's variables describe."""
        self._before, self._hook = socket_inodes(), sys.excepthook
        dist.init_process_group(backend_for(self._device))
        self._own = socket_inodes() - self._before
        self.made = True

    def interrupt(self) -> None:
        """Set every thread free that is blocked in this group. Called from any thread, also while it is made."""
        now = time.monotonic()
        first = self._interrupted = now if self._interrupted is None else self._interrupted
        own, before = self._own, self._before
        if own is None or now - first > _WIDER:
            shut_down(
                lambda inode: inode not in before,
                socket.SHUT_RDWR if now - first > _WIDER else socket.SHUT_RD,
            )
        else:
            shut_down(own.__contains__)
        if self._device.type == "cuda":
            with suppress(Exception):
                distributed_c10d._abort_process_group()

    def wait(self, work: dist.Work) -> None:
        """Wait for `work`. Raises its error, or `Stuck` if it does not end though the group was interrupted."""
        if self._device.type == "cuda":
            work.wait()  # enqueues only; NCCL is aborted by `interrupt`
            return
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError:
                if work.is_completed():
                    raise
                since = self._interrupted
                if since is not None and time.monotonic() - since > _HOPELESS:
                    self._stuck = work
                    raise Stuck("a gloo collective did not end when its connections were closed") from None

    def destroy(self) -> None:
        """Destroy the group, also one that was only half made. Its threads and sockets are gone afterwards.

        Not those of a group in which a collective is stuck: its destructor would wait for it.
        """
        if not self.made:
            return
        if self._own is None or self._interrupted is not None:
            self.interrupt()
        if dist.is_initialized():
            if self._stuck is not None:
                # A reference that is counted but not held: at the end of the process nobody waits for the group either.
                group = dist.group.WORLD
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
                self._given_up.append((group, self._stuck))
                _logger.warning("process group given up: a collective is stuck in it; until it times out")
            try:
                dist.destroy_process_group()
            except RuntimeError as error:
                _logger.warning("process group not destroyed in order: reason=%s", error)
        sys.excepthook = self._hook
        self._own = frozenset()
        self._interrupted = None
        self._stuck = None
        self.made = False

    def _reap(self) -> None:
        """Destroy the groups that were given up and are free by now."""
        for entry in [one for one in self._given_up if one[1].is_completed()]:
            self._given_up.remove(entry)
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(entry[0]))
