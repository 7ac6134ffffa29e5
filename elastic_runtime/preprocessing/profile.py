"""Sums up a preprocessed set for the data report: small, and drawn later without the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from elastic_runtime.datasets.manifest import REGRESSION, Manifest
from elastic_runtime.preprocessing.config import PreprocessConfig
from elastic_runtime.preprocessing.records import Records
from elastic_runtime.preprocessing.roles import Roles
from elastic_runtime.preprocessing.rules import INTEGER, ColumnRule
from elastic_runtime.preprocessing.validation import Violation

__all__ = ["MAX_HISTOGRAMS", "ColumnProfile", "DataProfile", "Histogram", "Problem", "make_profile"]

MAX_HISTOGRAMS: Final = 12
_BINS: Final = 24
_LEAK: Final = 0.99999


@dataclass(frozen=True, kw_only=True)
class ColumnProfile:
    """One column of the source: its role, type, rules, and how many of its values are missing or wrong."""

    name: str
    role: str
    kind: str
    rule: str
    missing: int
    wrong: int


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Share of the rows per bin, by split; `edges` has one more entry than each list of shares."""

    name: str
    edges: tuple[float, ...]
    shares: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A broken rule: where, how many rows, and the first of them by number."""

    column: str | None
    rule: str
    rows: int
    examples: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DataProfile:
    """What the data report shows beside the manifest.

    `spread` has, per feature, the quantiles 0, 5, 50, 95 and 100 % in standard deviations of the training
    split.
    `association` is per feature between 0 and 1: the square root of the share of its variance that the class
    explains, or the absolute correlation with the target.
    """

    task_reason: str
    columns: tuple[ColumnProfile, ...]
    problems: tuple[Problem, ...]
    constant_features: tuple[str, ...]
    conflicting_rows: int
    conflict_examples: tuple[str, ...]
    class_counts: Mapping[str, tuple[int, ...]]
    target_histogram: Histogram | None
    histograms: tuple[Histogram, ...]
    spread: tuple[tuple[float, ...], ...]
    association: tuple[float, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


def make_profile(
    *,
    config: PreprocessConfig,
    manifest: Manifest,
    roles: Roles,
    rules: Mapping[str, ColumnRule],
    records: Records,
    violations: Sequence[Violation],
    matrix: npt.NDArray[np.float64],
    target: npt.NDArray[Any],
    slices: Mapping[str, slice],
    conflicts: npt.NDArray[np.int64],
    notes: Sequence[str],
) -> DataProfile:
    """Sum up `matrix` of shape (rows, features), before normalisation, and `target` of shape (rows,)."""
    statistics = manifest.statistics
    constant = tuple(name for name in manifest.features if statistics[name].min == statistics[name].max)
    association = _associations(matrix, target, manifest)
    shown = _most_telling(manifest.features, association, constant)
    classes = manifest.classes
    counts = {
        name: tuple(np.bincount(target[part], minlength=len(classes)).tolist()) if classes is not None else ()
        for name, part in slices.items()
    }
    return DataProfile(
        task_reason=roles.task_reason,
        columns=tuple(_column(name, roles, rules) for name in roles.columns),
        problems=_problems(records, violations),
        constant_features=constant,
        conflicting_rows=len(conflicts),
        conflict_examples=tuple(_place(records, row) for row in np.sort(conflicts)[:10]),
        class_counts=counts,
        target_histogram=_histogram(manifest.target, target, slices) if classes is None else None,
        histograms=tuple(_histogram(manifest.features[i], matrix[:, i], slices) for i in shown),
        spread=tuple(
            tuple(
                (
                    (np.quantile(matrix[:, i], (0, 0.05, 0.5, 0.95, 1)) - statistics[name].mean)
                    / statistics[name].std
                )
                .round(6)
                .tolist()
            )
            for i, name in enumerate(manifest.features)
        ),
        association=tuple(association),
        warnings=tuple(_warnings(manifest, roles, matrix, association, target)),
        notes=tuple(notes),
    )


def _column(name: str, roles: Roles, rules: Mapping[str, ColumnRule]) -> ColumnProfile:
    role = "feature" if name in roles.features else "extra" if name in roles.extra_columns else "checked only"
    column = roles.columns[name]
    return ColumnProfile(
        name=name,
        role="target" if name == roles.target else role,
        kind=column.kind,
        rule=rules[name].describe() if name in rules else "",
        missing=int(column.missing.sum()),
        wrong=int(column.wrong.sum()),
    )


def _problems(records: Records, violations: Sequence[Violation]) -> tuple[Problem, ...]:
    found = [
        Problem(
            column=violation.column,
            rule=violation.rule,
            rows=len(violation.rows),
            examples=tuple(_place(records, row) for row in violation.rows[:10]),
        )
        for violation in violations
    ]
    by_rule: dict[str, list[str]] = {}
    for broken in records.malformed:
        shown = str(broken.row) if len(records.files) == 1 else f"{broken.row} of {broken.file}"
        # A JSON error names a position, which differs from row to row.
        by_rule.setdefault(broken.rule.split(" (")[0], []).append(shown)
    for rule, rows in by_rule.items():
        found.append(Problem(column=None, rule=rule, rows=len(rows), examples=tuple(rows[:10])))
    return tuple(found)


def _place(records: Records, row: int) -> str:
    number = str(records.row_of[row])
    return number if len(records.files) == 1 else f"{number} of {records.files[records.file_of[row]]}"


def _histogram(name: str, values: npt.NDArray[Any], slices: Mapping[str, slice]) -> Histogram:
    low, high = float(values.min()), float(values.max())
    if low == high:
        low, high = low - 0.5, high + 0.5
    distinct = np.unique(values)
    if len(distinct) <= _BINS and np.all(distinct == np.floor(distinct)) and high - low < _BINS:
        # Whole numbers get a bin each, centred, or bins would fall between them.
        edges = np.arange(np.floor(low) - 0.5, np.ceil(high) + 1, 1.0)
    else:
        edges = np.linspace(low, high, _BINS + 1)
    shares = {}
    for split, part in slices.items():
        counts, _ = np.histogram(values[part], bins=edges)
        shares[split] = tuple((counts / max(1, counts.sum())).tolist())
    return Histogram(name=name, edges=tuple(edges.tolist()), shares=shares)


def _associations(
    matrix: npt.NDArray[np.float64], target: npt.NDArray[Any], manifest: Manifest
) -> list[float]:
    found = []
    for i, name in enumerate(manifest.features):
        statistics = manifest.statistics[name]
        # Scaled first, so that squares of large values do not overflow.
        x = (matrix[:, i] - statistics.mean) / statistics.std
        x = x - x.mean()
        total = float(x @ x)
        if total <= 0:
            found.append(0.0)
            continue
        if manifest.classes is not None:
            sums = np.bincount(target, weights=x, minlength=len(manifest.classes))
            sizes = np.maximum(np.bincount(target, minlength=len(manifest.classes)), 1)
            found.append(round(min(1.0, float(sums @ (sums / sizes)) / total) ** 0.5, 6))
        else:
            y = target - target.mean()
            scale = float(np.sqrt(total * (y @ y)))
            found.append(round(min(1.0, abs(float(x @ y)) / scale), 6) if scale > 0 else 0.0)
    return found


def _most_telling(
    features: tuple[str, ...], association: Sequence[float], constant: tuple[str, ...]
) -> list[int]:
    """Return the features to draw, in model order: all, or those most associated with the target."""
    varying = [i for i, name in enumerate(features) if name not in constant]
    chosen = sorted(varying, key=lambda i: (-association[i], i))[:MAX_HISTOGRAMS]
    return sorted(chosen)


def _warnings(
    manifest: Manifest,
    roles: Roles,
    matrix: npt.NDArray[np.float64],
    association: Sequence[float],
    target: npt.NDArray[Any],
) -> list[str]:
    found = []
    rows = len(matrix)
    for i, name in enumerate(manifest.features):
        if association[i] >= _LEAK:
            found.append(
                f"Feature {name!r} tells the target {manifest.target!r} completely: does it leak the answer?"
            )
        elif roles.columns[name].kind == INTEGER and rows > 20 and len(np.unique(matrix[:, i])) == rows:
            low, high = matrix[:, i].min(), matrix[:, i].max()
            if high - low < 2 * rows:
                found.append(
                    f"Feature {name!r} counts through the rows: is it an identifier, for extra_columns?"
                )
    if manifest.task == REGRESSION and float(np.min(target)) == float(np.max(target)):
        found.append(
            f"The target {manifest.target!r} has the same value in all rows: there is nothing to learn."
        )
    if manifest.classes is not None:
        folded: dict[str, list[str]] = {}
        for label in manifest.classes:
            folded.setdefault(label.strip().casefold(), []).append(label)
        for labels in folded.values():
            if len(labels) > 1:
                shown = ", ".join(map(repr, labels))
                found.append(f"Classes {shown} differ only in case or space: are they one class?")
    return found
