"""Hashes rows by content, so that grouping and order do not depend on where a row stands in the source.

Two 64-bit lanes are kept: among 10^6 different rows, the chance of any two with equal hashes is below 10^-25.
The mixing step is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
generators, OOPSLA 2014). Nothing here depends on PYTHONHASHSEED.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["equal_groups", "row_hashes", "seeded_order"]

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_TEXT_KEYS: Final = ("kfp-elastic-lan1", "kfp-elastic-lan2")
_LANE_SEEDS: Final = (np.uint64(0x243F6A8885A308D3), np.uint64(0x13198A2E03707344))


def row_hashes(columns: Sequence[Any]) -> npt.NDArray[np.uint64]:
    """Return hashes of shape (rows, 2) over `columns`: pyarrow columns or float64 arrays of shape (rows,)."""
    rows = len(columns[0])
    hashes = np.empty((rows, 2), dtype=np.uint64)
    hashes[:] = _LANE_SEEDS
    for column in columns:
        lanes = _lanes(column)
        for lane in range(2):
            hashes[:, lane] = _mix(hashes[:, lane] * _GOLDEN + lanes[lane])
    return hashes


def equal_groups(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return the group number of each row, of shape (rows,), from 0 without a gap: equal for equal hashes."""
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    ordered = hashes[order]
    starts = np.any(ordered[1:] != ordered[:-1], axis=1)
    groups = np.empty(len(hashes), dtype=np.int64)
    groups[order] = np.concatenate([[0], np.cumsum(starts)])[: len(hashes)]
    return groups


def seeded_order(hashes: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """Return sort keys of shape (rows,) that shuffle the rows by `seed` and their content only."""
    start = _mix(np.array([seed], dtype=np.uint64) + _GOLDEN)
    return _mix(hashes[:, 0] ^ start)


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


def _lanes(column: Any) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    if isinstance(column, np.ndarray):
        bits = np.ascontiguousarray(column, dtype=np.float64).view(np.uint64)
        return bits, bits
    null = np.asarray(column.is_null())
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        bits = pc.fill_null(pc.cast(column, pa.int64(), safe=False), 0).to_numpy().view(np.uint64)
        lanes = (bits, bits)
    elif pa.types.is_floating(kind):
        numbers = pc.fill_null(pc.cast(column, pa.float64()), 0.0).to_numpy()
        numbers = np.where(np.isnan(numbers), np.nan, numbers + 0.0)
        lanes = (numbers.view(np.uint64), numbers.view(np.uint64))
    else:
        text = _as_text(column)
        first, second = (pd.util.hash_array(text, hash_key=key) for key in _TEXT_KEYS)
        lanes = (first, second)
    # Missing differs from whatever value stands in its place.
    return _mix(lanes[0] + null.astype(np.uint64)), _mix(lanes[1] ^ (null.astype(np.uint64) * _GOLDEN))


def _as_text(column: Any) -> npt.NDArray[np.object_]:
    if pa.types.is_string(column.type):
        filled = pc.fill_null(column, "")
        return np.asarray(filled.to_pandas(), dtype=object)
    # Dates, nested values: rare, and their Python form is the same on every run.
    return np.array(["" if value is None else str(value) for value in column.to_pylist()], dtype=object)
