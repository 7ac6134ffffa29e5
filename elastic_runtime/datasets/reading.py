"""Reads the splits of a dataset folder into arrays; light enough for every training process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from elastic_runtime.datasets.manifest import CLASSIFICATION, Manifest, Shard, read_manifest
from elastic_runtime.errors import IntegrityError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Split", "load_split"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """One split in memory.

    `features` is float32 of shape (rows, features), in the order of `manifest.features` and normalised as the
    manifest says; `target` of shape (rows,) is the class index (int64) or the raw value (float64).
    """

    name: str
    manifest: Manifest
    features: npt.NDArray[np.float32]
    target: npt.NDArray[np.int64] | npt.NDArray[np.float64]
    _extra: Any = field(repr=False)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.target)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """All stored columns in stored order, extra columns included; a copy, made at the first use."""
        import pandas as pd

        # A name of the manifest may be anything, so columns are set by position, not by attribute.
        frame = pd.DataFrame(self.features, columns=list(self.manifest.features), copy=True)
        target = pd.DataFrame({self.manifest.target: self.target.copy()})
        whole: pd.DataFrame = pd.concat([frame, target, self._extra.to_pandas()], axis=1)
        return whole


def load_split(folder: str | Path, split: str, *, verify: bool = True) -> Split:
    """Load `split` (`train`, `validation` or `test`) of the dataset in `folder`.

    With `verify`, size and sha256 of each shard are compared with the manifest; columns, types and row counts
    are checked always. An empty split gives arrays of length 0.

    Raises `MissingFileError` (no dataset there), `UnknownNameError` (no such split), `InputError` (manifest
    of another version) and `IntegrityError` (a shard that is missing, damaged or not as the manifest says).
    """
    import pyarrow as pa

    manifest = read_manifest(folder)
    info = manifest.split(split)
    features = np.empty((info.rows, len(manifest.features)), dtype=np.float32)
    target: npt.NDArray[Any] = np.empty(
        info.rows, dtype=np.int64 if manifest.task == CLASSIFICATION else np.float64
    )
    extra = []
    start = 0
    for shard, table in _tables(Path(folder), manifest, info.shards, verify=verify):
        rows = slice(start, start + shard.rows)
        for i, name in enumerate(manifest.features):
            features[rows, i] = _dense(table, name, features.dtype, shard)
        target[rows] = _dense(table, manifest.target, target.dtype, shard)
        extra.append(table.select(list(manifest.extra_columns)))
        start += shard.rows
    if (
        manifest.classes is not None
        and info.rows
        and not 0 <= target.min() <= target.max() < len(manifest.classes)
    ):
        raise IntegrityError(
            f"split {split!r} of {str(folder)!r}: column {manifest.target!r} has a class index outside "
            f"0 … {len(manifest.classes) - 1}: make the dataset again"
        )
    empty = pa.table({name: pa.array([], pa.string()) for name in manifest.extra_columns})
    return Split(
        name=split,
        manifest=manifest,
        features=features,
        target=target,
        _extra=pa.concat_tables(extra) if extra else empty,
    )


def _tables(
    folder: Path, manifest: Manifest, shards: tuple[Shard, ...], *, verify: bool
) -> Iterator[tuple[Shard, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for shard in shards:
        path = folder / shard.path
        try:
            # Read once: what is checked is what is parsed.
            content = path.read_bytes()
        except OSError as error:
            raise _broken(path, f"cannot be read ({error.strerror})") from error
        if verify:
            if len(content) != shard.bytes:
                raise _broken(path, f"has {len(content):,} bytes, the manifest says {shard.bytes:,}")
            found = hashlib.sha256(content).hexdigest()
            if found != shard.sha256:
                raise _broken(path, f"has sha256 {found}, the manifest says {shard.sha256}")
        try:
            # One thread: a training process has given its cores to the model, and forks must stay safe.
            table = pq.ParquetFile(pa.BufferReader(content)).read(use_threads=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _broken(path, f"is not a readable Parquet file ({str(error).splitlines()[0]})") from error
        if table.num_rows != shard.rows:
            raise _broken(path, f"has {table.num_rows:,} rows, the manifest says {shard.rows:,}")
        missing = [name for name in manifest.columns if name not in table.column_names]
        if missing:
            raise _broken(path, f"has no column {missing[0]!r}")
        yield shard, table


def _dense(table: Any, name: str, dtype: npt.DTypeLike, shard: Shard) -> npt.NDArray[Any]:
    column = table.column(name)
    if column.null_count or str(column.type) not in {
        "float": "float32",
        "double": "float64",
        "int64": "int64",
    }:
        raise _broken(
            Path(shard.path),
            f"has {column.null_count} missing values in column {name!r} of type {column.type}",
        )
    # Not column.to_numpy(), which imports pandas.
    chunks = [np.from_dlpack(chunk) for chunk in column.chunks]
    array: npt.NDArray[Any] = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
    if array.dtype != dtype:
        raise _broken(
            Path(shard.path), f"has column {name!r} of type {array.dtype}, expected {np.dtype(dtype)}"
        )
    return array


def _broken(path: Path, what: str) -> IntegrityError:
    return IntegrityError(f"dataset shard {str(path)!r} {what}: copy or make the dataset again")
