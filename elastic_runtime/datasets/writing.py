"""Writes a dataset folder: sharded Parquet, the manifest last, and the folder appears whole or not at all."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic_runtime.datasets.manifest import CLASSIFICATION, MANIFEST_NAME, Manifest, Shard, SplitInfo
from elastic_runtime.errors import InputError, NameInUseError

__all__ = ["check_folder_is_free", "write_dataset"]


def check_folder_is_free(folder: str | Path) -> None:
    """Raise `NameInUseError` when `folder` exists and holds something, or is a file."""
    path = Path(folder)
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists() or path.is_symlink():
        raise NameInUseError(
            f"output folder {str(folder)!r} exists and is not empty: name another or remove it"
        )


def write_dataset(
    folder: str | Path,
    manifest: Manifest,
    tables: Mapping[str, Any],
    *,
    rows_per_shard: int,
    files: Mapping[str, bytes] | None = None,
) -> Manifest:
    """Write `tables` (split name to `pyarrow.Table`) and `files` (by name) as the dataset `folder`.

    `splits` of the given `manifest` is filled in and the manifest that was written is returned. The folder
    appears whole or not at all, and the same tables give the same bytes under one version of pyarrow.
    Each table must have the manifest's columns, float32 features and the target as int64 (class index) or
    float64.

    Raises `NameInUseError` when the folder holds something already and `InputError` for `rows_per_shard` < 1.
    """
    if rows_per_shard < 1:
        raise InputError(f"rows_per_shard is {rows_per_shard}: give a whole number from 1")
    check_folder_is_free(folder)
    with _appearing(Path(folder)) as partial:
        splits = {
            name: _write_split(partial, name, _checked(manifest, table), rows_per_shard)
            for name, table in tables.items()
        }
        for name, content in (files or {}).items():
            _write_file(partial / name, content)
        complete = replace(manifest, splits=splits)
        _write_file(partial / MANIFEST_NAME, complete.to_json().encode())
    return complete


def _checked(manifest: Manifest, table: Any) -> Any:
    import pyarrow as pa

    assert table.column_names == list(manifest.columns), (table.column_names, manifest.columns)
    target_type = pa.int64() if manifest.task == CLASSIFICATION else pa.float64()
    assert all(table.schema.field(name).type == pa.float32() for name in manifest.features), table.schema
    assert table.schema.field(manifest.target).type == target_type, table.schema
    # Metadata (pandas writes its own) would carry what is not data into the bytes.
    return table.replace_schema_metadata(None)


def _write_split(folder: Path, name: str, table: Any, rows_per_shard: int) -> SplitInfo:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / name).mkdir()
    shards = []
    text = [field.name for field in table.schema if pa.types.is_string(field.type)]
    for number, start in enumerate(range(0, table.num_rows, rows_per_shard)):
        part = table.slice(start, rows_per_shard)
        sink = pa.BufferOutputStream()
        # Everything that decides the bytes is pinned; only pyarrow's own version is left (`created_by`).
        pq.write_table(
            part,
            sink,
            version="2.6",
            data_page_version="1.0",
            compression="zstd",
            compression_level=3,
            use_dictionary=text,
            row_group_size=max(1, part.num_rows),
            data_page_size=1 << 20,
            write_statistics=True,
            store_schema=True,
        )
        content = sink.getvalue().to_pybytes()
        path = f"{name}/part-{number:05d}.parquet"
        _write_file(folder / path, content)
        digest = hashlib.sha256(content).hexdigest()
        shards.append(Shard(path=path, rows=part.num_rows, bytes=len(content), sha256=digest))
    return SplitInfo(rows=table.num_rows, shards=tuple(shards))


def _write_file(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """Yield a new folder beside `folder` that takes its name at the end, or goes away on an error."""
    partial = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.partial"
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"output folder {str(folder)!r} cannot be made: {error.strerror}") from error
    try:
        yield partial
        try:
            # rename(2) replaces an empty folder, and no other.
            partial.rename(folder)
        except OSError as error:
            raise NameInUseError(
                f"output folder {str(folder)!r} was filled by another program meanwhile: name another"
            ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
