"""The type of a column, decided over all of its values."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from elastic_runtime.preprocessing.columns import type_column

LONG = "12345678901234567890"


@pytest.mark.parametrize(
    ("values", "options", "kind", "expected", "wrong"),
    [
        (["1", "2.5", ""], {}, "number", [1.0, 2.5, None], []),
        ([" 1", "+2", "-3 "], {}, "integer", [1, 2, -3], []),
        (["1.", ".5", "1e3", "-.5E-2"], {}, "number", [1.0, 0.5, 1000.0, -0.005], []),
        (["1", "2.0"], {}, "number", [1.0, 2.0], []),
        (["001", "2"], {}, "text", ["001", "2"], []),
        (["001", "2"], {"tolerant": True}, "text", ["001", "2"], []),
        (["001", "002", "x3"], {"tolerant": True}, "text", ["001", "002", "x3"], []),
        (["001", "2"], {"numeric": True}, "integer", [1, 2], []),
        (["0", "0.5", "-0"], {}, "number", [0.0, 0.5, 0.0], []),
        ([LONG, "1"], {}, "text", [LONG, "1"], []),
        (["NA", "1.5", "nan", "inf"], {}, "number", [None, 1.5, None, float("inf")], []),
        (["NA", "Bern", " "], {}, "text", ["NA", "Bern", None], []),
        (["NA", "NA"], {}, "text", ["NA", "NA"], []),
        (["NA", ""], {"numeric": True}, "empty", [None, None], []),
        (["", " "], {}, "empty", [None, None], []),
        (["1", "2", "x", "3"], {"tolerant": True}, "number", [1.0, 2.0, None, 3.0], [2]),
        (["1", "x", "y"], {"tolerant": True}, "text", ["1", "x", "y"], []),
        (["1", "2", "x", "3"], {}, "text", ["1", "2", "x", "3"], []),
        (["1", "x", "y"], {"numeric": True}, "number", [1.0, None, None], [1, 2]),
        (["1_000", "1,5", "0x10"], {}, "text", ["1_000", "1,5", "0x10"], []),
        (["True", "false", ""], {}, "boolean", [True, False, None], []),
        (["True", "false"], {"label": True}, "text", ["True", "false"], []),
        (["0", "1", "yes"], {"dtype": "boolean"}, "boolean", [False, True, None], [2]),
        (["1", "2.0", "2.5", "inf"], {"dtype": "integer"}, "integer", [1, 2, None, None], [2, 3]),
        (["1", "2"], {"dtype": "text"}, "text", ["1", "2"], []),
        (["a", " b "], {}, "text", ["a", " b "], []),
    ],
)
def test_untyped_text(
    values: list[str], options: dict[str, Any], kind: str, expected: list[Any], wrong: list[int]
) -> None:
    column = type_column("x", pa.chunked_array([values]), untyped=True, **options)
    assert column.kind == kind
    assert column.values.to_pylist() == expected
    assert np.flatnonzero(column.wrong).tolist() == wrong
    missing = [i for i, value in enumerate(expected) if value is None and i not in wrong]
    assert np.flatnonzero(column.missing).tolist() == missing


@pytest.mark.parametrize(
    ("values", "options", "kind", "expected", "wrong"),
    [
        (pa.array([1, None]), {}, "integer", [1, None], []),
        (pa.array([2**60]), {}, "integer", [2**60], []),
        (pa.array([2**64 - 1], pa.uint64()), {}, "number", [float(2**64)], []),
        (pa.array([1.0, float("nan")]), {}, "number", [1.0, None], []),
        (pa.array([1.5], pa.float32()), {}, "number", [1.5], []),
        (pa.array([decimal.Decimal("1.5")]), {}, "number", [1.5], []),
        (pa.array([True, None]), {"numeric": True}, "boolean", [True, None], []),
        (pa.array([True]), {"dtype": "number"}, "number", [1.0], []),
        (pa.array([0, 1, 2]), {"dtype": "boolean"}, "boolean", [False, True, None], [2]),
        (pa.array([1.0, 2.5]), {"dtype": "integer"}, "integer", [1, None], [1]),
        (pa.array([1, 2]), {"dtype": "text"}, "text", ["1", "2"], []),
        (pa.array(["1", "x"]), {}, "text", ["1", "x"], []),
        (pa.array(["1", "x"]), {"numeric": True}, "number", [1.0, None], [1]),
        (pa.array(["", "x"]), {}, "text", ["", "x"], []),
        (pa.array(["", "x"]), {"label": True}, "text", [None, "x"], []),
        (pa.array(["a", "b"]).dictionary_encode(), {}, "text", ["a", "b"], []),
        (pa.array(["a"], pa.large_string()), {}, "text", ["a"], []),
        (pa.nulls(2), {}, "empty", [None, None], []),
        (pa.nulls(2, pa.float64()), {}, "empty", [None, None], []),
        (pa.array([datetime.date(2020, 1, 1)]), {}, "other", [datetime.date(2020, 1, 1)], []),
        (pa.array([[1, 2]]), {"dtype": "number"}, "other", [[1, 2]], []),
    ],
)
def test_typed_values(
    values: pa.Array, options: dict[str, Any], kind: str, expected: list[Any], wrong: list[int]
) -> None:
    column = type_column("x", pa.chunked_array([values]), untyped=False, **options)
    assert column.kind == kind
    assert column.values.to_pylist() == expected
    assert np.flatnonzero(column.wrong).tolist() == wrong


def test_numbers_have_one_zero() -> None:
    column = type_column("x", pa.chunked_array([["-0.0", "0.5", ""]]), untyped=True)
    assert not np.signbit(column.numbers[0])
    assert np.isnan(column.numbers[2])
