"""Writing a model folder: weights, graph, and last of all the configuration that makes it valid."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors

from elastic_runtime import __version__
from elastic_runtime.errors import InputError, IntegrityError
from elastic_runtime.models.archive import check_graph_archive
from elastic_runtime.models.config import CONFIG_FILE, GRAPH_FILE, WEIGHTS_FILE, ModelConfig, Task, TensorSpec

__all__ = ["save_model"]

_OUTPUT_NAMES = {"classification": "logits", "regression": "predictions"}
_MINIMUM_ROWS = 2  # torch.export takes a batch of 0 or 1 for a constant, not for an example of any size


def save_model(
    folder: str | os.PathLike[str],
    module: torch.nn.Module,
    example: torch.Tensor,
    *,
    task: Task,
    features: Sequence[str],
    target: str,
    classes: Sequence[str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Write `module` into `folder`, for any number of rows, and return the configuration written.

    `example` has shape (n, …) and type float32, n ≥ 1; each row has one element for each of `features`.
    `module` maps it to logits (n, classes) or to predictions (n,) or (n, 1). What DDP or torch.compile put
    around it is taken off, evaluation mode holds while it is exported, and it is left as it was. Names that
    share one tensor (tied weights) are all written with their values.

    `config.json` is written last, so that a reader never takes a folder that is half-written for a model.
    Raises `InputError` for arguments that do not fit together, or a module that cannot be exported.
    """
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"module={module!r:.80} is a {type(module).__name__}, not a torch.nn.Module")
    rows = _checked_example(example)
    extras = _checked_extra(extra)
    place = Path(folder)
    if place.exists() and not place.is_dir():
        raise InputError(f"folder={os.fspath(folder)!r} is a file: give a folder to write the model into")

    bare = _on_cpu(_unwrap(module))
    with _evaluating(bare), torch.no_grad():
        output = _checked_output(_called(bare, rows), len(rows))
        config = ModelConfig(
            task=task,
            target=target,
            features=tuple(features),
            classes=None if classes is None else tuple(classes),
            input=TensorSpec(name="features", shape=(-1, *rows.shape[1:])),
            output=TensorSpec(name=_OUTPUT_NAMES.get(task, "output"), shape=(-1, *output.shape[1:])),
            extra=extras,
            versions={"torch": torch.__version__, "kfp-elastic": __version__},
        )
        contents = {WEIGHTS_FILE: _weights(bare), GRAPH_FILE: _graph(bare, rows, output)}
    return _write(place, config, contents)


def _checked_example(example: torch.Tensor) -> torch.Tensor:
    if not isinstance(example, torch.Tensor):
        raise InputError(f"example is a {type(example).__name__}: give a float32 tensor of shape (n, …)")
    if example.dtype != torch.float32:
        raise InputError(f"example has type {example.dtype}: convert it to torch.float32")
    if example.ndim < 2 or 0 in example.shape:
        raise InputError(
            f"example has shape {tuple(example.shape)}: give (n, …) with n ≥ 1 and no empty side"
        )
    rows = example.detach().cpu()
    while len(rows) < _MINIMUM_ROWS:
        rows = torch.cat([rows, rows])
    return rows.contiguous()


def _checked_extra(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    try:
        copied = json.loads(json.dumps(dict(extra or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(f"extra={extra!r:.120} cannot be written as JSON: {error}") from error
    return dict(copied)


def _unwrap(module: torch.nn.Module) -> torch.nn.Module:
    while True:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            module = module.module
        elif isinstance(getattr(module, "_orig_mod", None), torch.nn.Module):
            module = module._orig_mod  # type: ignore[assignment]  # what torch.compile wrapped
        else:
            return module


def _on_cpu(module: torch.nn.Module) -> torch.nn.Module:
    tensors = [*module.parameters(), *module.buffers()]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return module
    import copy

    return copy.deepcopy(module).cpu()  # the graph remembers devices, and a reader may have only a CPU


@contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def _called(module: torch.nn.Module, rows: torch.Tensor) -> Any:
    try:
        return module(rows)
    except Exception as error:
        raise InputError(
            f"module {type(module).__name__} fails for the example of shape {tuple(rows.shape)}, float32: "
            f"{_short(error)}"
        ) from error


def _checked_output(output: Any, rows: int) -> torch.Tensor:
    if not isinstance(output, torch.Tensor):
        raise InputError(
            f"module returns a {type(output).__name__}: it has to return one tensor, the logits or values"
        )
    if output.ndim < 1 or output.shape[0] != rows:
        raise InputError(
            f"module returns shape {tuple(output.shape)} for {rows} rows: the first size must be their number"
        )
    if not output.dtype.is_floating_point:
        raise InputError(
            f"module returns type {output.dtype}: return logits or values as floating point numbers"
        )
    if not torch.isfinite(output).all():
        raise InputError("module returns NaN or infinite values for the example: the weights have diverged")
    return output


def _weights(module: torch.nn.Module) -> bytes:
    tensors: dict[str, torch.Tensor] = {}
    for name, value in module.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise InputError(
                f"module's state {name!r} is a {type(value).__name__}: only tensors are stored, so that "
                "reading a model never runs code; register a tensor buffer instead"
            )
        # A copy of its own for every name: safetensors refuses tensors that share memory.
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    content: bytes = save_tensors(tensors, metadata={"format": "pt"})
    return content


def _graph(module: torch.nn.Module, rows: torch.Tensor, output: torch.Tensor) -> bytes:
    batch = torch.export.Dim("batch")
    try:
        exported = torch.export.export(module, (rows,), dynamic_shapes=({0: batch},))
    except Exception as error:
        raise InputError(
            f"module {type(module).__name__} cannot be exported with torch.export for any number of rows: "
            f"{_short(error)}; the usual cause is code that depends on the values or on the batch size"
        ) from error
    again = exported.module()(rows)
    if not torch.allclose(again.float(), output.float(), rtol=1e-4, atol=1e-5):
        difference = float((again.float() - output.float()).abs().max())
        raise InputError(
            f"module {type(module).__name__} gives other values when it is exported (up to {difference:.3g} "
            "apart): in evaluation mode the output must depend on the input and the weights only"
        )
    # The example would be stored as a pickle; without it, nothing in the file is one.
    exported.example_inputs = None
    for node in exported.graph.nodes:
        node.meta.pop("stack_trace", None)  # source lines and paths of the machine that trained
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # Said of every weight that is stored transposed; on the CPU all of its storage is written.
        warnings.filterwarnings("ignore", message="No complete tensor found", category=UserWarning)
        torch.export.save(exported, buffer)
    content = buffer.getvalue()
    try:
        check_graph_archive(content, where=GRAPH_FILE)
    except IntegrityError as error:
        raise InputError(
            f"module {type(module).__name__} cannot be stored so that a reader may trust it (torch "
            f"{torch.__version__}): {error}"
        ) from error
    return content


def _short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}"


def _write(folder: Path, config: ModelConfig, contents: Mapping[str, bytes]) -> ModelConfig:
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(contents.items())}
    finished = ModelConfig(**{**_fields(config), "files": files})
    document = json.dumps(finished.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with tempfile.TemporaryDirectory(prefix=".model-", dir=folder) as work:
        for name, content in {**contents, CONFIG_FILE: document.encode()}.items():
            _write_durably(Path(work) / name, content)
        # An older model in this folder stops being valid before its files change.
        (folder / CONFIG_FILE).unlink(missing_ok=True)
        for name in (*contents, CONFIG_FILE):
            (Path(work) / name).replace(folder / name)
    _sync_folder(folder)
    return finished


def _fields(config: ModelConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ModelConfig.__dataclass_fields__}


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
