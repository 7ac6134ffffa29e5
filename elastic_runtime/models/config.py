"""`config.json` of a model folder: what goes in, what comes out, and the checksum of each file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from elastic_runtime.errors import InputError, IntegrityError, MissingFileError

__all__ = [
    "CONFIG_FILE",
    "GRAPH_FILE",
    "SCHEMA",
    "WEIGHTS_FILE",
    "ModelConfig",
    "Task",
    "TensorSpec",
    "read_config",
    "read_verified",
]

SCHEMA = 1
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
GRAPH_FILE = "model.pt2"

Task = Literal["classification", "regression"]
TASKS: tuple[Task, ...] = ("classification", "regression")


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Name, shape and type of a tensor, as the Open Inference Protocol describes it."""

    name: str
    """Name of the tensor in requests and answers."""

    shape: tuple[int, ...]
    """Sizes; the first is the batch and -1, which means any number of rows."""

    datatype: str = "FP32"
    """Type by its Open Inference Protocol name."""

    @property
    def row(self) -> tuple[int, ...]:
        """Shape of one row: the sizes without the batch."""
        return self.shape[1:]

    def to_dict(self) -> dict[str, Any]:
        """Return the tensor as it stands in `config.json`."""
        return {"name": self.name, "shape": list(self.shape), "datatype": self.datatype}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a reader has to know about a model, without loading it.

    Raises `InputError` naming the field when the values do not fit together.
    """

    task: Task
    """`classification` (the output holds one logit per class) or `regression` (the predicted values)."""

    target: str
    """Name of the column that is predicted."""

    features: tuple[str, ...]
    """Names of the feature columns, in the order of the input's elements."""

    classes: tuple[str, ...] | None
    """Labels in the order of the output's columns; None for regression."""

    input: TensorSpec
    """The one input: a row holds as many elements as there are features."""

    output: TensorSpec
    """The one output."""

    files: Mapping[str, str] = field(default_factory=dict)
    """sha256 (hexadecimal) by file name."""

    extra: Mapping[str, Any] = field(default_factory=dict)
    """What the training script adds; any JSON."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions that wrote the model, by package."""

    def __post_init__(self) -> None:
        """Check that the fields fit together."""
        if self.task not in TASKS:
            raise InputError(f"task={self.task!r} is none of {', '.join(TASKS)}")
        if not isinstance(self.target, str) or not self.target:
            raise InputError(f"target={self.target!r} is not the name of a column")
        _check_names("features", self.features)
        for what, spec in (("input", self.input), ("output", self.output)):
            if len(spec.shape) < 1 or spec.shape[0] != -1 or any(size < 1 for size in spec.row):
                raise InputError(
                    f"{what}.shape={list(spec.shape)} is not -1 (the batch) and then sizes from 1 on"
                )
            if spec.datatype != "FP32":
                raise InputError(f"{what}.datatype={spec.datatype!r} is not supported: only FP32 is")
        width = 1
        for size in self.input.row:
            width *= size
        if len(self.features) != width:
            raise InputError(
                f"features has {len(self.features)} names, but a row of the input has {width} elements "
                f"(shape {list(self.input.shape)}): name every element once"
            )
        self._check_output()

    def _check_output(self) -> None:
        row = self.output.row
        if self.task == "regression":
            if self.classes is not None:
                raise InputError(f"classes={list(self.classes)[:5]} is given for regression: leave it None")
            if row not in ((), (1,)):
                raise InputError(
                    f"output has shape {list(self.output.shape)}: a regression model gives one value a row, "
                    "shape [-1] or [-1, 1]"
                )
            return
        if self.classes is None:
            raise InputError(
                "classes is None: a classification model needs its labels, one per output column"
            )
        _check_names("classes", self.classes)
        if row != (len(self.classes),):
            raise InputError(
                f"output has shape {list(self.output.shape)}, but there are {len(self.classes)} classes: a "
                f"classification model gives one logit per class, shape [-1, {len(self.classes)}]"
            )

    @property
    def width(self) -> int:
        """Number of features, which is the number of elements of one input row."""
        return len(self.features)

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `config.json` holds."""
        return {
            "schema": SCHEMA,
            "task": self.task,
            "target": self.target,
            "features": list(self.features),
            "classes": None if self.classes is None else list(self.classes),
            "input": self.input.to_dict(),
            "output": self.output.to_dict(),
            "files": dict(self.files),
            "extra": dict(self.extra),
            "versions": dict(self.versions),
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> ModelConfig:
        """Build the configuration from the document of a `config.json`.

        Raises `InputError` for a schema that is not known or fields that do not fit together, and
        `KeyError` or `TypeError` for a document of another form.
        """
        if document.get("schema") != SCHEMA:
            raise InputError(
                f"schema={document.get('schema')!r} is not known here (known: {SCHEMA}): read the model with "
                "the version of kfp-elastic that wrote it, or newer"
            )
        classes = document["classes"]
        for name in document["files"]:
            if not isinstance(name, str) or "/" in name or name.startswith("."):
                raise TypeError(f"files names {name!r}, which is not a file of this folder")
        return cls(
            task=document["task"],
            target=document["target"],
            features=tuple(document["features"]),
            classes=None if classes is None else tuple(classes),
            input=_tensor(document["input"]),
            output=_tensor(document["output"]),
            files=dict(document["files"]),
            extra=dict(document["extra"]),
            versions=dict(document["versions"]),
        )


def read_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """Return the configuration of the model in `folder`, without loading torch or reading the weights.

    Raises `MissingFileError` if there is no finished model, `InputError` for a schema that is not known,
    and `IntegrityError` if `config.json` cannot be read as one.
    """
    path = Path(folder) / CONFIG_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        where = f"no model in {os.fspath(folder)!r}"
        if not Path(folder).exists():
            raise MissingFileError(
                f"{where}: the folder does not exist; give the folder that training wrote"
            ) from error
        if not Path(folder).is_dir():
            raise MissingFileError(f"{where}: that is a file; give the folder that training wrote") from error
        raise MissingFileError(
            f"{where}: {CONFIG_FILE} is missing, and it is written last, so the "
            "model was never finished; give the folder that training wrote"
        ) from error
    except UnicodeDecodeError as error:
        raise IntegrityError(f"{path} is not UTF-8 text: {error}") from error
    try:
        document = json.loads(text)
        if not isinstance(document, dict):
            raise TypeError(f"expected an object, got {type(document).__name__}")
        return ModelConfig.from_dict(document)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except KeyError as error:
        raise IntegrityError(f"{path}: the field {error} is missing; write the model again") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise IntegrityError(
            f"{path} is not a model configuration: {error}; write the model again"
        ) from error


def read_verified(folder: str | os.PathLike[str], config: ModelConfig, name: str) -> bytes:
    """Return the bytes of the file `name`, after comparing them with the checksum in `config`.

    Hashing and using the same bytes leaves no moment in which the file can change in between.
    Raises `IntegrityError` naming the file.
    """
    path = Path(folder) / name
    expected = config.files.get(name)
    if expected is None:
        raise IntegrityError(f"{Path(folder) / CONFIG_FILE} has no checksum of {name}: write the model again")
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise IntegrityError(f"{path} is missing: copy the whole folder, or write the model again") from error
    actual = hashlib.sha256(content).hexdigest()
    if actual != expected:
        raise IntegrityError(
            f"{path} ({len(content):,} bytes) has sha256 {actual[:16]}…, and {CONFIG_FILE} says "
            f"{expected[:16]}…: the file was changed, cut short or is being rewritten; copy it again or "
            "write the model again"
        )
    return content


def _tensor(document: Mapping[str, Any]) -> TensorSpec:
    shape = document["shape"]
    if not all(isinstance(size, int) for size in shape):
        raise TypeError(f"shape {shape!r} does not consist of whole numbers")
    return TensorSpec(name=document["name"], shape=tuple(shape), datatype=document["datatype"])


def _check_names(what: str, names: Sequence[str]) -> None:
    if not names:
        raise InputError(f"{what} is empty: give at least one name")
    for name in cast("Sequence[Any]", names):
        if not isinstance(name, str):
            raise InputError(
                f"{what} holds {name!r}, a {type(name).__name__}: give text, such as {str(name)!r}"
            )
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if list(names).count(name) > 1})
        raise InputError(f"{what} names {', '.join(map(repr, twice[:5]))} more than once")
