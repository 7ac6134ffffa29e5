"""Reading files: what a source may hold, and how what cannot be read is named."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any

import fsspec
import pandas as pd
import pyarrow as pa
import pytest

from elastic_runtime.errors import DataError, InputError, MissingFileError
from elastic_runtime.preprocessing.records import Records, parse
from elastic_runtime.preprocessing.sources import Source, SourceFile, find_source


def read(kind: str, *contents: bytes | str) -> Records:
    files = tuple(
        SourceFile(name=f"f{i}", content=c.encode() if isinstance(c, str) else c)
        for i, c in enumerate(contents)
    )
    return parse(Source(name="f", url="f", format=kind, files=files, sha256=""))


def parquet(columns: dict[str, Any], **options: Any) -> bytes:
    buffer = io.BytesIO()
    pd.DataFrame(columns, **options).to_parquet(buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a,b\n1,2\n", [{"a": "1", "b": "2"}]),
        ("a,b\r\n1,2\r\n", [{"a": "1", "b": "2"}]),
        ("a,b\n1,2", [{"a": "1", "b": "2"}]),
        (b"\xef\xbb\xbfa,b\n1,2\n", [{"a": "1", "b": "2"}]),
        ('"a","b"\n"1","x\ny"\n3,"q"",z"\n', [{"a": "1", "b": "x\ny"}, {"a": "3", "b": 'q",z'}]),
        (" a , b\n001,\n", [{"a": "001", "b": ""}]),
        ('"a\nx",b\n1,2\n', [{"a\nx": "1", "b": "2"}]),
        ("a,b\n\n1,2\n\n", [{"a": "1", "b": "2"}]),
        ("a,b\n", []),
        ("a,b", []),
    ],
)
def test_csv(content: bytes | str, expected: list[dict[str, str]]) -> None:
    records = read("csv", content)
    assert records.table.to_pylist() == expected
    assert records.untyped == set(records.table.column_names)
    assert records.row_of.tolist() == list(range(1, len(expected) + 1))


def test_csv_rows_keep_their_numbers_beside_malformed_ones() -> None:
    records = read("csv", 'a,b\n1,2\n3\n"x\ny",4\n\n5,6,7\n8,9\n')
    assert records.table.to_pylist() == [
        {"a": "1", "b": "2"},
        {"a": "x\ny", "b": "4"},
        {"a": "8", "b": "9"},
    ]
    assert records.row_of.tolist() == [1, 3, 5]
    assert [(m.row, m.rule, m.text) for m in records.malformed] == [
        (2, "1 fields where the header has 2", "3"),
        (4, "3 fields where the header has 2", "5,6,7"),
    ]


def test_tab_separated() -> None:
    assert read("tsv", "a\tb\n1\t2,5\n").table.to_pylist() == [{"a": "1", "b": "2,5"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,a\n1,2\n", r"'f0': columns 1 and 2 both have the name 'a'"),
        ("a, a\n1,2\n", r"columns 1 and 2 both have the name 'a'"),
        (",a\n0,1\n", r"column 1 has no name"),
        ("\n\n", r"'f0' has no header"),
        ("a,b\n1,\u00e9\n".encode("latin-1"), r"'f0' is not UTF-8 at byte 6 \(0xe9\)"),
        (("a,b\n" + "1,2\n" * 5_000_000).encode() + b"\x80", r"is not UTF-8 at byte 20000004 \(0x80\)"),
        ("a,b\n1,2\n".encode("utf-16"), r"it looks like UTF-16"),
    ],
)
def test_csv_that_cannot_be_read(content: bytes | str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read("csv", content)


def test_character_across_two_pieces_is_valid() -> None:
    # The check goes in pieces of 2^24 bytes; the e with accent lies on the border.
    filler = b"x" * ((1 << 24) - 3)
    records = read("csv", b"a\n" + filler + "\u00e9".encode() + b"\n")
    assert records.table.column("a")[0].as_py().endswith("x\u00e9")


def test_json_lines() -> None:
    records = read("jsonl", '{"a": 1, "b": "x"}\n\n{"b": null, "a": 2.5}\n[1]\n{"a": 3, "c": true}\n{"a"\n')
    assert records.table.to_pylist() == [
        {"a": 1.0, "b": "x", "c": None},
        {"a": 2.5, "b": None, "c": None},
        {"a": 3.0, "b": None, "c": True},
    ]
    assert records.row_of.tolist() == [1, 3, 5]
    assert [(m.row, m.rule.split(" (")[0], m.text) for m in records.malformed] == [
        (4, "not a JSON object", "[1]"),
        (6, "not valid JSON", '{"a"'),
    ]
    assert records.untyped == set()


@pytest.mark.parametrize(
    ("values", "kind", "untyped"),
    [
        ("1 2 3", pa.int64(), False),
        ("1 2.5", pa.float64(), False),
        ("1 9999999999999999999999", pa.float64(), False),
        ("true false", pa.bool_(), False),
        ('"1" "2"', pa.string(), False),
        ('1 "x"', pa.string(), True),
        ("1 [2]", pa.string(), True),
        ("null null", pa.string(), False),
        ("NaN 1", pa.float64(), False),
    ],
)
def test_json_types(values: str, kind: pa.DataType, untyped: bool) -> None:
    records = read("jsonl", "\n".join(f'{{"a": {value}}}' for value in values.split()))
    assert records.table.schema.field("a").type == kind
    assert ("a" in records.untyped) is untyped


def test_json_array_is_named() -> None:
    with pytest.raises(DataError, match="'f0' is a JSON array"):
        read("jsonl", '[{"a": 1}]')


def test_parquet_without_the_index_of_pandas() -> None:
    content = parquet({"a": [1, 2], "b": ["x", None]}, index=pd.Index([7, 9]))
    records = read("parquet", content)
    assert records.table.to_pylist() == [{"a": 1, "b": "x"}, {"a": 2, "b": None}]
    assert records.dropped_columns == ("__index_level_0__",)


@pytest.mark.parametrize("content", [b"PAR1", parquet({"a": [1]})[:-20]])
def test_parquet_that_cannot_be_read(content: bytes) -> None:
    with pytest.raises(DataError, match="'f0' is not a Parquet file"):
        read("parquet", content)


def test_several_files_are_joined_by_name() -> None:
    records = read("csv", "a,b\n1,2\n3,4\n", "b,a\n6,5\n")
    assert records.table.to_pylist() == [
        {"a": "1", "b": "2"},
        {"a": "3", "b": "4"},
        {"a": "5", "b": "6"},
    ]
    assert records.file_of.tolist() == [0, 0, 1]
    assert records.row_of.tolist() == [1, 2, 1]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("a,b\n1,2\n", "a\n1\n", r"'f1' has no column 'b', which 'f0' has"),
        ("a\n1\n", "a,b\n1,2\n", r"'f0' has no column 'b', which 'f1' has"),
    ],
)
def test_files_with_other_columns(first: str, second: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read("csv", first, second)


def test_parquet_files_with_other_types() -> None:
    assert read("parquet", parquet({"a": [1]}), parquet({"a": [2.5]})).table.to_pylist() == [
        {"a": 1.0},
        {"a": 2.5},
    ]
    with pytest.raises(DataError, match="differ in the types"):
        read("parquet", parquet({"a": [1]}), parquet({"a": ["x"]}))


# --- finding the files


def test_folder_passes_over_what_is_no_data(tmp_path: Path) -> None:
    for name, content in {
        "b.csv": "a\n2\n",
        "a.csv": "a\n1\n",
        "deep/er/c.csv": "a\n3\n",
        ".hidden.csv": "a\n9\n",
        ".git/x.csv": "a\n9\n",
        "_SUCCESS": "",
        "_temporary/y.csv": "a\n9\n",
        "marker": "",
        "x_$folder$": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "empty/also empty").mkdir(parents=True)
    source = find_source(str(tmp_path))
    assert [file.name for file in source.files] == ["a.csv", "b.csv", "deep/er/c.csv"]
    assert set(source.ignored) == {
        *(".hidden.csv", ".git/x.csv", "_SUCCESS", "_temporary/y.csv", "marker", "x_$folder$")
    }
    assert source.url == source.name == tmp_path.name


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({}, MissingFileError, r"has no data file"),
        ({".a.csv": "a\n"}, MissingFileError, r"has no data file"),
        ({"a.csv": "a\n1\n", "b.csv": ""}, DataError, r"'b.csv' is empty \(0 bytes\)"),
        (
            {"a.csv": "a\n1\n", "b.jsonl": "{}"},
            InputError,
            r"mixes formats: 'a.csv' is csv, 'b.jsonl' is json",
        ),
        ({"a.csv": "a\n1\n", "notes.txt": "x"}, InputError, r"'notes.txt' cannot be read"),
        ({"manifest.json": "{}"}, InputError, r"manifest.json, so preprocess wrote it"),
    ],
)
def test_folder_that_is_refused(
    tmp_path: Path, files: dict[str, str], error: type[Exception], message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(error, match=message):
        find_source(str(tmp_path))


def test_missing_source_offers_the_built_in_sets() -> None:
    with pytest.raises(MissingFileError, match=r"'digit'.*built-in sets: digits"):
        find_source("digit", known_names=("digits",))


def test_unknown_protocol() -> None:
    with pytest.raises(InputError, match="Protocol not known"):
        find_source("nothing://x.csv")


def test_url_in_memory_and_by_file(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe("/preprocessing-test/x.csv", b"a\n1\n")
    try:
        whole = find_source("memory://preprocessing-test/x.csv")
        folder = find_source("memory://preprocessing-test")
    finally:
        fs.rm("/preprocessing-test", recursive=True)
    (tmp_path / "x.csv").write_bytes(b"a\n1\n")
    local = find_source(f"file://{tmp_path}/x.csv")
    assert whole.files == folder.files == local.files
    assert whole.sha256 == local.sha256
    assert whole.url == "memory://preprocessing-test/x.csv"
    assert local.url == "x.csv"


def test_compressed_file(tmp_path: Path) -> None:
    packed = gzip.compress(b"a\n1\n" * 50)
    (tmp_path / "x.csv.gz").write_bytes(packed)
    assert find_source(str(tmp_path / "x.csv.gz")).files[0].content == b"a\n1\n" * 50
    (tmp_path / "cut.csv.gz").write_bytes(packed[:-9])
    with pytest.raises(DataError, match=r"'cut.csv.gz' is cut short"):
        find_source(str(tmp_path / "cut.csv.gz"))


def test_credentials_are_not_shown() -> None:
    with pytest.raises(InputError) as caught:
        find_source("nothing://someone:hunter2@host/x.csv?token=hunter2")
    assert "hunter2" not in str(caught.value)
