"""Real datasets and models of a few seconds, made through the package's own writers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn import datasets as sets

from elastic_runtime.datasets import FeatureStatistics, Manifest, SourceInfo
from elastic_runtime.datasets.writing import write_dataset
from elastic_runtime.models import save_model


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A whole table before it is split."""

    name: str
    features: np.ndarray
    target: np.ndarray
    classes: tuple[str, ...] | None
    names: tuple[str, ...]
    extra: dict[str, list[object]]


def write_rows(
    folder: Path, rows: Rows, *, test: slice | np.ndarray | None = None, target_name: str = "label"
) -> Manifest:
    """Write `rows` as a dataset: every third row is the test split unless `test` picks other ones."""
    every = np.arange(len(rows.target))
    tested = every % 3 == 0
    if test is not None:
        tested = np.zeros(len(every), dtype=bool)
        tested[test] = True
    train = rows.features[~tested] if (~tested).any() else rows.features
    mean, std = train.mean(axis=0), train.std(axis=0)
    std[std == 0] = 1
    manifest = Manifest(
        name=rows.name,
        task="regression" if rows.classes is None else "classification",
        target=target_name,
        classes=rows.classes,
        features=rows.names,
        extra_columns=tuple(rows.extra),
        normalisation="standard",
        statistics={
            name: FeatureStatistics(
                mean=float(mean[i]),
                std=float(std[i]),
                min=float(train[:, i].min()),
                max=float(train[:, i].max()),
            )
            for i, name in enumerate(rows.names)
        },
        seed=0,
        splits={},
        source=SourceInfo(url=rows.name, rows=len(rows.target), rows_quarantined=0, sha256="0" * 64),
    )
    normalised = ((rows.features - mean) / std).astype(np.float32)
    kind = np.float64 if rows.classes is None else np.int64

    def table(chosen: np.ndarray) -> pa.Table:
        columns = {name: normalised[chosen, i] for i, name in enumerate(rows.names)}
        columns[target_name] = rows.target[chosen].astype(kind)
        for name, values in rows.extra.items():
            columns[name] = pa.array([values[i] for i in np.flatnonzero(chosen)])
        return pa.table(columns)

    tables = {"train": table(~tested), "validation": table(np.zeros_like(tested)), "test": table(tested)}
    return write_dataset(folder, manifest, tables, rows_per_shard=400)


def digits() -> Rows:
    """Scikit-learn's handwritten digits, with the pen as a made-up extra column."""
    found = sets.load_digits()
    rows = len(found.target)
    pens = [("ink", "pencil", "chalk, white", None)[(7 * i) % 4] for i in range(rows)]
    return Rows(
        name="digits",
        features=found.data.astype(np.float64),
        target=found.target,
        classes=tuple(map(str, found.target_names)),
        names=tuple(f"pixel_{i}" for i in range(64)),
        extra={"pen": pens, "number": list(range(rows))},
    )


def diabetes() -> Rows:
    """Scikit-learn's diabetes progression, a regression set."""
    found = sets.load_diabetes(scaled=False)
    return Rows(
        name="diabetes",
        features=found.data,
        target=found.target,
        classes=None,
        names=tuple(found.feature_names),
        extra={"patient": [f"p{i:03}" for i in range(len(found.target))]},
    )


def breast_cancer() -> Rows:
    """Scikit-learn's breast cancer set, two classes."""
    found = sets.load_breast_cancer()
    return Rows(
        name="breast_cancer",
        features=found.data,
        target=found.target,
        classes=tuple(map(str, found.target_names)),
        names=tuple(map(str, found.feature_names)),
        extra={},
    )


def train_model(folder: Path, dataset: Path, *, steps: int = 60, hidden: int = 32, seed: int = 0) -> None:
    """Train a small network on the dataset's training split and save it as a model folder."""
    from elastic_runtime.datasets import load_split

    split = load_split(dataset, "train")
    manifest = split.manifest
    torch.manual_seed(seed)
    outputs = len(manifest.classes) if manifest.classes else 1
    module = torch.nn.Sequential(
        torch.nn.Linear(len(manifest.features), hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, outputs)
    )
    features = torch.from_numpy(split.features)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    if manifest.classes:
        target = torch.from_numpy(split.target)
        loss_of = torch.nn.functional.cross_entropy
    else:
        target = torch.from_numpy(split.target.astype(np.float32))[:, None]
        with torch.no_grad():
            module[-1].bias.fill_(float(target.mean()))
        loss_of = torch.nn.functional.mse_loss
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(module(features), target).backward()
        optimizer.step()
    save(folder, module, manifest)


def save(folder: Path, module: torch.nn.Module, manifest: Manifest) -> None:
    """Save `module` as a model of the dataset that `manifest` describes."""
    save_model(
        folder,
        module,
        torch.zeros(2, len(manifest.features)) + 0.5,
        task=manifest.task,
        features=manifest.features,
        target=manifest.target,
        classes=manifest.classes,
    )


@dataclass(frozen=True, kw_only=True)
class Made:
    """A dataset with a good model and a poor one."""

    dataset: Path
    model: Path
    baseline: Path
    manifest: Manifest


def _make(folder: Path, rows: Rows, good: int, poor: int) -> Made:
    manifest = write_rows(folder / "dataset", rows)
    train_model(folder / "model", folder / "dataset", steps=good)
    train_model(folder / "baseline", folder / "dataset", steps=poor, hidden=8)
    return Made(
        dataset=folder / "dataset", model=folder / "model", baseline=folder / "baseline", manifest=manifest
    )


@pytest.fixture(scope="session")
def digits_made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Digits with a model of about 0.97 and a baseline of about 0.85."""
    return _make(tmp_path_factory.mktemp("digits"), digits(), good=60, poor=12)


@pytest.fixture(scope="session")
def diabetes_made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Diabetes with a model that explains about half of the variance and a baseline that explains little."""
    return _make(tmp_path_factory.mktemp("diabetes"), diabetes(), good=150, poor=1)


@pytest.fixture(scope="session")
def cancer_made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Breast cancer, two classes."""
    return _make(tmp_path_factory.mktemp("cancer"), breast_cancer(), good=40, poor=3)


@pytest.fixture(scope="session")
def writers() -> dict[str, Callable[..., object]]:
    """The functions above, for tests that make folders of their own."""
    return {"write_rows": write_rows, "digits": digits, "diabetes": diabetes, "save": save, "Rows": Rows}
