"""State as JSON text plus a list of tensors: between processes and in checkpoints, nothing is unpickled."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from elastic_runtime.errors import InputError

__all__ = ["pack", "unpack"]


def pack(value: Any, name: str = "state") -> tuple[str, list[torch.Tensor]]:
    """Return `value` as text and tensors (not copied): what `unpack` makes it from again.

    Takes None, bool, int, float, str, bytes, tensors, numpy arrays and scalars, and lists, tuples, sets, dicts,
    OrderedDicts and Counters of them. Raises `InputError` that names the place of anything else.
    """
    tensors: list[torch.Tensor] = []
    return json.dumps(_encode(value, tensors, name)), tensors


def unpack(text: str, tensors: list[torch.Tensor]) -> Any:
    """Return what `pack` was given; its tensors are those of the list."""
    return _decode(json.loads(text), tensors)


def _encode(value: Any, tensors: list[torch.Tensor], name: str) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.ndarray):
        tensors.append(torch.from_numpy(np.ascontiguousarray(value)))
        return {"array": len(tensors) - 1}
    if isinstance(value, np.generic):
        return _encode(value.item(), tensors, name)
    if type(value) in (int, float):
        return value
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if type(value) in (list, tuple, set):
        items = sorted(value) if type(value) is set else value
        coded = [_encode(item, tensors, f"{name}[{place}]") for place, item in enumerate(items)]
        return coded if type(value) is list else {type(value).__name__: coded}
    if isinstance(value, Mapping):
        pairs = [
            [_encode(key, tensors, f"{name} key"), _encode(item, tensors, f"{name}[{key!r}]")]
            for key, item in value.items()
        ]
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {"ordered" if isinstance(value, OrderedDict) else kind: pairs}
    raise InputError(
        f"{name}={value!r:.80} is a {type(value).__name__}, which cannot pass between workers: a state_dict may hold "
        "numbers, text, tensors, numpy arrays and containers of them"
    )


def _decode(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "array":
        return tensors[content].numpy()
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind in ("tuple", "set"):
        items = [_decode(item, tensors) for item in content]
        return tuple(items) if kind == "tuple" else set(items)
    pairs = [(_decode(key, tensors), _decode(item, tensors)) for key, item in content]
    if kind == "ordered":
        return OrderedDict(pairs)
    return Counter(dict(pairs)) if kind == "counter" else dict(pairs)
