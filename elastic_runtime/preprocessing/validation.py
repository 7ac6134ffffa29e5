"""Checks the rows of a source against the rules, given and built in, with pandera."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pandera.pandas as pandera

from elastic_runtime.errors import DataError, InputError
from elastic_runtime.preprocessing.columns import NUMERIC, OTHER, TypedColumn
from elastic_runtime.preprocessing.hashing import equal_groups, row_hashes
from elastic_runtime.preprocessing.records import Records
from elastic_runtime.preprocessing.rules import BOOLEAN, INTEGER, NUMBER, TEXT, ColumnRule

__all__ = ["Violation", "bad_rows_error", "check_rows", "find_duplicates", "quarantine_lines"]

_EXAMPLES: Final = 5
_RULE_OF_TYPE: Final = {
    INTEGER: "not a whole number",
    NUMBER: "not a number",
    BOOLEAN: "neither true nor false",
    TEXT: "not text",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Violation:
    """`rows` (positions, ascending) of `column` break `rule`; without a column: the row as a whole."""

    column: str | None
    rule: str
    rows: npt.NDArray[np.int64]


def check_rows(
    columns: Mapping[str, TypedColumn],
    rules: Mapping[str, ColumnRule],
    *,
    required: Sequence[str],
    finite: Sequence[str],
) -> list[Violation]:
    """Return what the rows of `columns` break.

    Columns in `required` must have a value in each row and those in `finite` no infinite one, within
    float32's range; the rest is as `rules` say. Raises `InputError` for a rule that does not fit the type of
    its column.
    """
    found = [
        Violation(column=name, rule=_RULE_OF_TYPE[column.kind], rows=np.flatnonzero(column.wrong))
        for name, column in columns.items()
        if column.wrong.any()
    ]
    if not columns or not len(next(iter(columns.values())).values):
        return found
    frame = pd.DataFrame({name: _series(column) for name, column in columns.items()})
    # On other than an eager pandas frame, pandera's lazy validation passes in silence.
    assert isinstance(frame, pd.DataFrame)
    schema = pandera.DataFrameSchema(
        {
            name: _column_schema(
                column, rules.get(name, ColumnRule()), required=name in required, finite=name in finite
            )
            for name, column in columns.items()
        }
    )
    try:
        with warnings.catch_warnings():
            # pandera joins the values at fault of all columns; that their types differ is no concern here.
            warnings.simplefilter("ignore", FutureWarning)
            schema.validate(frame, lazy=True)
    except pandera.errors.SchemaErrors as errors:
        found += _violations(errors.failure_cases, columns)
    return found


def find_duplicates(columns: Sequence[Any]) -> Violation | None:
    """Return the rows that repeat an earlier row in all `columns` (pyarrow), or None."""
    groups = equal_groups(row_hashes(columns))
    first = np.full(groups.max(initial=-1) + 1, len(groups), dtype=np.int64)
    np.minimum.at(first, groups, np.arange(len(groups)))
    repeated = np.flatnonzero(first[groups] != np.arange(len(groups)))
    if not len(repeated):
        return None
    return Violation(column=None, rule="repeats an earlier row", rows=repeated)


def _series(column: TypedColumn) -> pd.Series[Any]:
    if column.kind == INTEGER and column.values.null_count:
        # Nullable, because a float would round large identifiers.
        return pd.Series(column.values.to_pandas(types_mapper=None, integer_object_nulls=True), dtype="Int64")
    if column.kind in (INTEGER, NUMBER):
        return pd.Series(column.values.to_pandas())
    return pd.Series(column.values.to_pandas(), dtype=object)


def _column_schema(column: TypedColumn, rule: ColumnRule, *, required: bool, finite: bool) -> Any:
    if column.kind not in NUMERIC and (rule.min is not None or rule.max is not None):
        raise InputError(
            f"schema: column {column.name!r} has min or max but holds {column.kind}: "
            "remove them or set its dtype"
        )
    if column.kind == OTHER and rule.allowed is not None:
        raise InputError(f"schema: column {column.name!r} has allowed but holds no text or number: remove it")
    checks = []
    if rule.min is not None:
        checks.append(pandera.Check.ge(rule.min, error=f"below the minimum {rule.min:g}"))
    if rule.max is not None:
        checks.append(pandera.Check.le(rule.max, error=f"above the maximum {rule.max:g}"))
    if rule.allowed is not None:
        known = _allowed_values(column, rule.allowed)
        error = f"none of the allowed values {', '.join(map(str, rule.allowed))}"
        checks.append(pandera.Check.isin(known, error=error))
    if finite and column.kind == NUMBER:
        limit = float(np.finfo(np.float32).max)
        checks.append(pandera.Check(_is_finite, error="infinite"))
        checks.append(pandera.Check(lambda s: ~(s.abs() > limit) | ~_is_finite(s), error="beyond float32"))
    nullable = not required and (rule.nullable is not False)
    return pandera.Column(
        None, checks=checks, nullable=nullable, unique=rule.unique, report_duplicates="exclude_first"
    )


def _is_finite(series: pd.Series[Any]) -> Any:
    finite = np.isfinite(series.to_numpy(dtype=np.float64, na_value=0.0))
    return pd.Series(finite, index=series.index)


def _allowed_values(column: TypedColumn, allowed: Sequence[str | float | bool]) -> list[Any]:
    """Return `allowed` in the column's own type: 1.0 from JSON stands for the text "1" as well as for 1."""
    if column.kind == TEXT:
        return [_as_text(value) for value in allowed]
    values: list[Any] = []
    for value in allowed:
        try:
            number = {"true": 1.0, "false": 0.0}.get(str(value).lower())
            number = float(value) if number is None else number
        except ValueError as error:
            raise InputError(
                f"schema: column {column.name!r} holds {column.kind} and allows {value!r}: give numbers"
            ) from error
        values.append(bool(number) if column.kind == BOOLEAN else number)
    return values


def _as_text(value: str | float | bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _violations(cases: pd.DataFrame, columns: Mapping[str, TypedColumn]) -> list[Violation]:
    names = {"not_nullable": "missing value", "field_uniqueness": "repeats a value that must be unique"}
    found = []
    order = {name: i for i, name in enumerate(columns)}
    located = cases[cases["index"].notna()]
    assert len(located) == len(cases), cases
    grouped = located.groupby([located["column"].astype(str), located["check"].astype(str)], sort=False)
    parts = [(str(name), str(check), part) for (name, check), part in grouped]
    for name, check, part in sorted(parts, key=lambda item: (order[item[0]], item[1])):
        rows = np.unique(part["index"].to_numpy(dtype=np.int64))
        if check == "not_nullable":
            # A value of a wrong type was set to null by us and is reported as such already.
            rows = rows[~columns[name].wrong[rows]]
        if len(rows):
            found.append(Violation(column=name, rule=names.get(check, check), rows=rows))
    return found


def bad_rows_error(
    records: Records, violations: Sequence[Violation], *, prefix: str, fix: str, source: str
) -> DataError:
    """Return the error that names the first broken rule in full and the others in short."""
    parts = [_describe(records, violation) for violation in violations]
    parts += [f"row {_place(records.files, bad.file, bad.row)}: {bad.rule}" for bad in records.malformed[:1]]
    if len(records.malformed) > 1:
        parts[-1] += f" ({len(records.malformed):,} rows in all cannot be taken apart)"
    others = "one more rule is" if len(parts) == 2 else f"{len(parts) - 1} more rules are"
    rest = f"; and {others} broken: {'; '.join(parts[1:4])}" if len(parts) > 1 else ""
    return DataError(f"source {source!r}: {prefix}{parts[0]}{rest}{' …' if len(parts) > 4 else ''}. {fix}")


def _describe(records: Records, violation: Violation) -> str:
    rows = violation.rows
    shown = ", ".join(
        _place(records.files, records.files[records.file_of[row]], int(records.row_of[row]))
        for row in rows[:_EXAMPLES]
    )
    more = f" and {len(rows) - _EXAMPLES:,} more" if len(rows) > _EXAMPLES else ""
    where = f"column {violation.column!r}: " if violation.column else ""
    value = ""
    if violation.column is not None and violation.rule != "missing value":
        value = f", the first is {records.table.column(violation.column)[int(rows[0])].as_py()!r:.60}"
    plural = "rows" if len(rows) > 1 else "row"
    return f"{where}{violation.rule} in {len(rows):,} {plural} ({plural} {shown}{more}{value})"


def _place(files: Sequence[str], file: str, row: int) -> str:
    return f"{row}" if len(files) == 1 else f"{row} of {file}"


def quarantine_lines(records: Records, violations: Sequence[Violation], bad: npt.NDArray[np.int64]) -> bytes:
    """Return the quarantine as JSON lines: file, row, reasons and the record as it came, in source order."""
    reasons: dict[int, list[dict[str, str | None]]] = {int(row): [] for row in bad}
    for violation in violations:
        for row in violation.rows:
            reasons[int(row)].append({"column": violation.column, "rule": violation.rule})
    taken = records.table.take(bad).to_pylist()
    lines: list[tuple[tuple[int, int], dict[str, Any]]] = []
    for row, record in zip(bad.tolist(), taken, strict=True):
        file, number = int(records.file_of[row]), int(records.row_of[row])
        line = {"file": records.files[file], "row": number, "reasons": reasons[row], "record": record}
        lines.append(((file, number), line))
    for broken in records.malformed:
        line = {
            "file": broken.file,
            "row": broken.row,
            "reasons": [{"column": None, "rule": broken.rule}],
            "text": broken.text,
        }
        lines.append(((records.files.index(broken.file), broken.row), line))
    ordered = [line for _, line in sorted(lines, key=lambda item: item[0])]
    return "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in ordered).encode()
