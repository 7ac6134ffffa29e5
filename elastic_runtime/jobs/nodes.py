"""How many nodes and workers a job may have: the `-j` and `--nodes` notations."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from elastic_runtime.errors import InputError

__all__ = ["NodeRange", "parse_j", "parse_nodes", "parse_workers"]

_MAX_WORKERS = 100_000
_J = re.compile(r"(?:(?P<low>[0-9]{1,6}):)?(?P<high>[0-9]{1,6})(?:x(?P<workers>[0-9]{1,6}))?")
_NODES = re.compile(r"(?:(?P<low>[0-9]{1,6}):)?(?P<high>[0-9]{1,6})")


@dataclass(frozen=True, kw_only=True)
class NodeRange:
    """Smallest and largest number of nodes, and the workers of each."""

    minimum: int
    """Nodes below which the job waits."""
    maximum: int
    """Nodes that the job starts with and never exceeds."""
    workers: int = 1
    """Training processes of one node."""
    sizes: tuple[int, ...] | None = None
    """The only allowed numbers of nodes, ascending; None allows every number from minimum to maximum."""

    def __str__(self) -> str:
        if self.sizes is not None:
            return ",".join(map(str, self.sizes))
        return str(self.maximum) if self.minimum == self.maximum else f"{self.minimum}:{self.maximum}"

    def largest(self, live: int) -> int:
        """Return the largest allowed number of nodes that is not above `live`; 0 if there is none."""
        if self.sizes is not None:
            return max((size for size in self.sizes if size <= live), default=0)
        return min(live, self.maximum) if live >= self.minimum else 0


def parse_j(text: str) -> NodeRange:
    """Parse torchx's `-j [MIN:]MAXxK` (MAX alone means K = 1).

    Raises `InputError` that names `-j`, the value and the form.
    """
    match = _J.fullmatch(text.strip()) if isinstance(text, str) else None
    form = "-j takes [MIN:]MAXxK, nodes and workers of each, such as 2x1 or 1:3x1"
    if match is None:
        raise InputError(f"-j {text!r}: {form}")
    high = int(match["high"])
    return _checked(f"-j {text!r}", form, int(match["low"] or high), high, int(match["workers"] or 1))


def parse_nodes(text: str, workers: int = 1) -> NodeRange:
    """Parse `--nodes MIN:MAX`, `--nodes N` or a list of allowed sizes such as `1,2,4`.

    Raises `InputError` that names `--nodes`, the value and the form.
    """
    form = "--nodes takes MIN:MAX, one number, or allowed sizes such as 1,2,4"
    where = f"--nodes {text!r}"
    parts = text.strip().split(",")
    if len(parts) > 1:
        if not all(re.fullmatch(r"\s*[0-9]{1,6}\s*", part) for part in parts):
            raise InputError(f"{where}: {form}")
        sizes = tuple(sorted({int(part) for part in parts}))
        _checked(where, form, sizes[0], sizes[-1], workers)
        return NodeRange(minimum=sizes[0], maximum=sizes[-1], workers=workers, sizes=sizes)
    match = _NODES.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{where}: {form}")
    high = int(match["high"])
    return _checked(where, form, int(match["low"] or high), high, workers)


def parse_workers(text: str | int) -> int:
    """Parse `--nproc-per-node K|auto`; `auto` is one worker per visible GPU, or one without any.

    Raises `InputError` for anything else.
    """
    if text == "auto":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            return max(1, len([device for device in visible.split(",") if device.strip() not in ("", "-1")]))
        return max(1, len([name for name in os.listdir("/dev") if re.fullmatch(r"nvidia[0-9]+", name)]))  # noqa: PTH208
    if not re.fullmatch(r"[0-9]{1,6}", str(text)) or int(text) == 0:
        raise InputError(f"--nproc-per-node {text!r}: takes a number of workers from 1, or auto")
    return int(text)


def _checked(where: str, form: str, low: int, high: int, workers: int) -> NodeRange:
    if low < 1 or high < 1:
        raise InputError(f"{where}: a job needs at least one node; {form}")
    if workers < 1:
        raise InputError(f"{where}: a node needs at least one worker; {form}")
    if low > high:
        raise InputError(f"{where}: the minimum {low} is above the maximum {high}; {form}")
    if high * workers > _MAX_WORKERS:
        raise InputError(f"{where}: {high * workers:,} workers are more than the {_MAX_WORKERS:,} allowed")
    return NodeRange(minimum=low, maximum=high, workers=workers)
