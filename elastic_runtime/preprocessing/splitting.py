"""Splits rows by content: equal features stay together and classes keep their shares, in any row order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_runtime.errors import DataError
from elastic_runtime.preprocessing.hashing import equal_groups, seeded_order

__all__ = ["SplitPlan", "plan_splits"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitPlan:
    """Where each row goes.

    `split_of` of shape (rows,) indexes the splits in the order of the fractions; `order_key` of shape (rows,)
    shuffles them; `groups` counts different feature rows, and `conflicts` of shape (rows,) marks rows whose
    features also occur with another target.
    """

    split_of: npt.NDArray[np.int64]
    order_key: npt.NDArray[np.uint64]
    groups: int
    conflicts: npt.NDArray[np.bool_]


def plan_splits(
    feature_hashes: npt.NDArray[np.uint64],
    target: npt.NDArray[Any],
    fractions: Mapping[str, float],
    seed: int,
    *,
    classes: Sequence[str] | None,
    target_name: str,
) -> SplitPlan:
    """Plan the split of rows with `feature_hashes` of shape (rows, 2) and `target` of shape (rows,).

    With `classes`, `target` is the class index and each class is divided by the fractions on its own (at least
    one feature row in each split). Rows of equal features go to one split, so that the
    model is never tested on what it was trained on; such a group counts for the class that most of it has.

    Raises `DataError` when there are too few rows.
    """
    shares = np.array(list(fractions.values()), dtype=np.float64)
    wanted = int((shares > 0).sum())
    group_of = equal_groups(feature_hashes)
    sizes = np.bincount(group_of)
    key = seeded_order(feature_hashes, seed)
    group_key = np.zeros(len(sizes), dtype=np.uint64)
    group_key[group_of] = key
    second = np.zeros(len(sizes), dtype=np.uint64)
    second[group_of] = feature_hashes[:, 1]
    label = target if classes is not None else np.zeros(len(target), dtype=np.int64)
    group_label = _majority(group_of, label.astype(np.int64), len(sizes))
    names = classes if classes is not None else ("",)
    _refuse_too_few(np.bincount(group_label, minlength=len(names)), wanted, classes, target_name)

    split_of_group = np.empty(len(sizes), dtype=np.int64)
    order = np.lexsort((second, group_key, group_label))
    starts = np.searchsorted(group_label[order], np.arange(len(names) + 1))
    carry = np.zeros(len(shares))
    for start, stop in pairwise(starts):
        members = order[start:stop]
        rows = sizes[members]
        quotas, carry = _quotas(int(rows.sum()), shares, carry)
        split_of_group[members] = _divide(rows, shares, quotas)
    return SplitPlan(
        split_of=split_of_group[group_of],
        order_key=key,
        groups=len(sizes),
        conflicts=_conflicts(group_of, target, len(sizes)),
    )


def _majority(
    group_of: npt.NDArray[np.int64], label: npt.NDArray[np.int64], groups: int
) -> npt.NDArray[np.int64]:
    """Return the most frequent label of each group (the smaller one of equals), of shape (groups,)."""
    width = int(label.max(initial=0)) + 1
    pairs, counts = np.unique(group_of * width + label, return_counts=True)
    group, found = pairs // width, pairs % width
    ranked = np.lexsort((-found, counts, group))
    result = np.empty(groups, dtype=np.int64)
    # The last write wins: the pair with the highest count and, among equals, the smallest label.
    result[group[ranked]] = found[ranked]
    return result


def _conflicts(
    group_of: npt.NDArray[np.int64], target: npt.NDArray[Any], groups: int
) -> npt.NDArray[np.bool_]:
    low = np.full(groups, np.inf)
    high = np.full(groups, -np.inf)
    np.minimum.at(low, group_of, target)
    np.maximum.at(high, group_of, target)
    return np.asarray((low != high)[group_of])


def _refuse_too_few(
    counts: npt.NDArray[np.int64], wanted: int, classes: Sequence[str] | None, target_name: str
) -> None:
    few = np.flatnonzero(counts < wanted)
    if not len(few):
        return
    fix = "add rows, or set validation_fraction or test_fraction to 0"
    if classes is None:
        raise DataError(f"too few rows: {counts[0]} different feature rows for {wanted} splits: {fix}")
    shown = ", ".join(f"{classes[index]!r} has {counts[index]}" for index in few[:5])
    more = f" and {len(few) - 5} more classes" if len(few) > 5 else ""
    hint = (
        "; so many small classes look like an identifier or a number: is it the right target and task?"
        if len(few) > 20
        else ""
    )
    raise DataError(
        f"column {target_name!r}: too few rows for a stratified split: class {shown}{more}, each class "
        f"needs {wanted} different feature rows, one for each split: {fix}, or leave the class out{hint}"
    )


def _divide(
    sizes: npt.NDArray[np.int64], shares: npt.NDArray[np.float64], quotas: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the split of each group in turn, so that the rows of the splits come close to `quotas`."""
    middle = np.cumsum(sizes) - sizes / 2
    last = int(np.flatnonzero(shares > 0)[-1])
    split_of = np.minimum(np.searchsorted(np.cumsum(quotas), middle, side="right"), last)
    split_of = split_of.astype(np.int64)
    # Large groups can leave a split without any: take one from the split with most groups.
    counts = np.bincount(split_of, minlength=len(shares))
    for split in np.flatnonzero((shares > 0) & (counts == 0)):
        donor = int(np.argmax(counts))
        split_of[np.flatnonzero(split_of == donor)[-1]] = split
        counts = np.bincount(split_of, minlength=len(shares))
    return split_of


def _quotas(
    total: int, shares: npt.NDArray[np.float64], carry: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the rows of each split of a class of `total` rows, and what rounding leaves for the next class.

    Without the carry, one split would win every tie: of 100 classes of 10 rows, validation would get 200 rows
    and the test 100.
    """
    exact = shares * total + carry
    quotas = np.clip(np.floor(exact + 1e-9), 0, total).astype(np.int64)
    used = shares > 0
    quotas[~used] = 0
    while quotas.sum() < total:
        quotas[int(np.argmax(np.where(used, exact - quotas, -np.inf)))] += 1
    while quotas.sum() > total:
        quotas[int(np.argmin(np.where(quotas > 0, exact - quotas, np.inf)))] -= 1
    for split in np.flatnonzero(used & (quotas == 0)):
        quotas[split] += 1
        quotas[int(np.argmax(quotas))] -= 1
    # Only rounding is carried on; what small classes need for a row in each split is not paid back by others.
    return quotas, np.clip(exact - quotas, -1, 1)
