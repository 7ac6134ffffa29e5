"""Decides what type a column has and converts it, remembering the rows whose value is not of that type."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from elastic_runtime.preprocessing.rules import BOOLEAN, INTEGER, NUMBER, TEXT

__all__ = ["EMPTY", "NUMERIC", "OTHER", "TypedColumn", "type_column"]

EMPTY: Final = "empty"
OTHER: Final = "other"
NUMERIC: Final = (INTEGER, NUMBER, BOOLEAN)
_ARROW: Final = {INTEGER: pa.int64(), NUMBER: pa.float64(), BOOLEAN: pa.bool_(), TEXT: pa.string()}

_MISSING: Final = pa.array(["NA", "N/A", "n/a", "NaN", "nan", "NAN", "null", "NULL", "None", "<NA>", "#N/A"])
_NUMBER: Final = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_INFINITE: Final = r"(?i)^[+-]?inf(inity)?$"
_ZERO_PADDED: Final = r"^[+-]?0\d+$"
_MOSTLY: Final = 0.5


@dataclass(frozen=True, kw_only=True, eq=False)
class TypedColumn:
    """A column of one kind: `integer`, `number`, `boolean`, `text`, `empty` or `other` (dates, nested …).

    `values` has int64, float64, bool or string (`other`: its own type); missing values and those of a
    wrong type are null. `wrong` of shape (rows,) marks the latter.
    """

    name: str
    kind: str
    values: Any
    wrong: npt.NDArray[np.bool_]

    @cached_property
    def missing(self) -> npt.NDArray[np.bool_]:
        """Rows without a value, of shape (rows,)."""
        null: npt.NDArray[np.bool_] = self.values.is_null().to_numpy(zero_copy_only=False)
        return null & ~self.wrong

    @cached_property
    def numbers(self) -> npt.NDArray[np.float64]:
        """The values as float64 of shape (rows,), NaN where there is none. For numeric kinds only."""
        assert self.kind in NUMERIC, self.kind
        numbers = _cast(self.values, pa.float64()).to_numpy(zero_copy_only=False).astype(np.float64)
        # -0.0 equals 0.0 but has other bits, which hashes and files would show.
        return np.asarray(numbers + 0.0)


def type_column(
    name: str,
    column: Any,
    *,
    untyped: bool,
    dtype: str | None = None,
    numeric: bool = False,
    tolerant: bool = False,
    label: bool = False,
) -> TypedColumn:
    """Return `column` (a pyarrow chunked array) with its kind decided.

    `untyped` text may stand for numbers. `dtype` sets the kind; `numeric` says that it must be a number;
    `tolerant` takes a column of mostly numbers for one with mistakes; `label` keeps true and false as text.
    Zero-padded digits such as "001" are text, unless `dtype` or `numeric` says otherwise.
    """
    column, kind = _normalised(column)
    if kind == TEXT and label:
        column = _empty_as_null(column)
    none = np.zeros(len(column), dtype=np.bool_)
    if kind == TEXT and (untyped or numeric or dtype in NUMERIC):
        if untyped:
            column = _empty_as_null(column)
        return _type_text(name, column, dtype, numeric=numeric, tolerant=tolerant, label=label)
    if column.null_count == len(column):
        return TypedColumn(name=name, kind=EMPTY, values=_cast(column, pa.string(), safe=False), wrong=none)
    if dtype is None or dtype == kind or (dtype == NUMBER and kind in NUMERIC):
        target = _ARROW.get(dtype or kind)
        return TypedColumn(
            name=name,
            kind=dtype or kind,
            values=column if target is None else _cast(column, target),
            wrong=none,
        )
    if kind == OTHER:
        return TypedColumn(name=name, kind=OTHER, values=column, wrong=none)
    if dtype == TEXT:
        return TypedColumn(name=name, kind=TEXT, values=_cast(column, pa.string()), wrong=none)
    return _narrow(name, _cast(column, pa.float64()), dtype)


def _normalised(column: Any) -> tuple[Any, str]:
    """Return the column in one of few types, NaN as null, and its kind."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if pa.types.is_null(kind):
        return column.cast(pa.string()), TEXT
    if pa.types.is_boolean(kind):
        return column, BOOLEAN
    if pa.types.is_integer(kind):
        try:
            return column.cast(pa.int64()), INTEGER
        except pa.ArrowInvalid:
            return column.cast(pa.float64(), safe=False), NUMBER
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        column = column.cast(pa.float64())
        return pc.if_else(pc.is_nan(column), pa.scalar(None, pa.float64()), column), NUMBER
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return column.cast(pa.string()), TEXT
    return column, OTHER


def _cast(column: Any, target: Any, *, safe: bool = True) -> Any:
    if column.type == target:
        return column
    return pc.cast(column, target, safe=safe and not (pa.types.is_integer(column.type)))


def _empty_as_null(column: Any, trimmed: Any | None = None) -> Any:
    trimmed = pc.utf8_trim_whitespace(column) if trimmed is None else trimmed
    return pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, pa.string()), column)


def _type_text(
    name: str, column: Any, dtype: str | None, *, numeric: bool, tolerant: bool, label: bool
) -> TypedColumn:
    none = np.zeros(len(column), dtype=np.bool_)
    as_text = TypedColumn(name=name, kind=TEXT, values=column, wrong=none)
    if dtype == TEXT:
        return as_text
    trimmed = pc.utf8_trim_whitespace(column)
    trimmed = _empty_as_null(trimmed, trimmed)
    known = pc.if_else(pc.is_in(trimmed, value_set=_MISSING), pa.scalar(None, pa.string()), trimmed)
    present = len(known) - known.null_count
    if present == 0:
        # A text column may hold nothing but "NA", which then is a text.
        empty = trimmed.null_count == len(trimmed) or numeric or dtype is not None
        return TypedColumn(name=name, kind=EMPTY, values=known, wrong=none) if empty else as_text
    if dtype == BOOLEAN or (not label and dtype is None and _share(_is_boolean(known), present) == 1):
        truth = _is_boolean(known, digits=dtype == BOOLEAN)
        wrong = _flags(pc.and_(pc.is_valid(known), pc.invert(truth)))
        values = pc.if_else(truth, pc.is_in(pc.utf8_lower(known), value_set=pa.array(["true", "1"])), None)
        return TypedColumn(name=name, kind=BOOLEAN, values=values, wrong=wrong)
    keep_padded = dtype is None and not numeric
    try:
        numbers, bad = _parse(known), none
    except pa.ArrowInvalid:
        number = pc.or_(pc.match_substring_regex(known, _NUMBER), pc.match_substring_regex(known, _INFINITE))
        share = _share(number, present)
        if keep_padded and (not tolerant or share <= _MOSTLY or _any(_padded(known))):
            return as_text
        bad = _flags(pc.invert(number))
        numbers = _parse(pc.if_else(number, known, pa.scalar(None, pa.string())))
    numbers = pc.if_else(pc.is_nan(numbers), pa.scalar(None, pa.float64()), numbers)
    if dtype == INTEGER:
        return _narrow(name, numbers, INTEGER, bad)
    if dtype is None and not bad.any() and bool(pc.all(pc.equal(numbers, pc.floor(numbers))).as_py()):
        if keep_padded and _any(_padded(known)):
            return as_text
        whole = _as_integers(known)
        if whole is not None:
            return TypedColumn(name=name, kind=INTEGER, values=whole, wrong=none)
        if not numeric and _any(pc.match_substring_regex(known, r"^[+-]?\d{19,}$")):
            # So many digits are an identifier; a float would change it.
            return as_text
    return TypedColumn(name=name, kind=NUMBER, values=numbers, wrong=bad)


def _narrow(name: str, numbers: Any, dtype: str, wrong: npt.NDArray[np.bool_] | None = None) -> TypedColumn:
    """Convert float64 `numbers` to `dtype` (integer or boolean); others than whole (0 or 1) are wrong."""
    values = numbers.to_numpy(zero_copy_only=False) if isinstance(numbers, pa.Array) else numbers.to_numpy()
    null = np.isnan(values)
    with np.errstate(invalid="ignore"):
        fits = (values == np.floor(values)) & (np.abs(values) < 2**63)
        fits = np.isin(values, (0.0, 1.0)) if dtype == BOOLEAN else fits
    bad = ~fits & ~null
    whole = np.where(fits, values, 0.0).astype(np.int64)
    typed = pa.array(whole, pa.int64(), mask=~fits)
    if dtype == BOOLEAN:
        typed = typed.cast(pa.bool_())
    return TypedColumn(name=name, kind=dtype, values=typed, wrong=bad if wrong is None else bad | wrong)


def _padded(text: Any) -> Any:
    return pc.match_substring_regex(text, _ZERO_PADDED)


def _parse(text: Any) -> Any:
    try:
        return pc.cast(text, pa.float64())
    except pa.ArrowInvalid:
        # Arrow knows no plus sign.
        return pc.cast(pc.replace_substring_regex(text, pattern=r"^\+", replacement=""), pa.float64())


def _as_integers(text: Any) -> Any | None:
    try:
        return pc.cast(pc.replace_substring_regex(text, pattern=r"^\+", replacement=""), pa.int64())
    except pa.ArrowInvalid:
        return None


def _is_boolean(text: Any, *, digits: bool = False) -> Any:
    return pc.match_substring_regex(text, r"(?i)^(true|false|0|1)$" if digits else r"(?i)^(true|false)$")


def _flags(mask: Any) -> npt.NDArray[np.bool_]:
    flags = pc.fill_null(mask, False)
    return np.asarray(
        flags.to_numpy(zero_copy_only=False) if isinstance(flags, pa.Array) else flags.to_numpy(), np.bool_
    )


def _any(mask: Any) -> bool:
    return bool(pc.any(mask).as_py())


def _share(mask: Any, present: int) -> float:
    return float((pc.sum(mask).as_py() or 0) / present)
