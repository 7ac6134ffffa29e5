"""A temporary folder that is gone after the run, or by the next one if this process was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

__all__ = ["scratch_folder"]

_PREFIX = "kfp-elastic-run-"
_LOCK = "lock"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new folder below the system's temporary one; it is removed at the end.

    The path is short, for what steps put there may be Unix sockets (108 characters). A lock that the kernel
    drops with this process tells folders in use from those that a SIGKILL left behind; they are removed here.
    """
    _sweep(Path(tempfile.gettempdir()))
    folder, lock = _locked_folder()
    try:
        with lock:
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _locked_folder() -> tuple[Path, IO[str]]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = (folder / _LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / _LOCK).exists():
            return folder, lock
        # Another run took it for a forgotten one, in the moment before it was locked.
        lock.close()


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            # A folder without a lock file is being made by another run right now.
            if folder.stat().st_uid == os.getuid():
                with (folder / _LOCK).open("r+") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
