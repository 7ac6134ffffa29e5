"""What the zygote imports before it forks, each module checked: a fork of threads or of CUDA is not safe."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["OWN", "NotForkSafe", "limit_threads", "preload"]

OWN = (
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",  # The first DistributedDataParallel imports it, which takes a second.
    "numpy",
    "threadpoolctl",
    "elastic_runtime.training.loop",  # What `elastic.run` loads: a worker that joins should not take time for it.
)
"""What nearly every training script needs; one that is not installed is left out."""
_SETTLE = 1.0
"""Seconds in which a thread that a module started may still end."""


class NotForkSafe(Exception):
    """A module started a thread or used CUDA; the text says which and what."""


def limit_threads() -> None:
    """Have libraries start no threads when they are imported, unless the job says how many there are to be."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", os.environ["OMP_NUM_THREADS"])
    # OpenBLAS starts its threads at import; where only OMP_NUM_THREADS is set, the worker sets their number itself.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # `torch.cuda.is_available` then asks the management library, and does not initialise CUDA.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


def preload(modules: Sequence[str], entry: str | None, tell: Callable[[str], None]) -> list[str]:
    """Import torch and `modules`, in this order; return a warning for each that could not be imported.

    `entry` is what the program will have first on its import path; it stays there only meanwhile. `tell` is called
    with the name of each module before its import. Raises `NotForkSafe` that names the first module which is not
    safe to fork, and `ImportError` if there is no torch.
    """
    # The collector would walk all that is imported again and again, and take a third of the time.
    gc.disable()
    tell("torch")
    torch = importlib.import_module("torch")
    # One parallel operation here with more threads hangs every fork.
    torch.set_num_threads(1)
    importlib.import_module("elastic_runtime.worker.torch_exit").keep_context_out_of_collectives()
    importlib.import_module("elastic_runtime.worker.own_stores").serve_own_stores()
    for name in OWN:
        with suppress(ImportError):
            importlib.import_module(name)
    threads = _threads()
    warnings = []
    if entry is not None:
        sys.path.insert(0, entry)
    for name in modules:
        tell(name)
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a user's module does
            traceback.print_exc()
            warnings.append(f"preload {name!r} cannot be imported: {type(error).__name__}: {error}")
        _check(name, threads)
    if entry is not None and entry in sys.path:
        sys.path.remove(entry)
    # The workers' collectors then leave all this alone, and its pages shared.
    gc.freeze()
    return warnings


def _check(name: str, threads: int) -> None:
    deadline = time.monotonic() + _SETTLE
    while _threads() > threads:
        if time.monotonic() > deadline:
            raise NotForkSafe(f"preload {name!r} starts a thread")
        time.sleep(0.01)
    torch = sys.modules.get("torch")
    if (torch is not None and torch.cuda.is_initialized()) or _has_cuda_open():
        raise NotForkSafe(f"preload {name!r} uses CUDA")


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - only their number is wanted


def _has_cuda_open() -> bool:
    """Return whether the CUDA driver is initialised: only it opens this device, the management library does not."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(descriptor.readlink()).startswith("/dev/nvidia-uvm"):
                return True
    return False
