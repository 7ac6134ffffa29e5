"""Pipeline parameters as people give them, `key=value` or Python values, checked against their types.

kfp would find most of these mistakes only when a step runs, or not at all.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml
from kfp.dsl.structures import InputSpec

from elastic_runtime.errors import InputError, UnknownNameError
from kfp_elastic.components.authoring import MAX_PARAMETER_BYTES, json_bytes, parameter_kind

__all__ = ["check_nested_text", "checked_parameters", "split_assignments"]

_KINDS = {
    "STRING": "text",
    "NUMBER_INTEGER": "a whole number",
    "NUMBER_DOUBLE": "a number",
    "BOOLEAN": "true or false",
    "LIST": "a JSON list, such as '[64, 32]'",
    "STRUCT": "a JSON object, such as '{\"min_accuracy\": 0.9}'",
}
_WHOLE = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_PLACEHOLDER = re.compile(r"\{\{\$\.inputs\.parameters\['pipelinechannel--([^']+)'\]\}\}")
_UNSAFE = re.compile(r'["\\\x00-\x1f]')
_BEYOND_FLOAT = 2**53


def split_assignments(assignments: Iterable[str]) -> dict[str, str]:
    """Return the `key=value` texts of `-p` as a dictionary; raises `InputError` for any other text."""
    given: dict[str, str] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        key = key.strip()
        if not equals or not key:
            raise InputError(f"-p {assignment!r:.80}: write -p NAME=VALUE, such as -p epochs=3")
        if key in given:
            raise InputError(f"-p {key} is given twice ({given[key]!r:.40} and {value!r:.40}): give it once")
        given[key] = value
    return given


def checked_parameters(
    given: Mapping[str, Any], inputs: Mapping[str, InputSpec] | None, *, pipeline: str
) -> dict[str, Any]:
    """Return `given` as values of the types that the pipeline's `inputs` declare.

    Text is read as the command line writes it (`true`, `3`, `2e-5`, JSON for lists and objects); other values
    must be of the type already, a whole number also for a number. None is the same as leaving an optional one
    out.

    Raises `UnknownNameError` for a name that is no parameter, `InputError` for a value of another type, one
    that is not finite, one over `MAX_PARAMETER_BYTES`, and a missing required one.
    """
    inputs = inputs or {}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in inputs:
            raise UnknownNameError.of(f"parameter of pipeline {pipeline}:", name, inputs)
        if value is None and inputs[name].optional:
            continue
        values[name] = _value(name, value, inputs[name].type)
    missing = [name for name, declared in inputs.items() if not declared.optional and name not in values]
    if missing:
        raise InputError(f"pipeline {pipeline} needs {', '.join(missing)}: add -p {missing[0]}=VALUE")
    total = sum(json_bytes(value) for value in values.values())
    if total > MAX_PARAMETER_BYTES:
        raise InputError(
            f"the parameters are {total:,} bytes long together; a run may have {MAX_PARAMETER_BYTES:,}: "
            "put the longest into a file and pass its path or URL"
        )
    return values


def check_nested_text(values: Mapping[str, Any], compiled: str, *, pipeline: str) -> None:
    """Refuse a text that kfp could not carry: one with quotes, say, that the pipeline puts inside a list or dict.

    kfp, here and on a cluster, writes such a text into a JSON document as it is. A quote breaks the document or adds
    keys to it, and `C:\\new` gets a line break. `compiled` is the pipeline's YAML; its defaults are checked too.

    Raises `InputError` that names the parameter.
    """
    spec = next(iter(yaml.safe_load_all(compiled)))
    declared = spec["root"].get("inputDefinitions", {}).get("parameters", {})
    nested = set(_PLACEHOLDER.findall(" ".join(_constants(spec))))
    for name in sorted(nested & set(declared)):
        value = values.get(name, declared[name].get("defaultValue"))
        if isinstance(value, str) and (_UNSAFE.search(value) or "{{$" in value):
            raise InputError(
                f"parameter {name}={value!r:.80} of pipeline {pipeline} stands inside a list or dict, where kfp "
                'carries no \'"\', backslash, line break or "{{$": leave them out, or pass it as a parameter of its own'
            )


def _constants(document: Any) -> Iterator[str]:
    """Yield, as JSON, every constant list or dict that a step of the compiled pipeline `document` gets."""
    if isinstance(document, list):
        for item in document:
            yield from _constants(item)
    elif isinstance(document, dict):
        for key, item in document.items():
            constant = item.get("constant") if key == "runtimeValue" and isinstance(item, dict) else None
            if isinstance(constant, list | dict):
                yield json.dumps(constant)
            else:
                yield from _constants(item)


def _value(name: str, value: Any, declared: Any) -> Any:
    kind = parameter_kind(declared)

    def refuse(reason: str = "") -> InputError:
        return InputError(f"parameter {name}={value!r:.80} is not {_KINDS[kind]}{reason}")

    if kind not in _KINDS:
        raise InputError(f"parameter {name} is an artifact ({declared}), which cannot be given to a run")
    if isinstance(value, str) and kind != "STRING":
        read = _from_text(value.strip(), kind)
        if read is None:
            raise refuse()
    else:
        read = value
    if kind == "NUMBER_DOUBLE" and isinstance(read, int) and not isinstance(read, bool):
        read = float(read)
    if not _is_of(kind, read):
        raise refuse()
    if kind == "NUMBER_DOUBLE" and not math.isfinite(read):
        raise refuse(": it must be finite")
    if kind == "NUMBER_INTEGER" and abs(read) > _BEYOND_FLOAT:
        raise refuse(": kfp carries whole numbers exactly only up to 2**53")
    try:
        size = json_bytes(read)
    except (TypeError, ValueError, RecursionError) as error:
        raise refuse(f" that can be written as JSON: {error}") from error
    if size > MAX_PARAMETER_BYTES:
        raise InputError(
            f"parameter {name}={value!r:.40}… is {size:,} bytes long; a parameter may have "
            f"{MAX_PARAMETER_BYTES:,}: put it into a file and pass its path or URL"
        )
    return read


def _from_text(text: str, kind: str) -> Any:
    """Return the value that `text` says, or None if it says none of this kind."""
    if kind == "NUMBER_INTEGER":
        return int(text) if _WHOLE.fullmatch(text) and len(text) < 100 else None
    if kind == "NUMBER_DOUBLE":
        finite_or_not = _NUMBER.fullmatch(text) or text.lower().lstrip("+-") in {"inf", "infinity", "nan"}
        return float(text) if finite_or_not else None
    if kind == "BOOLEAN":
        return {"true": True, "false": False}.get(text.lower())
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_of(kind: str, value: Any) -> bool:
    wanted: dict[str, type] = {
        "STRING": str,
        "NUMBER_INTEGER": int,
        "NUMBER_DOUBLE": float,
        "BOOLEAN": bool,
        "LIST": list,
        "STRUCT": dict,
    }
    return isinstance(value, wanted[kind]) and not (isinstance(value, bool) and kind != "BOOLEAN")
