"""Model and dataset of an evaluation, checked against each other before anything heavy is loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from elastic_runtime.datasets import Manifest, Split, load_split, read_manifest
from elastic_runtime.errors import DataError, InputError, UnknownNameError
from elastic_runtime.evaluation.bootstrap import FloatArray
from elastic_runtime.evaluation.config import EvaluateConfig
from elastic_runtime.evaluation.gates import applicable_to
from elastic_runtime.models import LoadedModel, ModelConfig, read_config

__all__ = ["PathLike", "check_compatible", "check_request", "folder_name", "predict", "read_split"]

PathLike = str | os.PathLike[str]

_BATCH = 8192


def check_request(
    model_folder: PathLike, dataset_folder: PathLike, baseline_folder: PathLike | None, config: EvaluateConfig
) -> Manifest:
    """Read only the descriptions and refuse what cannot work. Returns the dataset's manifest.

    Raises `MissingFileError`, `InputError` and `DataError`; see `elastic_runtime.evaluation.evaluate`.
    """
    manifest = read_manifest(Path(dataset_folder))
    model = read_config(model_folder)
    check_compatible(model, manifest, f"model {folder_name(model_folder)!r}", f"dataset {manifest.name!r}")
    applicable_to(config.gates, manifest.task)
    if baseline_folder is None:
        if "max_regression" in config.gates:
            raise InputError("gates: max_regression compares with a baseline: give one, or remove the gate")
    else:
        baseline = read_config(baseline_folder)
        check_compatible(
            baseline, manifest, f"baseline {folder_name(baseline_folder)!r}", f"dataset {manifest.name!r}"
        )
    if manifest.split(config.split).rows == 0:
        filled = [name for name, info in manifest.splits.items() if info.rows]
        raise DataError(
            f"split {config.split!r} of dataset {manifest.name!r} is empty, so nothing can be evaluated: use "
            f"{' or '.join(map(repr, filled)) or 'another dataset'}, or preprocess with a larger share for it"
        )
    if config.slice_by and config.slice_by not in manifest.columns:
        raise UnknownNameError.of("slice_by column", config.slice_by, manifest.columns)
    return manifest


def check_compatible(model: ModelConfig, manifest: Manifest, model_name: str, dataset_name: str) -> None:
    """Raise `InputError` for the first thing in which model and dataset differ, naming both sides."""
    for what, ours, theirs in (
        ("task", model.task, manifest.task),
        ("target", model.target, manifest.target),
    ):
        if ours != theirs:
            raise InputError(
                f"{model_name} has {what} {ours!r}, but {dataset_name} has {what} {theirs!r}: "
                "evaluate a model on the dataset it was trained for"
            )
    _same_names("features", model.features, manifest.features, model_name, dataset_name)
    _same_names("classes", model.classes or (), manifest.classes or (), model_name, dataset_name)


def read_split(dataset_folder: PathLike, config: EvaluateConfig) -> Split:
    """Load the split and check its values.

    Raises `DataError` for features or targets that are not finite, a class index that has no label, and a
    gate whose metric these targets leave undefined.
    """
    split = load_split(Path(dataset_folder), config.split)
    finite = np.isfinite(split.features)
    if not finite.all():
        row, column = (int(place) for place in np.argwhere(~finite)[0])
        raise DataError(
            f"split {config.split!r}: column {split.manifest.features[column]!r} is not finite in "
            f"{int((~finite[:, column]).sum()):,} rows (first: row {row}); preprocess the data again"
        )
    _check_target(split)
    if np.all(split.target == split.target[0]):
        if "min_auc" in config.gates:
            label = (split.manifest.classes or ())[int(split.target[0])]
            raise DataError(
                f"gates: min_auc cannot be judged: every row of split {config.split!r} has the class "
                f"{label!r}, and a ROC curve needs two; remove the gate or use a split with more classes"
            )
        if "min_r2" in config.gates:
            raise DataError(
                f"gates: min_r2 cannot be judged: the target {split.manifest.target!r} is "
                f"{split.target[0]:g} in every row of split {config.split!r}, and R² compares with its "
                "spread; use max_rmse or max_mae"
            )
    return split


def predict(model: LoadedModel, features: NDArray[np.float32]) -> FloatArray:
    """Return the model's raw output for `features` (n, d), computed in batches so that memory stays flat."""
    parts = [model.predict(features[start : start + _BATCH]) for start in range(0, len(features), _BATCH)]
    return np.concatenate(parts, dtype=np.float64)


def _check_target(split: Split) -> None:
    # Class indexes were checked by the reader.
    wrong = ~np.isfinite(split.target)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise DataError(
            f"split {split.name!r}: target column {split.manifest.target!r} is not a finite number in "
            f"{int(wrong.sum()):,} rows (first: row {row}, value {split.target[row]}); preprocess again"
        )


def _same_names(
    what: str, model: Sequence[str], dataset: Sequence[str], model_name: str, dataset_name: str
) -> None:
    if tuple(model) == tuple(dataset):
        return
    unknown = [name for name in dataset if name not in set(model)]
    absent = [name for name in model if name not in set(dataset)]
    if unknown or absent:
        parts = [
            *([f"only the dataset has {_listed(unknown)}"] if unknown else []),
            *([f"only the model has {_listed(absent)}"] if absent else []),
        ]
        detail = " and ".join(parts)
    else:
        place = next(i for i, (ours, theirs) in enumerate(zip(model, dataset, strict=True)) if ours != theirs)
        detail = (
            f"the order differs: number {place + 1} is {model[place]!r} in the model and "
            f"{dataset[place]!r} in the dataset"
        )
    raise InputError(
        f"{model_name} has {len(model)} {what}, {dataset_name} has {len(dataset)}; {detail}: "
        "evaluate a model on the dataset it was trained for, or train it again on this one"
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def folder_name(folder: PathLike) -> str:
    """Return the last part of a folder's path: what people call it, without where it lies on this machine."""
    return Path(folder).name
