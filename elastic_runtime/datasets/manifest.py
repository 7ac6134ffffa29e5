"""The manifest of a dataset folder: what it holds, checked field by field when it is read.

The format is described in docs/formats.md. Only the standard library is needed here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, NoReturn

from elastic_runtime.errors import InputError, IntegrityError, MissingFileError, UnknownNameError

__all__ = [
    "CLASSIFICATION",
    "MANIFEST_NAME",
    "REGRESSION",
    "SCHEMA",
    "SPLITS",
    "FeatureStatistics",
    "Manifest",
    "Shard",
    "SourceInfo",
    "SplitInfo",
    "read_manifest",
]

SCHEMA: Final = 1
MANIFEST_NAME: Final = "manifest.json"
SPLITS: Final = ("train", "validation", "test")
CLASSIFICATION: Final = "classification"
REGRESSION: Final = "regression"
_TASKS = (CLASSIFICATION, REGRESSION)
_NORMALISATIONS = ("standard", "none")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One Parquet file: `path` relative to the folder, its rows, its bytes and its sha256 in hex."""

    path: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """Rows of one split and the shards that hold them, in order."""

    rows: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True, kw_only=True)
class FeatureStatistics:
    """Of one feature over the training split, before normalisation. `std` is 1 for a constant feature."""

    mean: float
    std: float
    min: float
    max: float


@dataclass(frozen=True, kw_only=True)
class SourceInfo:
    """The input that the dataset was made from; `url` never holds a local folder or a credential."""

    url: str
    rows: int
    rows_quarantined: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of manifest.json; docs/formats.md says what each field means."""

    schema: int = SCHEMA
    name: str
    task: str
    target: str
    classes: tuple[str, ...] | None
    features: tuple[str, ...]
    extra_columns: tuple[str, ...]
    normalisation: str
    statistics: Mapping[str, FeatureStatistics]
    seed: int
    splits: Mapping[str, SplitInfo]
    source: SourceInfo

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all stored columns, in stored order: features, target, extra columns."""
        return (*self.features, self.target, *self.extra_columns)

    def split(self, name: str) -> SplitInfo:
        """Return the split `name`. Raises `UnknownNameError`."""
        if name not in self.splits:
            raise UnknownNameError.of("split", name, self.splits)
        return self.splits[name]

    def to_json(self) -> str:
        """Return the JSON text; equal manifests give equal text."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str = MANIFEST_NAME) -> Manifest:
        """Parse and check `text`; `where` names the file in messages.

        Raises `IntegrityError` for what is not a manifest, `InputError` for a schema of another version.
        """
        try:
            content = json.loads(text)
        except ValueError as error:
            raise IntegrityError(f"{where} is not valid JSON ({error}): make the dataset again") from error
        if not isinstance(content, dict):
            raise IntegrityError(f"{where} is not a JSON object: make the dataset again")
        schema = content.get("schema")
        if schema != SCHEMA or isinstance(schema, bool):
            raise InputError(
                f"{where}: schema is {schema!r}, this version of kfp-elastic reads {SCHEMA}: "
                "make the dataset again or install the version that wrote it"
            )
        return _Reader(where).manifest(content)


def read_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of the dataset in `folder`.

    Raises `MissingFileError` when there is none, `InputError` for an unknown schema and `IntegrityError` when
    it is damaged.
    """
    path = Path(folder) / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        what = "has no manifest.json" if Path(folder).is_dir() else "does not exist"
        raise MissingFileError(
            f"dataset folder {str(folder)!r} {what}: give the folder that preprocess wrote"
        ) from error
    except NotADirectoryError as error:
        raise MissingFileError(
            f"dataset {str(folder)!r} is a file: give the folder that preprocess wrote"
        ) from error
    return Manifest.from_json(text, str(path))


class _Reader:
    """Takes the fields out of the parsed JSON and names the one that is wrong."""

    def __init__(self, where: str) -> None:
        self.where = where

    def manifest(self, content: dict[str, Any]) -> Manifest:
        classes = content.get("classes")
        manifest = Manifest(
            name=self.text(content, "name"),
            task=self.one_of(content, "task", _TASKS),
            target=self.text(content, "target"),
            classes=None if classes is None else self.names(content, "classes"),
            features=self.names(content, "features"),
            extra_columns=self.names(content, "extra_columns"),
            normalisation=self.one_of(content, "normalisation", _NORMALISATIONS),
            statistics={
                name: FeatureStatistics(
                    **{
                        key: self.number(value, key, f"statistics.{name}.")
                        for key in ("mean", "std", "min", "max")
                    }
                )
                for name, value in self.objects(content, "statistics").items()
            },
            seed=self.count(content, "seed"),
            splits={name: self.split(name, value) for name, value in self.objects(content, "splits").items()},
            source=self.source(content.get("source")),
        )
        self.check(manifest)
        return manifest

    def check(self, manifest: Manifest) -> None:
        """Fields that must agree with each other."""
        if (manifest.classes is None) != (manifest.task == REGRESSION):
            self.refuse("classes", manifest.classes, f"a list for {CLASSIFICATION}, null for {REGRESSION}")
        if not manifest.features:
            self.refuse("features", [], "at least one name")
        if len(set(manifest.columns)) != len(manifest.columns):
            self.refuse("features", list(manifest.columns), "names that differ from target and extra_columns")
        if set(manifest.statistics) != set(manifest.features):
            self.refuse("statistics", sorted(manifest.statistics), "one entry for each feature")
        if any(statistics.std <= 0 for statistics in manifest.statistics.values()):
            self.refuse("statistics", "a std of 0 or less", "a positive std for each feature")

    def split(self, name: str, content: Mapping[str, Any]) -> SplitInfo:
        where = f"splits.{name}."
        rows = self.count(content, "rows", where)
        shards = content.get("shards")
        if not isinstance(shards, list) or not all(isinstance(shard, dict) for shard in shards):
            self.refuse(where + "shards", shards, "a list of objects")
        parsed = tuple(self.shard(shard, f"{where}shards[{i}].") for i, shard in enumerate(shards))
        if sum(shard.rows for shard in parsed) != rows:
            self.refuse(where + "rows", rows, "the sum of the rows of its shards")
        return SplitInfo(rows=rows, shards=parsed)

    def shard(self, content: Mapping[str, Any], where: str) -> Shard:
        path = self.text(content, "path", where)
        parts = PurePosixPath(path)
        # A manifest may come from elsewhere: it must not make us read outside its own folder.
        if parts.is_absolute() or ".." in parts.parts or "\0" in path:
            self.refuse(where + "path", path, "a path inside the dataset folder")
        return Shard(
            path=path,
            rows=self.count(content, "rows", where),
            bytes=self.count(content, "bytes", where),
            sha256=self.text(content, "sha256", where),
        )

    def source(self, content: Any) -> SourceInfo:
        if not isinstance(content, dict):
            self.refuse("source", content, "an object")
        return SourceInfo(
            url=self.text(content, "url", "source."),
            rows=self.count(content, "rows", "source."),
            rows_quarantined=self.count(content, "rows_quarantined", "source."),
            sha256=self.text(content, "sha256", "source."),
        )

    def text(self, content: Mapping[str, Any], key: str, prefix: str = "") -> str:
        return str(
            self.take(content, key, prefix, lambda value: isinstance(value, str) and value != "", "a text")
        )

    def count(self, content: Mapping[str, Any], key: str, prefix: str = "") -> int:
        def fits(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value >= 0

        return int(self.take(content, key, prefix, fits, "a whole number from 0"))

    def number(self, content: Mapping[str, Any], key: str, prefix: str = "") -> float:
        def fits(value: Any) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

        return float(self.take(content, key, prefix, fits, "a finite number"))

    def names(self, content: Mapping[str, Any], key: str) -> tuple[str, ...]:
        def fits(value: Any) -> bool:
            return (
                isinstance(value, list)
                and all(isinstance(name, str) for name in value)
                and len(set(value)) == len(value)
            )

        return tuple(self.take(content, key, "", fits, "a list of different names"))

    def one_of(self, content: Mapping[str, Any], key: str, known: tuple[str, ...]) -> str:
        return str(self.take(content, key, "", lambda value: value in known, " or ".join(known)))

    def objects(self, content: Mapping[str, Any], key: str) -> dict[str, dict[str, Any]]:
        def fits(value: Any) -> bool:
            return isinstance(value, dict) and all(isinstance(entry, dict) for entry in value.values())

        taken: dict[str, dict[str, Any]] = self.take(content, key, "", fits, "an object of objects")
        return taken

    def take(
        self, content: Mapping[str, Any], key: str, prefix: str, fits: Callable[[Any], bool], wanted: str
    ) -> Any:
        value = content.get(key)
        if not fits(value):
            self.refuse(prefix + key, value, wanted)
        return value

    def refuse(self, key: str, value: Any, wanted: str) -> NoReturn:
        raise IntegrityError(
            f"{self.where}: {key} is {value!r:.80}, expected {wanted}: make the dataset again"
        )
