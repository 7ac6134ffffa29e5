"""Splits, orders and normalises the rows, so that what is stored depends on the rows only.

Rows are split and ordered by a hash of their content and the seed; statistics come from the training split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from elastic_runtime.datasets import FeatureStatistics
from elastic_runtime.errors import DataError
from elastic_runtime.preprocessing.config import PreprocessConfig
from elastic_runtime.preprocessing.hashing import equal_groups, row_hashes
from elastic_runtime.preprocessing.splitting import SplitPlan, plan_splits
from elastic_runtime.preprocessing.targets import Target

__all__ = ["Arranged", "arrange"]

_MAX_ROUNDS: Final = 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Arranged:
    """The rows in stored order.

    `order` of shape (rows,) gives the position in the input of each stored row, `split_of` of shape (rows,)
    its split, ascending; `stored` of shape (rows, features) the normalised float32. `conflicts` of shape
    (rows,) is in the order of the input and marks rows whose features also occur with another target.
    """

    order: npt.NDArray[np.int64]
    split_of: npt.NDArray[np.int64]
    stored: npt.NDArray[np.float32]
    statistics: dict[str, FeatureStatistics]
    conflicts: npt.NDArray[np.bool_]


def arrange(
    config: PreprocessConfig,
    matrix: npt.NDArray[np.float64],
    target: Target,
    extra: Mapping[str, Any],
    *,
    names: tuple[str, Sequence[str]],
) -> Arranged:
    """Arrange `matrix` of shape (rows, features), `target` and `extra`; `names` are target and features.

    Rows that differ may become equal as float32. They are then put into one group and the split is made
    again, so that no stored feature row is in two splits.

    Raises `DataError` when there are too few rows, or a value is out of range.
    """
    target_name, features = names
    hashes = row_hashes(list(matrix.T))
    rest = row_hashes([target.values.astype(np.float64), *extra.values()])
    groups = hashes
    for _ in range(_MAX_ROUNDS):
        plan = plan_splits(
            groups,
            target.values,
            config.fractions,
            config.seed,
            classes=target.classes,
            target_name=target_name,
        )
        order = _order(plan, hashes, rest)
        split_of = plan.split_of[order]
        statistics = _statistics(features, matrix[order[split_of == 0]])
        stored = _normalised(matrix, order, statistics, config.normalise)
        equal = np.empty(len(order), dtype=np.int64)
        equal[order] = equal_groups(row_hashes(list(stored.T)))
        torn = _torn(equal, plan.split_of)
        if not torn.any():
            return Arranged(
                order=order, split_of=split_of, stored=stored, statistics=statistics, conflicts=plan.conflicts
            )
        groups = _merged(groups, equal, torn)
    raise DataError(
        "the features of many rows differ by less than float32 can tell, so that they cannot be split: "
        "rescale or round the columns"
    )


def _order(
    plan: SplitPlan, hashes: npt.NDArray[np.uint64], rest: npt.NDArray[np.uint64]
) -> npt.NDArray[np.int64]:
    """Return the order of the rows: by split, shuffled inside, decided by content alone to the last tie."""
    keys = (rest[:, 1], rest[:, 0], hashes[:, 1], hashes[:, 0], plan.order_key, plan.split_of)
    return np.lexsort(keys)


def _torn(equal: npt.NDArray[np.int64], split_of: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Mark the rows, of shape (rows,), that share their number in `equal` with a row of another split."""
    low = np.full(int(equal.max()) + 1, np.iinfo(np.int64).max)
    high = np.full(len(low), -1)
    np.minimum.at(low, equal, split_of)
    np.maximum.at(high, equal, split_of)
    return np.asarray((low != high)[equal])


def _merged(
    groups: npt.NDArray[np.uint64], equal: npt.NDArray[np.int64], torn: npt.NDArray[np.bool_]
) -> npt.NDArray[np.uint64]:
    """Return `groups` with those joined that a number in `equal` of a torn row connects."""
    number = equal_groups(groups)
    component = number
    while True:
        # The smallest number spreads over equal stored rows, then over old groups, until nothing changes.
        least = np.full(int(equal.max()) + 1, len(equal))
        np.minimum.at(least, equal[torn], component[torn])
        spread = component.copy()
        spread[torn] = least[equal[torn]]
        least = np.full(int(number.max()) + 1, len(equal))
        np.minimum.at(least, number, spread)
        spread = least[number]
        if np.array_equal(spread, component):
            break
        component = spread
    # The smallest hash stands for all, whatever the order of the rows in the source.
    ranked = np.lexsort((groups[:, 1], groups[:, 0], component))
    _, first, inverse = np.unique(component[ranked], return_index=True, return_inverse=True)
    merged = np.empty_like(groups)
    merged[ranked] = groups[ranked[first[inverse]]]
    return merged


def _statistics(names: Sequence[str], train: npt.NDArray[np.float64]) -> dict[str, FeatureStatistics]:
    low, high = train.min(axis=0), train.max(axis=0)
    constant = low == high
    # Rounding could give a constant column another mean and a tiny deviation.
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.where(constant, low, train.mean(axis=0))
        std = np.where(constant, 1.0, train.std(axis=0))
    for name, value in zip(names, std, strict=True):
        if not np.isfinite(value) or value == 0:
            raise DataError(
                f"column {name!r}: its standard deviation over the training split is {value}, beyond "
                "float64: rescale the column"
            )
    return {
        name: FeatureStatistics(mean=float(mean[i]), std=float(std[i]), min=float(low[i]), max=float(high[i]))
        for i, name in enumerate(names)
    }


def _normalised(
    matrix: npt.NDArray[np.float64],
    order: npt.NDArray[np.int64],
    statistics: Mapping[str, FeatureStatistics],
    normalise: str,
) -> npt.NDArray[np.float32]:
    stored = np.empty(matrix.shape, dtype=np.float32, order="F")
    for i, (name, feature) in enumerate(statistics.items()):
        column = matrix[order, i]
        with np.errstate(over="ignore", under="ignore"):
            if normalise == "standard":
                column = (column - feature.mean) / feature.std
            # -0.0 and 0.0 are one value and get one form.
            stored[:, i] = column.astype(np.float32) + np.float32(0)
        if not np.isfinite(stored[:, i]).all():
            raise DataError(
                f"column {name!r}: a value is beyond float32 with normalise={normalise!r}: rescale"
            )
    return stored
