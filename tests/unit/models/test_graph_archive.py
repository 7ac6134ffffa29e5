"""Reading a model never runs what is in it: archives that would make torch run code are refused.

Each hostile archive is a real one that was changed, with checksums that fit; the "canary" is a file that the
code in the archive would create.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_runtime.errors import IntegrityError
from elastic_runtime.models import load_model, save_model
from elastic_runtime.models.archive import check_graph_archive

Records = dict[str, bytes]
GRAPH = "archive/models/model.json"
WEIGHTS = "archive/data/weights/model_weights_config.json"
CONSTANTS = "archive/data/constants/model_constants_config.json"


class Creates:
    """Unpickling this makes the file `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.fspath(self.path),)


class Shapes(torch.nn.Module):
    """A graph with symbolic sizes, string arguments and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.constant = torch.eye(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([x, torch.zeros(x.shape[0] * 2, 4)])[: x.shape[0]]
        return torch.einsum("ij,jk->ik", torch.nn.functional.gelu(rows), self.constant)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(
        tmp_path / "model",
        Shapes(),
        torch.randn(4, 4),
        task="classification",
        features=list("abcd"),
        target="t",
        classes=list("wxyz"),
    )
    return tmp_path / "model"


def read(folder: Path) -> Records:
    with zipfile.ZipFile(folder / "model.pt2") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write(folder: Path, records: Records) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    (folder / "model.pt2").write_bytes(buffer.getvalue())
    config = json.loads((folder / "config.json").read_text())
    config["files"]["model.pt2"] = hashlib.sha256(buffer.getvalue()).hexdigest()
    (folder / "config.json").write_text(json.dumps(config))


def torch_saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def sample_inputs(records: Records, canary: Path) -> None:
    records["archive/data/sample_inputs/model.pt"] = torch_saved(((Creates(canary),), {}))


def pickled_weight(records: Records, canary: Path) -> None:
    config = json.loads(records[CONSTANTS])
    payload = next(iter(config["config"].values()))
    payload["use_pickle"] = True
    records[f"archive/data/constants/{payload['path_name']}"] = torch_saved(Creates(canary))
    records[CONSTANTS] = json.dumps(config).encode()


def custom_object(records: Records, canary: Path) -> None:
    config = json.loads(records[CONSTANTS])
    payload = next(iter(config["config"].values()))
    payload["path_name"] = "opaque_obj_0"
    records["archive/data/constants/opaque_obj_0"] = pickle.dumps(Creates(canary))
    records[CONSTANTS] = json.dumps(config).encode()


def custom_object_under_a_tensors_name(records: Records, canary: Path) -> None:
    config = json.loads(records[CONSTANTS])
    next(iter(config["config"].values()))["path_name"] = "opaque_obj_0"
    records[CONSTANTS] = json.dumps(config).encode()


def legacy_weights(records: Records, canary: Path) -> None:
    records["archive/data/weights/model.pt"] = torch_saved({"w": Creates(canary)})


def shared_library(records: Records, canary: Path) -> None:
    records["archive/data/aotinductor/model/model.so"] = b"\x7fELF"


def evaluated_size(records: Records, canary: Path) -> None:
    hostile = f"__import__('os').mkdir({os.fspath(canary)!r})"
    text = records[GRAPH].decode()
    old = '"expr_str": "Symbol(\''
    assert old in text
    records[GRAPH] = text.replace(old, f'"expr_str": {json.dumps(hostile)}, "was": "Symbol(\'', 1).encode()


def evaluated_size_without_quotes(records: Records, canary: Path) -> None:
    change_graph(records, "expr_str", "eval(chr(49))")


def change_graph(records: Records, key: str, text: str) -> None:
    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: text if k == key and isinstance(v, str) else changed(v) for k, v in value.items()}
        return [changed(part) for part in value] if isinstance(value, list) else value

    records[GRAPH] = json.dumps(changed(json.loads(records[GRAPH]))).encode()


def target(text: str) -> Callable[[Records, Path], None]:
    return lambda records, canary: change_graph(records, "target", text)


def name_with_code(records: Records, canary: Path) -> None:
    change_graph(records, "name", "x=print()")


def imported_module(records: Records, canary: Path) -> None:
    spec = [
        1,
        {
            "type": "collections.defaultdict",
            "context": json.dumps({"default_factory_module": "antigravity", "default_factory_name": "x"}),
            "children_spec": [],
        },
    ]
    change_graph(records, "in_spec", json.dumps(spec))


def two_roots(records: Records, canary: Path) -> None:
    records["version"] = b"1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (sample_inputs, "holds pickled example inputs"),
        (pickled_weight, "holds 'constant' as a pickle"),
        (custom_object, "holds the record 'data/constants/opaque_obj_0'"),
        (custom_object_under_a_tensors_name, "as an object that is not a tensor"),
        (legacy_weights, "holds the record 'data/weights/model.pt'"),
        (shared_library, "holds the record 'data/aotinductor/model/model.so'"),
        (evaluated_size, 'has expr_str="__import__'),
        (evaluated_size_without_quotes, r"has expr_str='eval\(chr\(49\)\)'"),
        (target("torch.os.system"), "has target='torch.os.system'"),
        (target("torch.ops.__class__"), "has target='torch.ops.__class__'"),
        (target("_operator.methodcaller"), "has target='_operator.methodcaller'"),
        (target("#extension"), "has target='#extension'"),
        (name_with_code, "has name='x=print"),
        (imported_module, "has in_spec="),
        (two_roots, "has the top folders"),
    ],
)
def test_a_hostile_archive_is_refused(
    folder: Path, tmp_path: Path, change: Callable[[Records, Path], None], message: str
) -> None:
    canary = tmp_path / "canary"
    records = read(folder)
    change(records, canary)
    write(folder, records)
    with pytest.raises(IntegrityError, match=message) as caught:
        load_model(folder)
    assert "model.pt2" in str(caught.value)
    assert not canary.exists()


@pytest.mark.parametrize(
    "change", [sample_inputs, pickled_weight, evaluated_size], ids=lambda change: change.__name__
)
def test_torch_itself_would_run_them(
    folder: Path, tmp_path: Path, change: Callable[[Records, Path], None]
) -> None:
    """Without this, the test above could pass because the archives are harmless."""
    canary = tmp_path / "canary"
    records = read(folder)
    change(records, canary)
    write(folder, records)
    with pytest.raises(Exception):  # noqa: B017 - whatever torch says about it afterwards
        torch.export.load(io.BytesIO((folder / "model.pt2").read_bytes())).undefined  # noqa: B018
    assert canary.exists()


def test_a_repacked_archive_that_was_not_changed_is_read(folder: Path) -> None:
    write(folder, read(folder))
    check_graph_archive((folder / "model.pt2").read_bytes(), where="model.pt2")


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x05\x06" + bytes(18), pickle.dumps({"a": 1})])
def test_what_is_no_archive_is_refused(folder: Path, content: bytes) -> None:
    (folder / "model.pt2").write_bytes(content)
    config = json.loads((folder / "config.json").read_text())
    config["files"]["model.pt2"] = hashlib.sha256(content).hexdigest()
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(IntegrityError, match=r"model\.pt2"):
        load_model(folder)
