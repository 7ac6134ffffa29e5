"""Reading a model folder: checksums first, then a graph that is data and nothing else."""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load as load_tensors

from elastic_runtime.errors import InputError, IntegrityError
from elastic_runtime.models.archive import check_graph_archive
from elastic_runtime.models.config import GRAPH_FILE, WEIGHTS_FILE, ModelConfig, read_config, read_verified

__all__ = ["LoadedModel", "load_model", "load_weights"]


class LoadedModel:
    """A model that is ready to predict on the CPU; `predict` may be called from several threads."""

    def __init__(self, config: ModelConfig, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Use `forward` for prediction; `load_model` makes the instances."""
        self.config = config
        self._forward = forward

    def predict(self, features: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return the raw output, float32 of shape (n, …), for `features` of shape (n, d), n ≥ 0.

        d is the number of features; integers and other floating point types are converted to float32.
        Raises `InputError` naming what is expected and what was given.
        """
        rows = self.check(features)
        if len(rows) == 0:
            return np.empty((0, *self.config.output.row), dtype=np.float32)
        with torch.inference_mode():
            batch = torch.from_numpy(rows).reshape(-1, *self.config.input.row)
            output: npt.NDArray[np.float32] = self._forward(batch).float().numpy()
        return output

    def check(self, features: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return `features` as a contiguous float32 array (n, d), or raise `InputError`."""
        expected = f"{self.config.input.name}: expected an array of shape (n, {self.config.width}), float32"
        if not isinstance(features, np.ndarray):
            raise InputError(f"{expected}; given a {type(features).__name__}")
        if features.ndim != 2 or features.shape[1] != self.config.width:
            raise InputError(f"{expected}; given shape {features.shape}")
        if features.dtype.kind not in "fiu":
            raise InputError(f"{expected}; given type {features.dtype}")
        # A copy where it is needed: torch does not take arrays that are read-only or not contiguous.
        rows: npt.NDArray[np.float32] = np.require(features, np.float32, ["C", "W", "A"])
        return rows


def load_model(folder: str | os.PathLike[str]) -> LoadedModel:
    """Return the model in `folder`, ready to predict.

    Every file is compared with its checksum first. Nothing is unpickled: the graph's archive is refused if
    it holds anything but the graph as JSON and tensors as plain bytes (see `elastic_runtime.models.archive`).
    Raises `MissingFileError` (no finished model), `InputError` (schema not known) or `IntegrityError` naming
    the file.
    """
    config = read_config(folder)
    read_verified(folder, config, WEIGHTS_FILE)
    content = read_verified(folder, config, GRAPH_FILE)
    check_graph_archive(content, where=os.path.join(folder, GRAPH_FILE))  # noqa: PTH118 - any path-like
    try:
        forward = _module(torch.export.load(io.BytesIO(content)))
    except Exception as error:
        raise IntegrityError(
            f"{GRAPH_FILE} in {os.fspath(folder)!r}, written with torch {config.versions.get('torch', '?')}, "
            f"cannot be read with torch {torch.__version__}: {str(error)[:300]}"
        ) from error
    return LoadedModel(config, forward)


def load_weights(folder: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Return the weights by name, for `load_state_dict` of the module they come from.

    Raises as `load_model` does.
    """
    config = read_config(folder)
    return dict(load_tensors(read_verified(folder, config, WEIGHTS_FILE)))


def _module(program: torch.export.ExportedProgram) -> Callable[[torch.Tensor], torch.Tensor]:
    # Guards are Python source that newer torch compiles and runs: their conditions are checked by `check`.
    if "check_guards" in inspect.signature(program.module).parameters:
        return program.module(check_guards=False)
    return program.module()
