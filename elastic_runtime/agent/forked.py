"""Makes a fork of the zygote look like an interpreter that has just started, with the libraries loaded already.

torch and numpy are taken from what is loaded; nothing is imported here, so that the module costs the agent nothing.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import random
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from elastic_runtime.agent.requests import Program

__all__ = ["RootLogger", "become", "default_signals", "seed_of"]

_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class RootLogger:
    """The root logger as it was, so that what a preload did to it is not taken for the program's own."""

    def __init__(self) -> None:
        """Remember it."""
        root = logging.getLogger()
        self._level, self._handlers, self._filters = root.level, root.handlers[:], root.filters[:]

    def restore(self) -> None:
        """Put it back."""
        root = logging.getLogger()
        root.setLevel(self._level)
        root.handlers[:], root.filters[:] = self._handlers, self._filters
        logging.disable(logging.NOTSET)


def become(program: Program) -> None:
    """Take the environment, folder, signals, streams, threads and random numbers that `program` is to have.

    The descriptors 0, 1 and 2 are in place already. Raises `OSError` if the working folder cannot be entered, and
    `RuntimeError` if CUDA was used before the fork.
    """
    gc.enable()
    default_signals()
    os.environ.clear()
    os.environ.update(program.environment)
    os.chdir(program.cwd)
    for stream in (sys.stdout, sys.stderr):
        # Each line reaches the log at once, so that nothing is lost however the process ends.
        with suppress(AttributeError, ValueError):
            stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    _renew_multiprocessing()
    _set_threads(program.environment)
    _seed(seed_of(program.environment))
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda._is_in_bad_fork():
        raise RuntimeError("CUDA was used before this worker was forked: leave out the preload that does")


def default_signals() -> None:
    """Unblock every signal and give it the action that a new interpreter has."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) is signal.SIG_DFL and number not in (signal.SIGINT, *_IGNORED_BY_PYTHON):
            continue
        with suppress(OSError, ValueError):  # The C library keeps some for itself.
            signal.signal(number, signal.SIG_IGN if number in _IGNORED_BY_PYTHON else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def seed_of(environment: Mapping[str, str]) -> int:
    """Return the seed of a worker, 64 bits: the same for the same job seed, rank and round, else another."""
    place = [environment.get(name, "0") for name in ("ELASTIC_SEED", "RANK", "TORCHELASTIC_RESTART_COUNT")]
    return int.from_bytes(hashlib.sha256(":".join(place).encode()).digest()[:8], "little")


def _renew_multiprocessing() -> None:
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.ORIGINAL_DIR = os.getcwd()  # noqa: PTH109 - the same text as it has itself
        process.current_process().authkey = os.urandom(32)


def _set_threads(environment: Mapping[str, str]) -> None:
    """Set what libraries read from the environment when they are imported."""
    number = _first_number(environment.get("OMP_NUM_THREADS"))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(number or len(os.sched_getaffinity(0)))
    if number == 1 or "OPENBLAS_NUM_THREADS" in environment:
        return
    pools: Any = sys.modules.get("threadpoolctl")
    if pools is not None:
        pools.threadpool_limits(limits=number or len(os.sched_getaffinity(0)), user_api="blas")


def _first_number(text: str | None) -> int | None:
    first = (text or "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def _seed(seed: int) -> None:
    """Seed every generator: forks would otherwise draw the same numbers."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
