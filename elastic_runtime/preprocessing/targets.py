"""Decides the task and turns the target column into numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from elastic_runtime.datasets.manifest import CLASSIFICATION, REGRESSION
from elastic_runtime.errors import DataError, InputError
from elastic_runtime.preprocessing.columns import NUMERIC, OTHER, TypedColumn
from elastic_runtime.preprocessing.rules import BOOLEAN, INTEGER, NUMBER

__all__ = ["MAX_INFERRED_CLASSES", "Target", "encode_target", "infer_task"]

MAX_INFERRED_CLASSES: Final = 20
_ROWS_A_CLASS: Final = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """The target of shape (rows,): the class index (int64) with `classes`, or the raw value (float64)."""

    values: npt.NDArray[Any]
    classes: tuple[str, ...] | None


def infer_task(column: TypedColumn) -> tuple[str, str]:
    """Return the task for the target `column` and why, in words.

    Text and booleans are classes; so are at most `MAX_INFERRED_CLASSES` different whole numbers that come
    three times each on average. Anything else is a regression.
    """
    if column.kind not in (INTEGER, NUMBER):
        return CLASSIFICATION, f"the target is {column.kind}"
    present = column.numbers[np.isfinite(column.numbers)]
    distinct = np.unique(present)
    if np.any(distinct != np.floor(distinct)):
        return REGRESSION, "the target has decimals"
    if len(distinct) <= MAX_INFERRED_CLASSES and len(distinct) * _ROWS_A_CLASS <= len(present):
        return CLASSIFICATION, f"the target has {len(distinct)} different whole numbers"
    return REGRESSION, f"the target has {len(distinct):,} different whole numbers"


def encode_target(column: TypedColumn, task: str, rows: npt.NDArray[np.int64]) -> Target:
    """Encode `rows` of the target `column`, which all have a value.

    Classes are ordered by number where all labels are whole numbers, else by text. Raises `DataError` when
    there is one class only.
    """
    if task == REGRESSION:
        if column.kind not in NUMERIC:
            raise InputError(
                f"task is {REGRESSION!r} but the target {column.name!r} holds {column.kind}: "
                f"set task to {CLASSIFICATION!r} or name another target"
            )
        return Target(values=column.numbers[rows], classes=None)
    if column.kind == OTHER:
        raise InputError(
            f"the target {column.name!r} holds {column.values.type}, not labels: name another target"
        )
    labels = _labels(column).take(pa.array(rows))
    found = pc.unique(labels).to_pylist()
    classes = tuple(sorted(found, key=_order(found)))
    if len(classes) < 2:
        raise DataError(
            f"column {column.name!r}: all rows have the class {classes[0]!r}: a classification needs two"
        )
    index = pc.index_in(labels, value_set=pa.array(classes, pa.string()))
    return Target(values=np.asarray(index.to_numpy(zero_copy_only=False)).astype(np.int64), classes=classes)


def _labels(column: TypedColumn) -> Any:
    values = column.values
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
    if column.kind == NUMBER:
        # 1.0 and 1 are one label: a file with an empty cell shows whole numbers as floats.
        whole = bool(pc.all(pc.equal(values, pc.floor(values))).as_py())
        return pc.cast(pc.cast(values, pa.int64()), pa.string()) if whole else pc.cast(values, pa.string())
    if column.kind == BOOLEAN:
        return pc.if_else(values, "true", "false")
    return pc.cast(values, pa.string())


def _order(labels: list[str]) -> Any:
    try:
        numbers = {label: int(label) for label in labels}
    except ValueError:
        return None
    return (lambda label: numbers[label]) if len(set(numbers.values())) == len(labels) else None
