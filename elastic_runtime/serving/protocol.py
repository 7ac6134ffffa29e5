"""The Open Inference Protocol (v2, REST) of one model: what a request says, and the answer to it.

Pure functions of bytes and arrays. Everything that a request can get wrong is an `InputError` that names the
tensor, what is expected and what was given; the server answers it with status 400.

Protocol: https://github.com/kserve/open-inference-protocol (REST), with the binary tensor data extension.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_runtime.errors import InputError
from elastic_runtime.models.config import ModelConfig, TensorSpec

try:
    import orjson  # comes with kserve, and is several times faster
except ImportError:
    orjson = None  # type: ignore[assignment]

__all__ = ["Answer", "InferenceRequest", "encode_answer", "input_tensors", "output_tensors", "parse_request"]

Array = npt.NDArray[Any]
LABEL = "label"
PROBABILITY = "probability"
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class InferenceRequest:
    """A request that was found to be right."""

    rows: npt.NDArray[np.float32]
    """Features, shape (n, d), n ≥ 1, all finite."""

    id: str | None
    """What the caller gave to recognise the answer by."""

    outputs: tuple[str, ...]
    """Names of the outputs that are wanted, in the order wanted."""

    binary: frozenset[str]
    """Those of `outputs` that are wanted as raw bytes behind the JSON."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A body to send; `json_length` is the length of its JSON part where raw bytes follow it."""

    body: bytes
    json_length: int | None


def input_tensors(config: ModelConfig) -> list[dict[str, Any]]:
    """Return the inputs as the metadata endpoint lists them."""
    return [config.input.to_dict()]


def output_tensors(config: ModelConfig) -> list[dict[str, Any]]:
    """Return the outputs as the metadata endpoint lists them.

    The model's own output comes first. A classification model also gives `label` (the most probable class)
    and `probability` (softmax of the logits).
    """
    specs = [config.output]
    if config.task == "classification":
        specs.append(TensorSpec(name=LABEL, shape=(-1,), datatype="BYTES"))
        specs.append(TensorSpec(name=PROBABILITY, shape=config.output.shape))
    return [spec.to_dict() for spec in specs]


def parse_request(body: bytes, config: ModelConfig, *, json_length: str | None = None) -> InferenceRequest:
    """Return what `body` asks of the model described by `config`.

    `json_length` is the header Inference-Header-Content-Length, which says where raw bytes begin.
    Raises `InputError` for anything that is not a right request.
    """
    text, raw = _parts(body, json_length)
    document = _object(_decoded(text), "the body")
    identity = document.get("id")
    if identity is not None and not isinstance(identity, str):
        raise InputError(f"id: expected text, given {_kind(identity)}")
    if (
        identity is not None
        and not identity.isprintable()
        and any("\ud800" <= c <= "\udfff" for c in identity)
    ):
        raise InputError(f"id: expected text that is valid Unicode, given {identity!r:.40}")
    tensors = _list(document, "inputs")
    known = config.input.name
    if len(tensors) != 1:
        raise InputError(f"inputs: expected 1 tensor, {known!r}, given {len(tensors)}")
    tensor = _object(tensors[0], "inputs[0]")
    if tensor.get("name") != known:
        raise InputError(f"inputs[0].name: expected {known!r}, given {tensor.get('name')!r:.80}")
    datatype = tensor.get("datatype")
    if datatype != config.input.datatype:
        raise InputError(f"{known}.datatype: expected {config.input.datatype!r}, given {datatype!r:.80}")
    shape = _shape(tensor, config.input)
    values = _values(tensor, shape, raw, known)
    outputs, binary = _wanted(document, config)
    return InferenceRequest(rows=values.reshape(shape[0], -1), id=identity, outputs=outputs, binary=binary)


def encode_answer(
    request: InferenceRequest,
    output: npt.NDArray[np.float32],
    config: ModelConfig,
    *,
    model: str,
    identity: str,
) -> Answer:
    """Return the answer to `request`, for which the model gave `output`, shape (n, …).

    `identity` is the id of the answer when the request has none. Raises `InputError` if the output is not
    finite, which finite features cause only when they are far too large.
    """
    if not np.isfinite(output).all():
        row = int(np.argwhere(~np.isfinite(output))[0][0])
        raise InputError(
            f"{config.input.name}: row {row} makes the model's output overflow; its values, up to "
            f"{float(np.abs(request.rows[row]).max()):.3g}, are far too large (features are to be normalised)"
        )
    arrays = _all_outputs(output, config)
    described = []
    raw = []
    for name in request.outputs:
        array = arrays[name]
        is_text = array.dtype == np.object_
        tensor: dict[str, Any] = {
            "name": name,
            "shape": list(array.shape),
            "datatype": "BYTES" if is_text else "FP32",
        }
        if name in request.binary:
            content = _packed(array) if is_text else array.astype("<f4").tobytes()
            tensor["parameters"] = {"binary_data_size": len(content)}
            raw.append(content)
        else:
            tensor["data"] = array.ravel().tolist() if is_text else np.ascontiguousarray(array.ravel())
        described.append(tensor)
    document = {"model_name": model, "id": request.id or identity, "outputs": described}
    text = _dumps(document)
    return Answer(body=b"".join([text, *raw]), json_length=len(text) if raw else None)


def _all_outputs(output: npt.NDArray[np.float32], config: ModelConfig) -> dict[str, Array]:
    arrays: dict[str, Array] = {config.output.name: output}
    if config.task == "classification":
        assert config.classes is not None
        shifted = np.exp((output - output.max(axis=1, keepdims=True)).astype(np.float64))
        arrays[PROBABILITY] = (shifted / shifted.sum(axis=1, keepdims=True)).astype(np.float32)
        arrays[LABEL] = np.array(config.classes, dtype=np.object_)[output.argmax(axis=1)]
    return arrays


def _packed(texts: Array) -> bytes:
    encoded = [str(text).encode() for text in texts.ravel()]
    return b"".join(struct.pack("<I", len(text)) + text for text in encoded)


def _parts(body: bytes, json_length: str | None) -> tuple[bytes, bytes]:
    if json_length is None:
        return body, b""
    if not (json_length.isascii() and json_length.isdigit()) or int(json_length[:20]) > len(body):
        raise InputError(
            f"Inference-Header-Content-Length: expected the length of the JSON, at most {len(body)}, "
            f"given {json_length[:40]!r}"
        )
    return body[: int(json_length)], body[int(json_length) :]


def _decoded(text: bytes) -> Any:
    if not text.strip():
        raise InputError("the body is empty: expected a JSON object with 'inputs'")
    try:
        return _loads(text)
    except (ValueError, RecursionError):
        pass
    try:  # once more with the standard library, which says where, and lets us say what NaN is
        return json.loads(text, parse_constant=_refuse_constant)
    except InputError:
        raise
    except RecursionError as error:
        raise InputError("the body is nested too deeply") from error
    except ValueError as error:
        raise InputError(f"the body is not JSON: {error}") from error


def _refuse_constant(name: str) -> Any:
    raise InputError(f"the body holds {name}: JSON has no such number, and a feature has to be finite")


def _loads(text: bytes) -> Any:
    if orjson is None:
        return json.loads(text, parse_constant=_refuse_constant)
    return orjson.loads(text)


def _dumps(document: dict[str, Any]) -> bytes:
    if orjson is None:
        return json.dumps(document, ensure_ascii=False, default=lambda array: array.tolist()).encode()
    # Writes FP32 with the fewest digits that read back as the same FP32, from the array itself.
    return bytes(orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY))


def _shape(tensor: Mapping[str, Any], spec: TensorSpec) -> tuple[int, ...]:
    wanted = "[n" + "".join(f", {size}" for size in spec.row) + "]"
    shape = _list(tensor, "shape", spec.name)
    if not all(type(size) is int for size in shape):
        raise InputError(f"{spec.name}.shape: expected whole numbers {wanted}, given {shape!r:.80}")
    if tuple(shape[1:]) != spec.row or not shape:
        raise InputError(f"{spec.name}.shape: expected {wanted}, given {shape!r:.80}")
    if shape[0] < 1:
        raise InputError(f"{spec.name}.shape: expected at least one row, given {shape!r:.80}")
    return tuple(shape)


def _values(
    tensor: Mapping[str, Any], shape: tuple[int, ...], raw: bytes, name: str
) -> npt.NDArray[np.float32]:
    count = 1
    for size in shape:
        count *= size
    parameters = tensor.get("parameters")
    if isinstance(parameters, dict) and "binary_data_size" in parameters:
        return _raw_values(parameters["binary_data_size"], count, raw, name)
    if raw:
        raise InputError(
            f"{name}: {len(raw)} raw bytes follow the JSON, but the tensor has no binary_data_size"
        )
    flat = _flattened(_list(tensor, "data", name), shape, name)
    if len(flat) != count:
        raise InputError(f"{name}.data: shape {list(shape)} expects {count} values, given {len(flat)}")
    strange = set(map(type, flat)) - {float, int}
    if strange:
        index = next(i for i, value in enumerate(flat) if type(value) in strange)
        raise InputError(f"{name}.data[{index}]: expected a number, given {_kind(flat[index])}")
    try:
        wide = np.array(flat, dtype=np.float64)
    except OverflowError as error:
        raise InputError(f"{name}.data: holds a number too large for FP32") from error
    return _finite(wide, name)


def _raw_values(size: Any, count: int, raw: bytes, name: str) -> npt.NDArray[np.float32]:
    if type(size) is not int or size != 4 * count:
        raise InputError(
            f"{name}.binary_data_size: expected {4 * count} ({count} values of 4 bytes), given {size!r}"
        )
    if len(raw) != size:
        raise InputError(f"{name}: expected {size} raw bytes after the JSON, given {len(raw)}")
    return _finite(np.frombuffer(raw, dtype="<f4"), name)


def _finite(values: Array, name: str) -> npt.NDArray[np.float32]:
    # A comparison with NaN is false, so this finds NaN, infinities and what FP32 cannot hold.
    good = np.abs(values) <= _LARGEST
    if not good.all():
        index = int(np.argmin(good))
        raise InputError(
            f"{name}.data[{index}]: expected a finite FP32 number, given {float(values[index])!r}"
        )
    return values.astype(np.float32)


def _flattened(data: Sequence[Any], shape: Sequence[int], name: str) -> Sequence[Any]:
    """Return `data`, which may be nested in the form of `shape`, as a flat list."""
    if not data or not isinstance(data[0], list):
        return data
    level = list(data)
    for depth, size in enumerate(shape):
        last = depth == len(shape) - 1
        if depth == 0 and len(level) != size:
            raise InputError(
                f"{name}.data: nested data expects {size} rows for shape {list(shape)}, given {len(level)}"
            )
        if last:
            return level
        for part in level:
            if not isinstance(part, list) or len(part) != shape[depth + 1]:
                given = f"one of {len(part)}" if isinstance(part, list) else _kind(part)
                raise InputError(
                    f"{name}.data: nested data expects lists of {shape[depth + 1]} for shape {list(shape)}, "
                    f"given {given}"
                )
        level = [value for part in level for value in part]
    return level


def _wanted(document: Mapping[str, Any], config: ModelConfig) -> tuple[tuple[str, ...], frozenset[str]]:
    known = [tensor["name"] for tensor in output_tensors(config)]
    everything_binary = _flag(document, "binary_data_output", "parameters", default=False)
    if document.get("outputs") in (None, []):
        return tuple(known), frozenset(known if everything_binary else ())
    names: list[str] = []
    binary: set[str] = set()
    for index, item in enumerate(_list(document, "outputs")):
        wanted = _object(item, f"outputs[{index}]")
        name = str(wanted.get("name"))
        if name not in known:
            raise InputError(f"outputs[{index}].name: expected one of {', '.join(known)}, given {name!r:.80}")
        if name in names:
            raise InputError(f"outputs[{index}].name: {name!r} is asked for twice")
        names.append(name)
        if _flag(wanted, "binary_data", f"outputs[{index}].parameters", default=everything_binary):
            binary.add(name)
    return tuple(names), frozenset(binary)


def _flag(holder: Mapping[str, Any], key: str, where: str, *, default: bool) -> bool:
    parameters = holder.get("parameters")
    if parameters is None:
        return default
    value = _object(parameters, where).get(key, default)
    if not isinstance(value, bool):
        raise InputError(f"{where}.{key}: expected true or false, given {_kind(value)}")
    return value


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected a JSON object, given {_kind(value)}")
    return value


def _list(holder: Mapping[str, Any], key: str, of: str = "") -> list[Any]:
    where = f"{of}.{key}" if of else key
    if key not in holder:
        raise InputError(f"{where}: is missing")
    value = holder[key]
    if not isinstance(value, list):
        raise InputError(f"{where}: expected a list, given {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return f"{names.get(type(value), 'a number')} ({value!r:.40})"
