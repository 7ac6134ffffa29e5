"""A model of the real digits, the dataset folder it belongs to, and one server of it for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn.datasets import load_digits

from elastic_runtime.datasets import Manifest, SourceInfo, write_dataset
from elastic_runtime.datasets.manifest import FeatureStatistics
from elastic_runtime.models import save_model
from elastic_runtime.serving import Server, start_server

FEATURES = tuple(f"pixel_{row}_{column}" for row in range(8) for column in range(8))
CLASSES = tuple("0123456789")


@pytest.fixture(scope="session")
def dataset_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "dataset"
    digits = load_digits()
    statistics = {
        name: FeatureStatistics(
            mean=float(c.mean()), std=float(c.std()) or 1.0, min=float(c.min()), max=float(c.max())
        )
        for name, c in zip(FEATURES, digits.data.T, strict=True)
    }
    manifest = Manifest(
        name="digits",
        task="classification",
        target="digit",
        classes=CLASSES,
        features=FEATURES,
        extra_columns=(),
        normalisation="standard",
        statistics=statistics,
        seed=0,
        splits={},
        source=SourceInfo(url="digits", rows=len(digits.data), rows_quarantined=0, sha256="0" * 64),
    )
    tables = {}
    order = np.random.default_rng(0).permutation(len(digits.data))
    for split, rows in {"train": order[:1200], "validation": order[1200:1500], "test": order[1500:]}.items():
        columns = {
            name: ((digits.data[rows, i] - statistics[name].mean) / statistics[name].std).astype(np.float32)
            for i, name in enumerate(FEATURES)
        }
        by_name = {**columns, "digit": digits.target[rows].astype(np.int64)}
        tables[split] = pa.table({name: by_name[name] for name in manifest.columns})
    write_dataset(folder, manifest, tables, rows_per_shard=500)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, dataset_folder: Path) -> Path:
    from elastic_runtime.datasets import load_split

    folder = tmp_path_factory.mktemp("digits") / "model"
    train = load_split(dataset_folder, "train")
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    )
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    features, target = torch.from_numpy(train.features.copy()), torch.from_numpy(train.target.copy())
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(features), target).backward()
        optimizer.step()
    save_model(
        folder,
        module,
        features[:4],
        task="classification",
        features=FEATURES,
        target="digit",
        classes=CLASSES,
    )
    return folder


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[Server]:
    with start_server(model_folder, name="digits") as running:
        yield running
