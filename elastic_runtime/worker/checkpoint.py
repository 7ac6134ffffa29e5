"""Checkpoints of a small training state: written whole or not at all, and the newest valid one is loaded.

A checkpoint is one file. It is written under a temporary name, synced, and renamed, so that a reader never sees
half of one; its sha256 stands in its name, so that a flipped bit or a cut file is noticed and the one before it is
used instead. Files are read with `weights_only=True`: nothing in them is executed.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

__all__ = ["load", "save"]

_logger = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d+)-([0-9a-f]{16})\.pt")


def save(folder: str | Path | None, state: dict[str, Any], *, step: int, keep: int = 2) -> Path | None:
    """Write `state` (tensors, numbers, text, and containers of them) as the checkpoint of `step`.

    Call it on one rank. The newest `keep` checkpoints stay. Without a folder nothing is saved. Returns the file.
    Raises `OSError` if it cannot be written; then the older checkpoints are untouched.
    """
    if folder is None:
        return None
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save({"step": step, "state": state}, buffer)
    content = buffer.getvalue()
    target = folder / f"step-{step:010d}-{hashlib.sha256(content).hexdigest()[:16]}.pt"
    temporary = folder / f".{target.name}.{os.getpid()}"
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(folder)
    for old in _newest_first(folder)[keep:]:
        old.unlink(missing_ok=True)
    return target


def load(folder: str | Path | None) -> tuple[dict[str, Any], int] | None:
    """Return the state and step of the newest valid checkpoint in `folder`, on the CPU; None if there is none.

    A damaged one is passed over with a warning that says why. Without a folder there is none.
    """
    if folder is None:
        return None
    for path in _newest_first(Path(folder)):
        try:
            content = path.read_bytes()
        except OSError as error:
            _logger.warning("checkpoint passed over: file=%s reason=%s", path.name, error)
            continue
        match = _NAME.fullmatch(path.name)
        if match is None or hashlib.sha256(content).hexdigest()[:16] != match[2]:
            _logger.warning(
                "checkpoint passed over: file=%s reason=%s", path.name, "its checksum does not match"
            )
            continue
        stored = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return stored["state"], int(stored["step"])
    return None


def _newest_first(folder: Path) -> list[Path]:
    with suppress(FileNotFoundError):
        return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)
    return []


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
