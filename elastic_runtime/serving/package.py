"""The folder that a cluster serves from: the model's files and what a deployment has to know about them."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_runtime import __version__
from elastic_runtime.errors import InputError
from elastic_runtime.models.config import CONFIG_FILE, ModelConfig, read_config, read_verified
from elastic_runtime.serving.names import check_name
from elastic_runtime.serving.protocol import input_tensors, output_tensors

__all__ = ["SETTINGS_FILE", "PackagedModel", "package_model"]

SETTINGS_FILE = "model-settings.json"
NOTES_FILE = "SERVING.md"


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A packaged model."""

    folder: Path
    """Where it is; it is a model folder too, which `load_model` and the server read."""

    sha256: str
    """Checksum of `config.json`, which holds those of the other files: it stands for the whole model."""

    files: dict[str, str]
    """sha256 by file name, of all of the model's files."""


def package_model(
    model_folder: str | os.PathLike[str], output_folder: str | os.PathLike[str], *, name: str = "model"
) -> PackagedModel:
    """Copy the model into `output_folder` and add `model-settings.json` and `SERVING.md`.

    Every file is compared with its checksum as it is copied, and `config.json` comes last, so that a folder
    that is half-written is never taken for a model. Raises as `read_config` does, `IntegrityError` naming a
    file, and `InputError` if both folders are the same.
    """
    check_name(name)
    source, target = Path(model_folder), Path(output_folder)
    config = read_config(source)
    if target.exists() and target.resolve() == source.resolve():
        raise InputError(
            f"output_folder={os.fspath(output_folder)!r} is the model's own folder: give another"
        )
    target.mkdir(parents=True, exist_ok=True)
    (target / CONFIG_FILE).unlink(missing_ok=True)
    for file in config.files:
        _write(target / file, read_verified(source, config, file))
    configuration = (source / CONFIG_FILE).read_bytes()
    sha256 = hashlib.sha256(configuration).hexdigest()
    files = {**config.files, CONFIG_FILE: sha256}
    settings = json.dumps(_settings(config, name, sha256, files), indent=2, ensure_ascii=False) + "\n"
    _write(target / SETTINGS_FILE, settings.encode())
    _write(target / NOTES_FILE, _notes(config, name, sha256).encode())
    _write(target / CONFIG_FILE, configuration)
    return PackagedModel(folder=target, sha256=sha256, files=files)


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    part.replace(path)


def _settings(config: ModelConfig, name: str, sha256: str, files: dict[str, str]) -> dict[str, Any]:
    return {
        "schema": 1,
        "name": name,
        "protocol": "v2",
        "inputs": input_tensors(config),
        "outputs": output_tensors(config),
        "sha256": sha256,
        "files": files,
        "server": {
            "package": f"kfp-elastic[serve]=={__version__}",
            "command": ["python", "-m", "elastic_runtime.serving"],
            "arguments": ["--model", "/mnt/models", "--name", name, "--host", "0.0.0.0", "--port", "8080"],
            "port": 8080,
            "live": "/v2/health/live",
            "ready": f"/v2/models/{name}/ready",
        },
    }


def _notes(config: ModelConfig, name: str, sha256: str) -> str:
    outputs = ", ".join(f"`{tensor['name']}` ({tensor['datatype']})" for tensor in output_tensors(config))
    return f"""# Serving `{name}`

This folder is a complete model for the Open Inference Protocol v2 (REST).

| | |
|---|---|
| predicts | `{config.target}` ({config.task}) |
| input | `{config.input.name}`, {config.input.datatype}, shape {list(config.input.shape)} |
| outputs | {outputs} |
| sha256 of `config.json` | `{sha256}` |

`config.json` holds the checksums of `model.safetensors` and `model.pt2`, so its own checksum stands for the
model. `{SETTINGS_FILE}` says the same for programs, and how the server is started.

## On one machine

    python -m elastic_runtime.serving --model THIS_FOLDER --name {name} --port 8080

## On a cluster

Nothing has been deployed: this step only wrote the folder. A later step is to apply a KServe InferenceService
with these facts:

- *storage URI*: the URI of this folder in the pipeline's artifact store; KServe mounts it at `/mnt/models`;
- *predictor*: a container that has `kfp-elastic[serve]`, started as `{SETTINGS_FILE}` says under `server`;
- *check*: compare the sha256 above with that of the mounted `config.json` before traffic is sent. The server
  itself compares the other files with it and does not start if one differs.
"""
