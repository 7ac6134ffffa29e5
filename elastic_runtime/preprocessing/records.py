"""Turns CSV, Parquet and JSON-lines files into one table that remembers where each row came from."""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from elastic_runtime.errors import DataError
from elastic_runtime.preprocessing.sources import Source, SourceFile

__all__ = ["Malformed", "Records", "parse"]

_CHUNK: Final = 1 << 24
_INDEX_PREFIX: Final = "__index_level_"


@dataclass(frozen=True, kw_only=True)
class Malformed:
    """A row that could not be taken apart; `row` counts from 1 in `file`."""

    file: str
    row: int
    rule: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Records:
    """All rows of a source. Row numbers count data records from 1 (JSON lines: lines from 1).

    `untyped` names the text columns whose values may be numbers (all of a CSV file). `file_of` and `row_of`
    of shape (rows,) index `files` and give the number in that file.
    """

    table: pa.Table
    untyped: frozenset[str]
    files: tuple[str, ...]
    file_of: npt.NDArray[np.int32]
    row_of: npt.NDArray[np.int64]
    malformed: tuple[Malformed, ...] = ()
    dropped_columns: tuple[str, ...] = ()

    @classmethod
    def of_table(cls, table: pa.Table, name: str) -> Records:
        """Return the records of a typed table that came from one place."""
        return cls(
            table=table,
            untyped=frozenset(),
            files=(name,),
            file_of=np.zeros(table.num_rows, dtype=np.int32),
            row_of=np.arange(1, table.num_rows + 1, dtype=np.int64),
        )


def parse(source: Source) -> Records:
    """Parse the files of `source`. Columns are matched by name; the first file decides their order.

    Raises `DataError` for text that is not UTF-8 (naming the byte), a header without names or with a name
    twice, files whose columns differ, and a file that is not of its format.
    """
    if source.format == "jsonl":
        return _parse_json(source.files)
    if source.format == "parquet":
        tables = [_parse_parquet(file) for file in source.files]
        index = sorted({name for t in tables for name in t.column_names if name.startswith(_INDEX_PREFIX)})
        tables = [table.drop_columns([c for c in table.column_names if c in index]) for table in tables]
        numbers = [np.arange(1, table.num_rows + 1, dtype=np.int64) for table in tables]
        return _join(source.files, tables, numbers, (), untyped=False, dropped=index)
    delimiter = "\t" if source.format == "tsv" else ","
    parsed = [_parse_csv(file, delimiter) for file in source.files]
    malformed = [row for _, _, rows in parsed for row in rows]
    tables = [table for table, _, _ in parsed]
    return _join(source.files, tables, [numbers for _, numbers, _ in parsed], malformed, untyped=True)


def _join(
    files: Sequence[SourceFile],
    tables: list[pa.Table],
    numbers: list[npt.NDArray[np.int64]],
    malformed: Iterable[Malformed],
    *,
    untyped: bool,
    dropped: Sequence[str] = (),
) -> Records:
    names = tables[0].column_names
    for file, table in zip(files, tables, strict=True):
        for missing, where, other in (
            (set(names) - set(table.column_names), file.name, files[0].name),
            (set(table.column_names) - set(names), files[0].name, file.name),
        ):
            if missing:
                raise DataError(
                    f"source file {where!r} has no column {min(missing)!r}, which {other!r} has: "
                    "all files of a folder need the same columns"
                )
    try:
        whole = pa.concat_tables([table.select(names) for table in tables], promote_options="permissive")
    except pa.ArrowException as error:
        raise DataError(
            f"the files of the source differ in the types of columns ({error}): write them with one schema"
        ) from error
    return Records(
        table=whole,
        untyped=frozenset(names) if untyped else frozenset(),
        files=tuple(file.name for file in files),
        file_of=np.repeat(np.arange(len(files), dtype=np.int32), [len(rows) for rows in numbers]),
        row_of=np.concatenate(numbers),
        malformed=tuple(malformed),
        dropped_columns=tuple(dropped),
    )


def _parse_parquet(file: SourceFile) -> pa.Table:
    try:
        table = pa.parquet.read_table(pa.BufferReader(file.content))
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"source file {file.name!r} is not a Parquet file that can be read: {error}"
        ) from error
    _check_names(file, table.column_names)
    return table.replace_schema_metadata(None)


def _parse_csv(file: SourceFile, delimiter: str) -> tuple[pa.Table, npt.NDArray[np.int64], list[Malformed]]:
    content = file.content.removeprefix(codecs.BOM_UTF8)
    _check_utf8(file)
    names = _header(file, content, delimiter)
    broken: list[Malformed] = []

    def keep(row: Any) -> str:
        rule = f"{row.actual_columns} fields where the header has {row.expected_columns}"
        # The header is the first record, so the number of a data row is one less.
        broken.append(Malformed(file=file.name, row=row.number - 1, rule=rule, text=row.text))
        return "skip"

    if not content.endswith((b"\n", b"\r")):
        content += b"\n"
    try:
        table = pa.csv.read_csv(
            pa.BufferReader(content),
            # One thread, because only then the rows that are passed over have numbers.
            read_options=pa.csv.ReadOptions(use_threads=False, block_size=_CHUNK),
            parse_options=pa.csv.ParseOptions(
                delimiter=delimiter, newlines_in_values=True, invalid_row_handler=keep
            ),
            # Everything stays text: types are decided over the whole column later, and "001" is not 1.
            convert_options=pa.csv.ConvertOptions(
                column_types={name: pa.string() for name in names},
                strings_can_be_null=False,
                check_utf8=False,
            ),
        )
    except pa.ArrowException as error:
        raise DataError(f"source file {file.name!r} cannot be read as CSV: {error}") from error
    table = table.rename_columns([name.strip() for name in names])
    numbers = np.arange(1, table.num_rows + len(broken) + 1, dtype=np.int64)
    return table, np.delete(numbers, [row.row - 1 for row in broken]), broken


def _header(file: SourceFile, content: bytes, delimiter: str) -> list[str]:
    text = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", newline="")
    try:
        names = next((row for row in csv.reader(text, delimiter=delimiter) if row), [])
    except csv.Error as error:
        raise DataError(
            f"source file {file.name!r} has a header that cannot be read as CSV: {error}"
        ) from error
    if not names:
        raise DataError(f"source file {file.name!r} has no header: its first line must name the columns")
    _check_names(file, [name.strip() for name in names])
    return names


def _check_names(file: SourceFile, names: Sequence[str]) -> None:
    for position, name in enumerate(names, 1):
        if not name:
            raise DataError(
                f"source file {file.name!r}: column {position} has no name in the header: name it or drop it "
                "(pandas: to_csv(..., index=False))"
            )
        if name in names[: position - 1]:
            first = list(names).index(name) + 1
            raise DataError(
                f"source file {file.name!r}: columns {first} and {position} both have the name {name!r}: "
                "rename one"
            )


def _check_utf8(file: SourceFile) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    start = 0
    view = memoryview(file.content)
    try:
        for start in range(0, len(view), _CHUNK):
            pending = len(decoder.getstate()[0])
            decoder.decode(view[start : start + _CHUNK], final=start + _CHUNK >= len(view))
    except UnicodeDecodeError as error:
        offset = start - pending + error.start
        hint = (
            "it looks like UTF-16" if file.content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else ""
        )
        raise DataError(
            f"source file {file.name!r} is not UTF-8 at byte {offset} (0x{file.content[offset]:02x})"
            f"{hint and ', ' + hint}: save it as UTF-8, for example with "
            f"iconv -f {'UTF-16' if hint else 'LATIN1'} -t UTF-8"
        ) from error


def _parse_json(files: Sequence[SourceFile]) -> Records:
    rows: list[dict[str, Any]] = []
    broken: list[Malformed] = []
    file_of: list[int] = []
    row_of: list[int] = []
    for index, file in enumerate(files):
        _check_utf8(file)
        for number, line in enumerate(file.content.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
            if not line.strip():
                continue
            if number == 1 and line.lstrip().startswith(b"["):
                raise DataError(
                    f"source file {file.name!r} is a JSON array: write one object a line (JSON lines)"
                )
            rule = "not a JSON object"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                row, rule = None, f"not valid JSON ({error})"
            if not isinstance(row, dict):
                broken.append(Malformed(file=file.name, row=number, rule=rule, text=line.decode().strip()))
                continue
            rows.append(row)
            file_of.append(index)
            row_of.append(number)
    first = list(rows[0]) if rows else []
    # Names that the first row lacks follow in the order of the alphabet, not of the rows.
    names = first + sorted({name for row in rows for name in row} - set(first))
    if rows:
        _check_names(files[0], names)
    columns = {name: _json_column([row.get(name) for row in rows]) for name in names}
    return Records(
        table=pa.table({name: column for name, (column, _) in columns.items()}),
        untyped=frozenset(name for name, (_, untyped) in columns.items() if untyped),
        files=tuple(file.name for file in files),
        file_of=np.array(file_of, dtype=np.int32),
        row_of=np.array(row_of, dtype=np.int64),
        malformed=tuple(broken),
    )


def _json_column(values: list[Any]) -> tuple[pa.Array, bool]:
    """Return the column and whether it is text that stands for values of several types."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {bool}:
        return pa.array(values, pa.bool_() if kinds else pa.string()), False
    if kinds <= {int, float}:
        small = all(not isinstance(value, int) or abs(value) < 2**63 for value in values)
        if kinds == {int} and small:
            return pa.array(values, pa.int64()), False
        try:
            return pa.array([None if v is None else float(v) for v in values], pa.float64()), False
        except OverflowError:
            pass
    if kinds == {str}:
        return pa.array(values, pa.string()), False
    text = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pa.array(text, pa.string()), True
