"""Cutting the rows of a split into slices by one column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_runtime.evaluation.bootstrap import FloatArray, IntArray, Interval

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["MAX_SLICES", "MISSING", "SliceRow", "cut"]

MAX_SLICES = 50
"""A text column with more values keeps the largest slices and pools the rest."""

MISSING = "(missing)"
_FEW_VALUES = 10


@dataclass(frozen=True, kw_only=True)
class SliceRow:
    """Metrics of one slice; `small` flags one with too few rows to judge."""

    label: str
    rows: int
    small: bool
    metrics: dict[str, Interval]


def cut(
    column: pd.Series[Any],
    *,
    bins: int,
    labels: Sequence[str] | None = None,
    scale: tuple[float, float] = (0.0, 1.0),
) -> list[tuple[str, IntArray]]:
    """Return the slices of `column` as (label, row numbers), every row in exactly one of them.

    A numeric or time column with more than ten values is cut at its quantiles into `bins` slices of about
    equal size (fewer when values repeat); any other column gives one slice per value, in rising order for
    numbers, by falling size for text. Missing values are a slice of their own. `labels` are the names of
    integer values (classes). `scale` (mean, std) undoes a feature's normalisation, so that labels are in the
    unit of the source.
    """
    from pandas.api import types

    missing = np.asarray(column.isna())
    present = np.flatnonzero(~missing)
    values = column.iloc[present]
    if labels is not None:
        index = np.asarray(values, dtype=np.int64)
        slices = [(label, present[index == i]) for i, label in enumerate(labels) if (index == i).any()]
    elif types.is_datetime64_any_dtype(values.dtype):
        # Seconds as numbers, so that times can be binned like any other quantity.
        seconds = np.asarray(values.to_numpy(dtype="datetime64[s]").astype(np.int64), dtype=np.float64)
        slices = _numeric(seconds, present, bins, lambda value, _: str(np.datetime64(int(value), "s")))
    elif types.is_numeric_dtype(values.dtype) and not types.is_bool_dtype(values.dtype):
        mean, std = scale
        numbers = np.asarray(values, dtype=np.float64) * std + mean
        slices = _numeric(numbers, present, bins, lambda value, digits: f"{value:.{digits}g}")
    else:
        slices = _textual(values, present)
    if missing.any():
        slices.append((MISSING, np.flatnonzero(missing)))
    return slices


def _numeric(
    values: FloatArray, present: IntArray, bins: int, show: Callable[[float, int], str]
) -> list[tuple[str, IntArray]]:
    distinct = np.unique(values)
    if len(distinct) <= _FEW_VALUES:
        names = _distinguished(distinct, show)
        return [(name, present[values == value]) for name, value in zip(names, distinct, strict=True)]
    # Edges are values that occur ("lower"), so that labels name real values; a bin holds its lower edge.
    edges, repeats = np.unique(
        np.quantile(values, np.linspace(0, 1, bins + 1), method="lower"), return_counts=True
    )
    # A value that fills whole bins (many zeros) gets a slice to itself: the next value is an edge too.
    after = np.searchsorted(distinct, edges[repeats > 1]) + 1
    edges = np.unique(np.concatenate([edges, distinct[after[after < len(distinct)]]]))
    names = _distinguished(edges, show)
    index = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    last = len(edges) - 2
    return [
        (f"{names[i]} to {'' if i == last else 'under '}{names[i + 1]}", present[index == i])
        for i in range(len(edges) - 1)
    ]


def _distinguished(values: FloatArray, show: Callable[[float, int], str]) -> list[str]:
    for digits in range(4, 18):
        names = [show(value, digits) for value in values]
        if len(set(names)) == len(names):
            break
    return names


def _textual(values: pd.Series[Any], present: IntArray) -> list[tuple[str, IntArray]]:
    text = values.astype(str)
    sizes = text.value_counts()
    ordered = sorted(sizes.index, key=lambda name: (-int(sizes[name]), name))
    kept = ordered if len(ordered) <= MAX_SLICES else ordered[: MAX_SLICES - 1]
    names = np.asarray(text, dtype=object)
    slices = [(name, present[names == name]) for name in kept]
    if len(kept) < len(ordered):
        rest = ~text.isin(kept).to_numpy()
        slices.append((f"(other: {len(ordered) - len(kept):,} values)", present[rest]))
    return slices
