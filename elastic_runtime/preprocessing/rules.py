"""The rules that a user gives per column (`schema`), from a mapping or a YAML or JSON file.

age:    {dtype: integer, min: 0, max: 120}
city:   {dtype: text, nullable: true, allowed: [Bern, Basel]}
id:     {dtype: text, unique: true}
weight: number
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import fsspec
import yaml

from elastic_runtime.errors import InputError, MissingFileError, UnknownNameError

__all__ = ["BOOLEAN", "INTEGER", "NUMBER", "TEXT", "ColumnRule", "parse_rules"]

INTEGER: Final = "integer"
NUMBER: Final = "number"
BOOLEAN: Final = "boolean"
TEXT: Final = "text"
_DTYPES: Final = {
    **dict.fromkeys((INTEGER, "int", "int64"), INTEGER),
    **dict.fromkeys((NUMBER, "float", "float64", "double"), NUMBER),
    **dict.fromkeys((BOOLEAN, "bool"), BOOLEAN),
    **dict.fromkeys((TEXT, "str", "string"), TEXT),
}
_KEYS: Final = ("dtype", "nullable", "min", "max", "allowed", "unique")


@dataclass(frozen=True, kw_only=True)
class ColumnRule:
    """Rules of one column; None means that the rule is not set."""

    dtype: str | None = None
    nullable: bool | None = None
    min: float | None = None
    max: float | None = None
    allowed: tuple[str | float | bool, ...] | None = None
    unique: bool = False

    def describe(self) -> str:
        """Return the rules as one line for people."""
        parts = [self.dtype or ""]
        parts += [f"≥ {self.min:g}"] if self.min is not None else []
        parts += [f"≤ {self.max:g}"] if self.max is not None else []
        parts += [f"one of {', '.join(map(str, self.allowed))}"] if self.allowed is not None else []
        parts += ["unique"] if self.unique else []
        parts += ["may be missing"] if self.nullable else []
        return ", ".join(part for part in parts if part)


def parse_rules(schema: Mapping[str, Any] | str | Path | None) -> dict[str, ColumnRule]:
    """Return the rules by column name. Raises `InputError` that names the column and the key."""
    if schema is None:
        return {}
    content = _load(str(schema)) if isinstance(schema, str | Path) else schema
    if not isinstance(content, Mapping):
        raise InputError(f"schema is {content!r:.80}: give a mapping of column name to rules")
    return {_column(name): _rule(name, rule) for name, rule in content.items()}


def _load(url: str) -> Any:
    try:
        with fsspec.open(url, "rb") as file:
            text = file.read()
        # JSON is YAML, so one loader reads both.
        return yaml.safe_load(text)
    except FileNotFoundError as error:
        raise MissingFileError(f"schema file {url!r} does not exist: give a YAML or JSON file") from error
    except (OSError, ImportError) as error:
        raise InputError(f"schema file {url!r} cannot be read: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"schema file {url!r} is neither YAML nor JSON: {error}") from error


def _column(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise InputError(f"schema has the column {name!r}: names are text, quote it")
    return name


def _rule(name: str, rule: Any) -> ColumnRule:
    if isinstance(rule, str):
        rule = {"dtype": rule}
    if not isinstance(rule, Mapping):
        raise InputError(
            f"schema: column {name!r} has {rule!r:.80}: give rules such as {{dtype: number, min: 0}}"
        )
    for key in rule:
        if key not in _KEYS:
            raise UnknownNameError.of(f"rule of column {name!r} in schema", str(key), _KEYS)
    dtype = rule.get("dtype")
    if dtype is not None and (not isinstance(dtype, str) or dtype not in _DTYPES):
        raise UnknownNameError.of(f"dtype of column {name!r} in schema", str(dtype), _DTYPES)
    for key in ("nullable", "unique"):
        if rule.get(key) is not None and not isinstance(rule[key], bool):
            raise InputError(f"schema: column {name!r} has {key}: {rule[key]!r}: give true or false")
    low, high = _bound(name, rule, "min"), _bound(name, rule, "max")
    kind = _DTYPES[dtype] if dtype is not None else None
    if kind in (TEXT, BOOLEAN) and (low is not None or high is not None):
        raise InputError(
            f"schema: column {name!r} is {kind} and has min or max: these are for numbers, remove them"
        )
    if low is not None and high is not None and low > high:
        raise InputError(f"schema: column {name!r} has min {low:g} above max {high:g}: swap them")
    return ColumnRule(
        dtype=kind,
        nullable=rule.get("nullable"),
        min=low,
        max=high,
        allowed=_allowed(name, rule.get("allowed")),
        unique=bool(rule.get("unique")),
    )


def _bound(name: str, rule: Mapping[str, Any], key: str) -> float | None:
    value = rule.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise InputError(f"schema: column {name!r} has {key}: {value!r}: give a number")
    return float(value)


def _allowed(name: str, values: Any) -> tuple[str | float | bool, ...] | None:
    if values is None:
        return None
    if not isinstance(values, list | tuple) or not values:
        raise InputError(f"schema: column {name!r} has allowed: {values!r:.80}: give a list with a value")
    for value in values:
        if not isinstance(value, str | int | float):
            raise InputError(f"schema: column {name!r} allows {value!r}: give texts, numbers, true or false")
    return tuple(values)
