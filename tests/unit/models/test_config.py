"""`config.json` is read without torch, and a document of another form is refused with its reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_runtime.errors import ElasticError, InputError, IntegrityError, MissingFileError
from elastic_runtime.models import ModelConfig, TensorSpec, read_config

DOCUMENT: dict[str, Any] = {
    "schema": 1,
    "task": "classification",
    "target": "digit",
    "features": ["a", "b"],
    "classes": ["0", "1", "2"],
    "input": {"name": "features", "shape": [-1, 2], "datatype": "FP32"},
    "output": {"name": "logits", "shape": [-1, 3], "datatype": "FP32"},
    "files": {"model.pt2": "00", "model.safetensors": "11"},
    "extra": {"steps": 3},
    "versions": {"torch": "2.13.0"},
}


def write(folder: Path, document: Any) -> Path:
    (folder / "config.json").write_text(document if isinstance(document, str) else json.dumps(document))
    return folder


def test_round_trip(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, DOCUMENT))
    assert config == ModelConfig(
        task="classification",
        target="digit",
        features=("a", "b"),
        classes=("0", "1", "2"),
        input=TensorSpec(name="features", shape=(-1, 2)),
        output=TensorSpec(name="logits", shape=(-1, 3)),
        files={"model.pt2": "00", "model.safetensors": "11"},
        extra={"steps": 3},
        versions={"torch": "2.13.0"},
    )
    assert config.to_dict() == DOCUMENT
    assert config.width == 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"schema": 2}, InputError, r"schema=2 is not known here \(known: 1\)"),
        ({"schema": None}, InputError, "schema=None is not known"),
        ({"task": "ranking"}, InputError, "task='ranking'"),
        ({"features": []}, InputError, "features is empty"),
        ({"features": ["a"]}, InputError, "features has 1 names"),
        ({"classes": ["0"]}, InputError, "there are 1 classes"),
        ({"input": {"name": "x", "shape": [4, 2], "datatype": "FP32"}}, InputError, r"input.shape=\[4, 2\]"),
        ({"input": {"name": "x", "shape": [-1, 2], "datatype": "FP16"}}, InputError, "input.datatype='FP16'"),
        ({"input": {"name": "x", "shape": [-1, 2.0], "datatype": "FP32"}}, IntegrityError, "whole numbers"),
        ({"input": {"name": "x", "datatype": "FP32"}}, IntegrityError, "the field 'shape' is missing"),
        ({"files": {"../escape": "00"}}, IntegrityError, "files names '../escape'"),
        ({"features": None}, IntegrityError, "is not a model configuration"),
    ],
)
def test_a_document_of_another_form(
    tmp_path: Path, change: dict[str, Any], error: type[ElasticError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        read_config(write(tmp_path, {**DOCUMENT, **change}))
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("key", sorted(set(DOCUMENT) - {"schema"}))
def test_a_missing_field_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(IntegrityError, match=f"the field '{key}' is missing"):
        read_config(write(tmp_path, {name: value for name, value in DOCUMENT.items() if name != key}))


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "null"])
def test_text_that_is_no_document(tmp_path: Path, text: str) -> None:
    with pytest.raises(IntegrityError, match="is not a model configuration"):
        read_config(write(tmp_path, text))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(IntegrityError, match="not UTF-8"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("empty", "config.json is missing, and it is written last"),
        ("absent", "the folder does not exist"),
        ("file", "that is a file"),
    ],
)
def test_no_model_there(tmp_path: Path, place: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(MissingFileError) as caught:
        read_config(tmp_path / place)
    assert str(caught.value).startswith(f"no model in {str(tmp_path / place)!r}: {said}")


def test_reading_a_configuration_loads_neither_torch_nor_numpy(tmp_path: Path) -> None:
    code = (
        "import sys; from elastic_runtime.models import read_config; read_config(sys.argv[1]);"
        "print(sorted({'torch', 'numpy', 'safetensors'} & set(sys.modules)))"
    )
    write(tmp_path, DOCUMENT)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
