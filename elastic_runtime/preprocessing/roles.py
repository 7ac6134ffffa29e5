"""Gives each column of the source its role (feature, target, extra) and its type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic_runtime.datasets.manifest import REGRESSION
from elastic_runtime.errors import DataError, InputError, UnknownNameError
from elastic_runtime.preprocessing.columns import EMPTY, NUMERIC, OTHER, TypedColumn, type_column
from elastic_runtime.preprocessing.config import PreprocessConfig
from elastic_runtime.preprocessing.records import Records
from elastic_runtime.preprocessing.rules import NUMBER, TEXT, ColumnRule
from elastic_runtime.preprocessing.targets import infer_task

__all__ = ["Roles", "resolve_roles"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Roles:
    """Columns by role. `columns` has those with a role and those with a rule; `task_reason` is for people."""

    target: str
    task: str
    task_reason: str
    features: tuple[str, ...]
    extra_columns: tuple[str, ...]
    columns: Mapping[str, TypedColumn]

    @property
    def required(self) -> tuple[str, ...]:
        """Columns that must have a value in each row."""
        return (*self.features, self.target)

    @property
    def finite(self) -> tuple[str, ...]:
        """Columns whose values must be finite numbers."""
        return self.required


def resolve_roles(
    config: PreprocessConfig, rules: Mapping[str, ColumnRule], records: Records, source: str
) -> Roles:
    """Find the roles of the columns of `records`.

    Raises `UnknownNameError` for a column that the parameters name and the source lacks, `DataError` for one
    that the schema names, for text among the features and for a feature or target without any value.
    """
    names = records.table.column_names
    if not config.target:
        raise InputError(
            f"target is empty: name the column of {source!r} to predict, one of {_listed(names)}"
        )
    for parameter, wanted in (
        ("target", (config.target,)),
        ("features", config.features),
        ("extra_columns", config.extra_columns),
    ):
        for name in wanted:
            if name not in names:
                raise _unknown(name, names, f"column in {parameter}")
    for name in rules:
        if name not in names:
            raise DataError(
                f"source {source!r}: column {name!r} of the schema is missing (columns: {_listed(names)}): "
                "add it to the data or take it out of the schema"
            )
    others = {config.target, *config.extra_columns}
    features = tuple(config.features) or tuple(name for name in names if name not in others)
    if not features:
        raise InputError(
            f"source {source!r} has no column left for the features beside {', '.join(sorted(others))}"
        )
    for name in features:
        if name in rules and rules[name].nullable:
            raise InputError(
                f"schema: column {name!r} is a feature and cannot be nullable, a model needs every number: "
                "drop the rule, or name the column in extra_columns"
            )
    columns = {}
    for name in dict.fromkeys((*features, config.target, *config.extra_columns, *rules)):
        is_target = name == config.target
        columns[name] = type_column(
            name,
            records.table.column(name),
            untyped=name in records.untyped,
            dtype=rules[name].dtype if name in rules else None,
            numeric=name in config.features or (is_target and config.task == REGRESSION),
            tolerant=name in features,
            label=is_target and config.task != REGRESSION,
        )
    _check_features(features, columns, source)
    target = columns[config.target]
    if config.task == "auto" and target.kind == TEXT and config.target not in rules:
        # A few texts in a column of decimals are mistakes, not classes.
        numbers = type_column(
            config.target,
            records.table.column(config.target),
            untyped=config.target in records.untyped,
            tolerant=True,
            label=True,
        )
        if numbers.kind == NUMBER and infer_task(numbers)[0] == REGRESSION:
            target = columns[config.target] = numbers
    if target.kind == EMPTY:
        raise DataError(f"source {source!r}: column {config.target!r}, the target, has no value in any row")
    task, reason = (config.task, "as set") if config.task != "auto" else infer_task(target)
    usable = target.kind in NUMERIC if task == REGRESSION else target.kind != OTHER
    if not usable:
        raise InputError(
            f"task is {task!r} but the target {config.target!r} holds {target.kind}: name another"
        )
    return Roles(
        target=config.target,
        task=task,
        task_reason=reason,
        features=features,
        extra_columns=tuple(config.extra_columns),
        columns=columns,
    )


def _check_features(features: tuple[str, ...], columns: Mapping[str, TypedColumn], source: str) -> None:
    empty = [name for name in features if columns[name].kind == EMPTY]
    if empty:
        raise DataError(
            f"source {source!r}: {_columns(empty)} {'has' if len(empty) == 1 else 'have'} no value in any row: "
            f"leave {'it' if len(empty) == 1 else 'them'} out of the data, or name the other columns in features"
        )
    other = [name for name in features if columns[name].kind not in NUMERIC]
    if other:
        kinds = ", ".join(sorted({_what(columns[name]) for name in other}))
        one = len(other) == 1
        says = (
            "holds {} and cannot be a feature, which is a number: name it"
            if one
            else ("hold {} and cannot be features, which are numbers: name them")
        )
        raise DataError(
            f"source {source!r}: {_columns(other)} {says.format(kinds)} in extra_columns to keep "
            f"{'it' if one else 'them'}, or list the numeric columns in features"
        )


def _what(column: TypedColumn) -> str:
    return TEXT if column.kind == TEXT else str(column.values.type)


def _unknown(name: str, names: list[str], what: str) -> UnknownNameError:
    if len(names) == 1 and any(mark in names[0] for mark in ";\t|"):
        return UnknownNameError(
            f"unknown {what} {name!r}: there is one column, {names[0]!r}: separate the fields by commas"
        )
    return UnknownNameError.of(what, name, names)


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:20]) + (" …" if len(names) > 20 else "")


def _columns(names: list[str]) -> str:
    return f"{'column' if len(names) == 1 else 'columns'} {_listed(names)}"
