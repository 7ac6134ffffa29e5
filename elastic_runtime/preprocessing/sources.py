"""Finds the files of a source: one file or a folder of files, on this machine or behind any fsspec URL."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

import fsspec

from elastic_runtime.errors import (
    DataError,
    ElasticError,
    InputError,
    MissingDependencyError,
    MissingFileError,
)

__all__ = ["FORMATS", "Source", "SourceFile", "find_source"]

FORMATS: Final[Mapping[str, str]] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}
_COMPRESSED: Final = (".gz", ".bz2", ".xz")
_EXTRAS: Final = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
}


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file: its name as shown to people (relative to a folder) and its whole content, decompressed."""

    name: str
    content: bytes


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files of one format. `url` shows no local folder and no credential; `ignored` lists skipped names."""

    name: str
    url: str
    format: str
    files: tuple[SourceFile, ...]
    sha256: str
    ignored: tuple[str, ...] = ()


def find_source(url: str, *, known_names: tuple[str, ...] = ()) -> Source:
    """Read the files of `url`, a path or fsspec URL of a file or a folder, in the order of their names.

    In a folder, subfolders are searched; hidden names (`.` or `_` first), zero-byte directory markers and
    empty subfolders are passed over. `known_names` are offered when nothing is found.

    Raises `MissingFileError`, `InputError` (format unknown or mixed, no access), `DataError` (empty file) or
    `MissingDependencyError` (no package for the protocol).
    """
    fs, root = _file_system(url)
    try:
        kind = fs.info(root)["type"]
        paths, ignored = _search(fs, root, url) if kind == "directory" else ([root], [])
        if not paths:
            raise MissingFileError(
                f"source folder {_public(url)!r} has no data file: give one with files "
                f"ending in {', '.join(FORMATS)}"
            )
        formats = {path: _format(path, url) for path in paths}
        _refuse_mixed(formats, root, url)
        files = tuple(_read(fs, path, _shown(path, root, kind)) for path in paths)
    except MissingFileError:
        raise
    except FileNotFoundError as error:
        names = f" (built-in sets: {', '.join(known_names)})" if known_names else ""
        raise MissingFileError(
            f"source {_public(url)!r} does not exist or is out of reach: "
            f"give a file, a folder or a URL{names}"
        ) from error
    except ElasticError:
        raise
    except Exception as error:
        # Each backend has errors of its own.
        reason = _public(" ".join(str(error).split()))[:300] or type(error).__name__
        raise InputError(f"source {_public(url)!r} cannot be read: {reason}") from error
    name = PurePosixPath(root).name or url
    return Source(
        name=name,
        url=name if _is_local(fs) else _public(url),
        format=formats[paths[0]],
        files=files,
        sha256=_digest(files, one=kind != "directory"),
        ignored=tuple(ignored),
    )


def _file_system(url: str) -> tuple[Any, str]:
    protocol = url.split("://", 1)[0] if "://" in url else "file"
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        if protocol in _EXTRAS:
            raise MissingDependencyError.of(*_EXTRAS[protocol]) from error
        raise InputError(
            f"source {_public(url)!r}: {protocol}:// needs a package that is not installed: {error}"
        ) from error
    except ValueError as error:
        raise InputError(f"source {_public(url)!r} is not a URL that fsspec can open: {error}") from error
    return fs, str(root).rstrip("/") or "/"


def _is_local(fs: Any) -> bool:
    protocol = fs.protocol
    return "file" in ((protocol,) if isinstance(protocol, str) else tuple(protocol))


def _search(fs: Any, root: str, url: str) -> tuple[list[str], list[str]]:
    kept, ignored = [], []
    for path, info in sorted(fs.find(root, detail=True).items()):
        relative = _shown(path, root, "directory")
        parts = PurePosixPath(relative).parts
        size = info.get("size") or 0
        marker = info["type"] == "directory" or (
            size == 0 and (path.endswith("/") or not PurePosixPath(path).suffix or path.endswith("_$folder$"))
        )
        if marker or not parts or any(part.startswith((".", "_")) for part in parts):
            ignored.append(relative or path)
            continue
        if relative == "manifest.json":
            raise InputError(
                f"source {_public(url)!r} has a manifest.json, so preprocess wrote it: give the raw data"
            )
        kept.append(path)
    return kept, ignored


def _shown(path: str, root: str, kind: str) -> str:
    if kind != "directory":
        return PurePosixPath(path).name
    return path.removeprefix(root).strip("/")


def _suffix(path: str) -> str:
    pure = PurePosixPath(path.lower())
    return PurePosixPath(pure.stem).suffix if pure.suffix in _COMPRESSED else pure.suffix


def _format(path: str, url: str) -> str:
    found = FORMATS.get(_suffix(path))
    if found is None:
        raise InputError(
            f"source {_public(url)!r}: {PurePosixPath(path).name!r} cannot be read: the name must end in "
            f"{', '.join(FORMATS)} (and {', '.join(_COMPRESSED)} if compressed); "
            "start the name with '.' to have it ignored"
        )
    return found


def _refuse_mixed(formats: Mapping[str, str], root: str, url: str) -> None:
    first_path, first = next(iter(formats.items()))
    for path, found in formats.items():
        if found != first:
            raise InputError(
                f"source {_public(url)!r} mixes formats: "
                f"{_shown(first_path, root, 'directory')!r} is {first}, "
                f"{_shown(path, root, 'directory')!r} is {found}: keep one format in the folder"
            )


def _read(fs: Any, path: str, name: str) -> SourceFile:
    try:
        with fs.open(path, "rb", compression="infer") as file:
            content = file.read()
    except EOFError as error:
        raise DataError(f"source file {name!r} is cut short ({error}): copy it again") from error
    if not content:
        raise DataError(f"source file {name!r} is empty (0 bytes): remove it or write it again")
    return SourceFile(name=name, content=content)


def _digest(files: tuple[SourceFile, ...], *, one: bool) -> str:
    if one:
        return hashlib.sha256(files[0].content).hexdigest()
    whole = hashlib.sha256()
    for file in files:
        whole.update(f"{hashlib.sha256(file.content).hexdigest()}  {file.name}\n".encode())
    return whole.hexdigest()


def _public(url: str) -> str:
    """Drop what may be secret of a URL: user, password, query."""
    return re.sub(r"(?<=://)[^/@]*@", "", url.split("?", 1)[0])
