"""Looks into a `model.pt2` before torch reads it, so that reading a model never runs what is in it.

`torch.export.load` (torch 2.13) reads weights and constants as plain bytes and the graph as JSON, but it can
be made to run code: it unpickles example inputs, tensors marked `use_pickle`, custom objects and the formats
of torch before 2.9; it loads the shared libraries of an AOTInductor package; it gives symbolic sizes to
sympy, which evaluates them; and it writes names into Python source. A file of `save_model` has none of the
former, and only harmless forms of the latter: everything else is refused here.

What remains are operators of torch, applied to tensors. This is a check of what a file can do when it is
read, not a sandbox: a hostile graph can still ask for any operator and any amount of memory.
"""

from __future__ import annotations

import ast
import io
import json
import re
import zipfile
from collections.abc import Iterator
from typing import Any

from elastic_runtime.errors import IntegrityError

__all__ = ["check_graph_archive"]

_GRAPH = "models/model.json"
_WEIGHTS = "data/weights/model_weights_config.json"
_CONSTANTS = "data/constants/model_constants_config.json"
_SAMPLE_INPUTS = "data/sample_inputs/model.pt"
_REQUIRED = (_GRAPH, _WEIGHTS, _CONSTANTS, "archive_format")
_RECORD = re.compile(
    r"data/weights/weight_\d+|data/constants/tensor_\d+|archive_format|archive_version|byteorder|version"
    r"|\.data/version|\.data/serialization_id|"
    + "|".join(map(re.escape, (_GRAPH, _WEIGHTS, _CONSTANTS, _SAMPLE_INPUTS)))
)
_PAYLOAD = re.compile(r"(weight|tensor)_\d+")

_ARITHMETIC = (
    "eq|ne|le|ge|lt|gt|neg|pos|mul|add|sub|floordiv|mod|pow|truediv|and_|or_|lshift|rshift|getitem|not_"
)
_TARGET = re.compile(
    r"torch\.ops\.[A-Za-z]\w*\.(?!__)\w+(\.[A-Za-z]\w*)?|torch\.sym_[a-z]+|math\.trunc"
    rf"|_operator\.({_ARITHMETIC})"
)
_WORDS = re.compile(r"[\w.,;:#/<>*=+\- ]*")
_SYMBOL = re.compile(r"[a-z]+\d+")
_TREE_TYPES = (None, "builtins.tuple", "builtins.list", "builtins.dict")
_SIZE_FUNCTION = re.compile(
    "Symbol|Integer|Float|Rational|Add|Mul|Pow|Max|Min|Abs|And|Or|Not|Equality|Unequality|StrictLessThan|LessThan"
    "|StrictGreaterThan|GreaterThan|FloorDiv|ModularIndexing|Where|PythonMod|Mod|CleanDiv|CeilToInt|FloorToInt"
    "|CeilDiv|IntTrueDiv|FloatTrueDiv|LShift|RShift|IsNonOverlappingAndDenseIndicator|TruncToFloat|TruncToInt"
    "|RoundToInt|RoundDecimal|ToFloat|FloatPow|PowByNatural|Identity"
)


def check_graph_archive(content: bytes, *, where: str) -> None:
    """Refuse the archive `content` if reading it could run code. `where` names the file in the message.

    Raises `IntegrityError` that says what was found.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            problem = _problem(archive)
    except (zipfile.BadZipFile, ValueError, RecursionError, NotImplementedError, EOFError) as error:
        raise IntegrityError(f"{where} is not an exported graph: {error}; write the model again") from error
    if problem:
        raise IntegrityError(
            f"{where} {problem}: save_model with torch ≥ 2.9 writes no such thing, and reading it could run "
            "code, so the file is refused; write the model again with save_model"
        )


def _problem(archive: zipfile.ZipFile) -> str:
    names = archive.namelist()
    roots = {name.partition("/")[0] for name in names}
    if len(roots) != 1 or len(set(names)) != len(names):
        return f"has the top folders {sorted(roots)[:5]} or a record twice"
    root = roots.pop()
    records = [name.partition("/")[2] for name in names]
    for record in records:
        if not _RECORD.fullmatch(record):
            return f"holds the record {record[:80]!r}"
    for record in _REQUIRED:
        if record not in records:
            return f"lacks the record {record!r}"
    if _SAMPLE_INPUTS in records and archive.getinfo(f"{root}/{_SAMPLE_INPUTS}").file_size:
        return "holds pickled example inputs"
    for record in (_WEIGHTS, _CONSTANTS):
        for name, payload in json.loads(archive.read(f"{root}/{record}"))["config"].items():
            if payload.get("use_pickle") is not False:
                return f"holds {name[:80]!r} as a pickle"
            if not _PAYLOAD.fullmatch(str(payload.get("path_name"))):
                return f"holds {name[:80]!r} as an object that is not a tensor"
    for key, text in _strings(json.loads(archive.read(f"{root}/{_GRAPH}"))):
        if not _harmless(key, text):
            return f"has {key}={text[:80]!r} in its graph"
    return ""


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text in a JSON document with the key it stands under; of objects, their keys too."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield "key", name
            yield from _strings(part, key if key == "metadata" else name)
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part, key)
    elif isinstance(value, str):
        yield key, value


def _harmless(key: str, text: str) -> bool:
    if key in ("metadata", "guards_code"):
        return True  # where a node comes from, for people; and guards, which `load_model` does not compile
    if key == "expr_str":
        return _is_size(text)
    if key in ("in_spec", "out_spec"):
        return text == "" or _is_plain_tree(json.loads(text))
    if key == "target":
        return bool(_TARGET.fullmatch(text))
    if key == "name":
        return text == "" or text.isidentifier()
    return bool(_WORDS.fullmatch(text))


def _is_size(text: str) -> bool:
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, MemoryError):
        return False
    return _is_size_node(tree.body)


def _is_size_node(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    if isinstance(node, ast.UnaryOp):
        return _is_size_node(node.operand)
    if isinstance(node, ast.Name):
        return node.id in ("true", "false") or bool(_SYMBOL.fullmatch(node.id))
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        return False
    if not _SIZE_FUNCTION.fullmatch(node.func.id):
        return False
    if not all(
        isinstance(word.value, ast.Constant) and isinstance(word.value.value, bool) for word in node.keywords
    ):
        return False
    if node.func.id in ("Symbol", "Float"):
        first = node.args[0] if node.args else None
        pattern = _SYMBOL if node.func.id == "Symbol" else re.compile(r"-?[\d.]+(e[+-]?\d+)?")
        if isinstance(first, ast.Constant) and isinstance(first.value, str) and len(node.args) == 1:
            return bool(pattern.fullmatch(first.value))
    return all(_is_size_node(part) for part in node.args)


def _is_plain_tree(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain_tree(part) for part in value)
    if isinstance(value, dict):
        context = value.get("context")
        return (
            value.get("type") in _TREE_TYPES
            and (context is None or bool(re.fullmatch(r'null|\[[\w", ]*\]', context)))
            and _is_plain_tree(value.get("children_spec", []))
        )
    return isinstance(value, int)
