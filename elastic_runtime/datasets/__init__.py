"""The dataset folder that passes between the steps: its manifest, reading and writing (docs/formats.md)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from elastic_runtime.datasets.manifest import (
    CLASSIFICATION,
    MANIFEST_NAME,
    REGRESSION,
    SCHEMA,
    SPLITS,
    FeatureStatistics,
    Manifest,
    Shard,
    SourceInfo,
    SplitInfo,
    read_manifest,
)

if TYPE_CHECKING:
    from elastic_runtime.datasets.reading import Split, load_split
    from elastic_runtime.datasets.writing import write_dataset

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
    "Split",
    "SplitInfo",
    "load_split",
    "read_manifest",
    "write_dataset",
]

# The manifest needs only the standard library; numpy and pyarrow are loaded when a split is.
_LAZY = {"Split": "reading", "load_split": "reading", "write_dataset": "writing"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
