"""What a user can set for one run of preprocessing, checked before any data is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from elastic_runtime.errors import InputError, UnknownNameError

__all__ = ["PreprocessConfig"]

_CHOICES: Final = {
    "task": ("auto", "classification", "regression"),
    "on_bad_rows": ("fail", "quarantine"),
    "duplicate_rows": ("auto", "bad", "keep"),
    "normalise": ("standard", "none"),
}
_FRACTIONS: Final = ("train_fraction", "validation_fraction", "test_fraction")


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig:
    """Parameters of `preprocess`; wrong ones raise `InputError` when the object is made."""

    source: str
    """A built-in set, or path or fsspec URL of a CSV, Parquet or JSON-lines file or a folder of such."""

    target: str = ""
    """Column to predict; empty only for a built-in set, which has one."""

    task: str = "auto"
    """`classification`, `regression`, or `auto`: decided from the target column."""

    features: Sequence[str] = ()
    """Feature columns in model order; empty means every column that is neither target nor extra."""

    extra_columns: Sequence[str] = ()
    """Columns that are kept as they are for slices and look-ups, never given to the model."""

    schema: Mapping[str, Any] | str | Path | None = None
    """Rules per column, or a YAML or JSON file of them (see the module `rules`); None: inferred."""

    on_bad_rows: str = "fail"
    """`fail` on the first rule that rows break, or `quarantine` these rows and go on."""

    max_quarantine_fraction: float = 0.05
    """Largest share of the rows, 0 to 1, that may be quarantined."""

    duplicate_rows: str = "auto"
    """`bad` (a repeated row breaks a rule), `keep`, or `auto`: keep in a built-in set, bad elsewhere."""

    train_fraction: float = 0.7
    """Share of the rows for training, above 0."""

    validation_fraction: float = 0.15
    """Share of the rows for validation; 0 leaves the split empty."""

    test_fraction: float = 0.15
    """Share of the rows for the test; 0 leaves the split empty."""

    seed: int = 0
    """Seed of the split, from 0; equal seed and rows give an equal split in whatever order the rows come."""

    normalise: str = "standard"
    """`standard`: (x - mean) / std with the statistics of the training split; `none`: values as they are."""

    rows_per_shard: int = 100_000
    """Most rows in one Parquet file, from 1."""

    def __post_init__(self) -> None:
        """Check every field that needs no data."""
        if not isinstance(self.source, str) or not self.source.strip():
            raise InputError(f"source is {self.source!r}: give a built-in set, a path or a URL")
        if not isinstance(self.target, str):
            raise InputError(f"target is {self.target!r}: give the name of a column")
        for field, known in _CHOICES.items():
            if getattr(self, field) not in known:
                raise UnknownNameError.of(field, str(getattr(self, field)), known)
        for field in ("features", "extra_columns"):
            object.__setattr__(self, field, _names(field, getattr(self, field)))
        self._check_roles()
        self._check_numbers()
        if self.schema is not None and not isinstance(self.schema, Mapping | str | Path):
            raise InputError(f"schema is {self.schema!r:.80}: give a mapping of column to rules, or a file")

    def _check_roles(self) -> None:
        if self.target and self.target in self.features:
            raise InputError(f"features has {self.target!r}, which is the target: remove it from features")
        if self.target and self.target in self.extra_columns:
            raise InputError(
                f"extra_columns has {self.target!r}, which is the target and kept anyway: remove it"
            )
        both = [name for name in self.extra_columns if name in self.features]
        if both:
            raise InputError(
                f"extra_columns has {both[0]!r}, which is in features too: name it in one of them"
            )

    def _check_numbers(self) -> None:
        fractions = {name: _number(name, getattr(self, name)) for name in _FRACTIONS}
        for name, value in fractions.items():
            if not 0 <= value <= 1:
                raise InputError(f"{name} is {value}: give a share from 0 to 1")
        if fractions["train_fraction"] == 0:
            raise InputError(
                "train_fraction is 0: give a share above 0, there is nothing to train on otherwise"
            )
        total = math.fsum(fractions.values())
        if abs(total - 1) > 1e-6:
            raise InputError(f"{', '.join(_FRACTIONS)} add up to {total:g}: they must add up to 1")
        if not 0 <= _number("max_quarantine_fraction", self.max_quarantine_fraction) <= 1:
            raise InputError(
                f"max_quarantine_fraction is {self.max_quarantine_fraction}: give a share from 0 to 1"
            )
        for name, low, high in (("seed", 0, 2**63 - 1), ("rows_per_shard", 1, 2**31 - 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise InputError(f"{name} is {value!r}: give a whole number from {low} to {high}")

    @property
    def fractions(self) -> dict[str, float]:
        """Share of the rows by split."""
        return {
            "train": self.train_fraction,
            "validation": self.validation_fraction,
            "test": self.test_fraction,
        }


def _names(field: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise InputError(f"{field} is the text {value!r}: give a list, [{value!r}]")
    try:
        names = tuple(value)
    except TypeError as error:
        raise InputError(f"{field} is {value!r}: give a list of column names") from error
    for name in names:
        if not isinstance(name, str) or not name:
            raise InputError(f"{field} has {name!r}: column names are text that is not empty")
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise InputError(f"{field} has {twice[0]!r} twice: name each column once")
    return names


def _number(field: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise InputError(f"{field} is {value!r}: give a number")
    return float(value)
