"""Every wrong parameter and rule gives one error that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_runtime.errors import InputError, MissingFileError, UnknownNameError
from elastic_runtime.preprocessing import PreprocessConfig
from elastic_runtime.preprocessing.rules import ColumnRule, parse_rules


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"source": ""}, InputError, r"source is ''"),
        ({"source": None}, InputError, r"source is None"),
        ({"target": 3}, InputError, r"target is 3"),
        ({"task": "regresion"}, UnknownNameError, r"'regresion'; did you mean 'regression'"),
        ({"on_bad_rows": "drop"}, UnknownNameError, r"unknown on_bad_rows 'drop'"),
        ({"normalise": "minmax"}, UnknownNameError, r"unknown normalise 'minmax'"),
        ({"duplicate_rows": ""}, UnknownNameError, r"unknown duplicate_rows ''"),
        ({"features": "abc"}, InputError, r"features is the text 'abc'"),
        ({"features": 3}, InputError, r"features is 3"),
        ({"features": [0.0]}, InputError, r"features has 0.0"),
        ({"features": ["a", "a"]}, InputError, r"features has 'a' twice"),
        ({"target": "y", "features": ["a", "y"]}, InputError, r"features has 'y', which is the target"),
        ({"target": "y", "extra_columns": ["y"]}, InputError, r"extra_columns has 'y', which is the target"),
        ({"features": ["a"], "extra_columns": ["a"]}, InputError, r"extra_columns has 'a', which is in feat"),
        ({"train_fraction": 0.9}, InputError, r"add up to 1.2"),
        ({"train_fraction": 0, "test_fraction": 0.85}, InputError, r"train_fraction is 0"),
        ({"validation_fraction": -0.1}, InputError, r"validation_fraction is -0.1"),
        ({"test_fraction": float("nan")}, InputError, r"test_fraction is nan"),
        ({"test_fraction": True}, InputError, r"test_fraction is True"),
        ({"max_quarantine_fraction": 5}, InputError, r"max_quarantine_fraction is 5"),
        ({"seed": -1}, InputError, r"seed is -1"),
        ({"seed": 1.5}, InputError, r"seed is 1.5"),
        ({"seed": 2**63}, InputError, r"seed is 9223372036854775808"),
        ({"rows_per_shard": 0}, InputError, r"rows_per_shard is 0"),
        ({"schema": [1]}, InputError, r"schema is \[1\]"),
    ],
)
def test_wrong_parameter(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PreprocessConfig(**{"source": "digits", **fields})


def test_lists_become_tuples() -> None:
    config = PreprocessConfig(source="x.csv", features=["b", "a"], extra_columns=["c"])
    assert (config.features, config.extra_columns) == (("b", "a"), ("c",))


@pytest.mark.parametrize(
    ("schema", "error", "message"),
    [
        ({"a": {"mim": 1}}, UnknownNameError, r"rule of column 'a' in schema 'mim'; did you mean 'min'"),
        ({"a": {"dtype": "integr"}}, UnknownNameError, r"dtype of column 'a' in schema 'integr'"),
        ({"a": "date"}, UnknownNameError, r"dtype of column 'a'"),
        ({"a": 3}, InputError, r"column 'a' has 3"),
        ({3: "text"}, InputError, r"the column 3"),
        ({"a": {"min": "0"}}, InputError, r"column 'a' has min: '0'"),
        ({"a": {"min": 2, "max": 1}}, InputError, r"column 'a' has min 2 above max 1"),
        ({"a": {"dtype": "text", "max": 1}}, InputError, r"column 'a' is text and has min or max"),
        ({"a": {"allowed": []}}, InputError, r"column 'a' has allowed: \[\]"),
        ({"a": {"allowed": [None]}}, InputError, r"column 'a' allows None"),
        ({"a": {"unique": 1}}, InputError, r"column 'a' has unique: 1"),
        ({"a": {"nullable": "yes"}}, InputError, r"column 'a' has nullable: 'yes'"),
    ],
)
def test_wrong_rule(schema: dict[Any, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse_rules(schema)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rules.yaml", "a: {dtype: int, min: 0}\nb: text\n"),
        ("rules.json", '{"a": {"dtype": "integer", "min": 0.0}, "b": {"dtype": "string"}}'),
    ],
)
def test_rules_from_a_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    expected = {"a": ColumnRule(dtype="integer", min=0.0), "b": ColumnRule(dtype="text")}
    assert parse_rules(tmp_path / name) == expected
    assert parse_rules(f"file://{tmp_path / name}") == expected


@pytest.mark.parametrize("content", [b"a: [", b"\xff\xfe\x00"])
def test_file_that_holds_no_rules(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rules.yaml").write_bytes(content)
    with pytest.raises(InputError, match="neither YAML nor JSON"):
        parse_rules(tmp_path / "rules.yaml")


def test_file_with_a_list_and_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("- a\n")
    with pytest.raises(InputError, match="give a mapping"):
        parse_rules(tmp_path / "rules.yaml")
    with pytest.raises(MissingFileError, match="none\\.yaml"):
        parse_rules(tmp_path / "none.yaml")
