"""Preprocessing from source to dataset folder: read, check, split, normalise, write.

The shards depend on the rows only, not on their order in the source: rows are split and ordered by a hash of
their content and the seed. (The manifest has the sha256 of the source as it was.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_runtime.datasets import Manifest, SourceInfo, write_dataset
from elastic_runtime.datasets.writing import check_folder_is_free
from elastic_runtime.errors import DataError
from elastic_runtime.preprocessing.arranging import arrange
from elastic_runtime.preprocessing.builtin import BUILTIN_NAMES, BUILTIN_TARGET, builtin_name, load_builtin
from elastic_runtime.preprocessing.columns import EMPTY, TypedColumn
from elastic_runtime.preprocessing.config import PreprocessConfig
from elastic_runtime.preprocessing.profile import DataProfile, make_profile
from elastic_runtime.preprocessing.records import Records, parse
from elastic_runtime.preprocessing.roles import resolve_roles
from elastic_runtime.preprocessing.rules import parse_rules
from elastic_runtime.preprocessing.sources import find_source
from elastic_runtime.preprocessing.targets import encode_target
from elastic_runtime.preprocessing.validation import (
    Violation,
    bad_rows_error,
    check_rows,
    find_duplicates,
    quarantine_lines,
)

__all__ = ["QUARANTINE_NAME", "PreprocessResult", "preprocess"]

QUARANTINE_NAME: Final = "quarantine.jsonl"


@dataclass(frozen=True, kw_only=True, eq=False)
class PreprocessResult:
    """What was written to `folder`, and the profile that the data report shows."""

    folder: Path
    manifest: Manifest
    profile: DataProfile

    def metrics(self) -> dict[str, float]:
        """Return the figures of the run by name."""
        manifest = self.manifest
        return {
            "rows": float(manifest.source.rows),
            "rows_quarantined": float(manifest.source.rows_quarantined),
            **{f"{name}_rows": float(split.rows) for name, split in manifest.splits.items()},
            "features": float(len(manifest.features)),
            "constant_features": float(len(self.profile.constant_features)),
            "conflicting_rows": float(self.profile.conflicting_rows),
            **({"classes": float(len(manifest.classes))} if manifest.classes is not None else {}),
        }

    def metadata(self) -> dict[str, str]:
        """Return what a Kubeflow artifact shows of the dataset; text, as kfp turns integers into floats."""
        manifest = self.manifest
        return {
            "name": manifest.name,
            "task": manifest.task,
            "target": manifest.target,
            "features": str(len(manifest.features)),
            "rows": ", ".join(f"{name} {split.rows}" for name, split in manifest.splits.items()),
            "source_sha256": manifest.source.sha256,
        }


@dataclass(frozen=True, kw_only=True)
class _Input:
    name: str
    url: str
    sha256: str
    records: Records
    ignored: tuple[str, ...] = ()


def preprocess(config: PreprocessConfig, output_folder: str | Path) -> PreprocessResult:
    """Make the dataset folder `output_folder` (docs/formats.md) from `config.source`.

    Bad rows, when they are quarantined, are in its quarantine.jsonl. The folder appears whole or not at all.

    Raises `InputError` (a parameter is wrong, or the folder is taken), `MissingFileError` (no such source),
    `UnknownNameError` (no such column) and `DataError` (the data breaks a rule: names column, rows and rule).
    """
    check_folder_is_free(output_folder)
    rules = parse_rules(config.schema)
    config, source = _read(config)
    records = source.records
    total = records.table.num_rows + len(records.malformed)
    if total == 0:
        raise DataError(f"source {source.name!r} has no row of data: give at least one row for each split")
    roles = resolve_roles(config, rules, records, source.name)
    violations = check_rows(roles.columns, rules, required=roles.required, finite=roles.finite)
    bad = _union(violations)
    repeated = None
    if config.duplicate_rows == "bad":
        typed = [roles.columns.get(name) for name in records.table.column_names]
        pairs = zip(typed, records.table.columns, strict=True)
        repeated = find_duplicates([raw if column is None else column.values for column, raw in pairs])
    if repeated is not None:
        # A row that is bad for its values is not compared: those are set to null by now.
        repeated = replace(repeated, rows=np.setdiff1d(repeated.rows, bad))
        violations += [repeated] if len(repeated.rows) else []
        bad = _union(violations)
    _judge(config, source, violations, len(bad) + len(records.malformed), total)

    rows = np.setdiff1d(np.arange(records.table.num_rows), bad)
    if not len(rows):
        raise DataError(
            f"source {source.name!r}: no row is left after the quarantine of {total:,}: correct the data"
        )
    target = encode_target(roles.columns[roles.target], roles.task, rows)
    matrix = np.stack([roles.columns[name].numbers[rows] for name in roles.features], axis=1)
    extra = {name: _take(roles.columns[name], rows) for name in roles.extra_columns}
    arranged = arrange(config, matrix, target, extra, names=(roles.target, roles.features))
    matrix, stored, statistics = matrix[arranged.order], arranged.stored, arranged.statistics
    bounds = np.searchsorted(arranged.split_of, np.arange(len(config.fractions) + 1))
    slices = {
        name: slice(int(start), int(stop))
        for name, (start, stop) in zip(config.fractions, pairwise(bounds), strict=True)
    }
    values = target.values[arranged.order]
    columns = {name: pa.array(stored[:, i]) for i, name in enumerate(roles.features)}
    columns[roles.target] = pa.array(values)
    columns.update({name: array.take(pa.array(arranged.order)) for name, array in extra.items()})
    table = pa.table(columns)
    manifest = Manifest(
        name=source.name,
        task=roles.task,
        target=roles.target,
        classes=target.classes,
        features=roles.features,
        extra_columns=roles.extra_columns,
        normalisation=config.normalise,
        statistics=statistics,
        seed=config.seed,
        splits={},
        source=SourceInfo(
            url=source.url, rows=total, rows_quarantined=total - len(rows), sha256=source.sha256
        ),
    )
    quarantine = quarantine_lines(records, violations, bad)
    written = write_dataset(
        output_folder,
        manifest,
        {name: table.slice(part.start, part.stop - part.start) for name, part in slices.items()},
        rows_per_shard=config.rows_per_shard,
        files={QUARANTINE_NAME: quarantine} if quarantine else {},
    )
    profile = make_profile(
        config=config,
        manifest=written,
        roles=roles,
        rules=rules,
        records=records,
        violations=violations,
        matrix=matrix,
        target=values,
        slices=slices,
        conflicts=rows[arranged.conflicts],
        notes=_notes(source),
    )
    return PreprocessResult(folder=Path(output_folder), manifest=written, profile=profile)


def _read(config: PreprocessConfig) -> tuple[PreprocessConfig, _Input]:
    """Read the source and settle the parameters that depend on its kind."""
    name = builtin_name(config.source)
    duplicates = config.duplicate_rows
    if name is not None:
        builtin = load_builtin(name)
        task = (
            builtin.task if config.task == "auto" and config.target in ("", BUILTIN_TARGET) else config.task
        )
        records = Records.of_table(builtin.table, name)
        config = replace(
            config,
            target=config.target or BUILTIN_TARGET,
            task=task,
            duplicate_rows="keep" if duplicates == "auto" else duplicates,
        )
        return config, _Input(name=name, url=f"builtin:{name}", sha256=builtin.sha256, records=records)
    config = replace(config, duplicate_rows="bad" if duplicates == "auto" else duplicates)
    source = find_source(config.source, known_names=BUILTIN_NAMES)
    records = parse(source)
    return config, _Input(
        name=source.name, url=source.url, sha256=source.sha256, records=records, ignored=source.ignored
    )


def _union(violations: list[Violation]) -> npt.NDArray[np.int64]:
    if not violations:
        return np.empty(0, dtype=np.int64)
    return np.unique(np.concatenate([violation.rows for violation in violations]))


def _judge(
    config: PreprocessConfig, source: _Input, violations: list[Violation], bad: int, total: int
) -> None:
    if not bad:
        return
    if config.on_bad_rows == "fail":
        fix = "Correct the rows, or set on_bad_rows='quarantine' to leave them out"
        if any(violation.column is None for violation in violations):
            fix += ", or duplicate_rows='keep' where rows may repeat"
        raise bad_rows_error(source.records, violations, prefix="", fix=fix, source=source.name)
    if bad > config.max_quarantine_fraction * total:
        raise bad_rows_error(
            source.records,
            violations,
            prefix=f"{bad:,} of {total:,} rows ({bad / total:.1%}) are bad, more than "
            f"max_quarantine_fraction = {config.max_quarantine_fraction:g} allows: ",
            fix="Correct the rows or raise max_quarantine_fraction",
            source=source.name,
        )


def _take(column: TypedColumn, rows: npt.NDArray[np.int64]) -> Any:
    values = column.values.take(pa.array(rows))
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
    return values.cast(pa.string()) if column.kind == EMPTY else values


def _notes(source: _Input) -> list[str]:
    notes = []
    if source.ignored:
        shown = ", ".join(source.ignored[:5])
        notes.append(
            f"{len(source.ignored)} hidden or empty names of the source folder were passed over: {shown}."
        )
    if source.records.dropped_columns:
        dropped = ", ".join(source.records.dropped_columns)
        notes.append(f"The index that pandas stored in the Parquet file was left out: {dropped}.")
    return notes
