"""The checksum of a training module; a pipeline carries it so that KFP's cache notices an edited script."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from elastic_runtime.errors import MissingFileError

__all__ = ["module_sha256"]


def module_sha256(module: str) -> str:
    """Return the SHA-256 of the source file of `module`, without importing it (its parent packages are).

    Raises `MissingFileError` when there is no such file.
    """
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None or found.origin is None or not Path(found.origin).is_file():
        raise MissingFileError(
            f"module {module!r} has no source file: check its name, or install its package"
        )
    return hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()
