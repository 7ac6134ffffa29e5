"""What a component's arguments go through in the step's own process, before its body sees them. Loads no kfp.

kfp carries arguments as protobuf, in which every number is a float: its local runner hands `[1.0, 2.0]` to a
step that was given `[1, 2]`, a cluster hands `1` to one that was given `1.0`. And a pipeline parameter inside
a list or dict arrives as text. Here each becomes again what the pipeline's author wrote, on both.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["MARKS", "NONE", "restored", "with_restored_arguments"]

_PREFIX = "kfp-elastic/"

MARKS = {
    "BOOLEAN": f"{_PREFIX}bool=",
    "NUMBER_DOUBLE": f"{_PREFIX}float=",
    "NUMBER_INTEGER": f"{_PREFIX}int=",
}
"""What `authoring` puts before a pipeline parameter of this type inside a list or dict, so that the text that
arrives still says its type."""

NONE = f"{_PREFIX}none="
"""What stands for None inside a list or dict, which kfp's compiler refuses."""


def with_restored_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` called with restored arguments; annotations of `float` and `int` are kept to."""
    _add_current_folder()
    kinds = {name: kind for name, kind in function.__annotations__.items() if kind in (float, int)}

    @functools.wraps(function)
    def wrapped(**arguments: Any) -> Any:
        for name, value in arguments.items():
            kind = kinds.get(name)
            if isinstance(value, list | dict):
                arguments[name] = restored(value)
            elif kind is not None and isinstance(value, int | float) and not isinstance(value, bool):
                arguments[name] = kind(value)
        return function(**arguments)

    # kfp reads the parameters with getfullargspec, which does not look behind a wrapper.
    wrapped.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return wrapped


def _add_current_folder() -> None:
    """Let a training module of the current folder be found, after everything that is installed.

    The step's process is started with -P; without it the current folder would come first.
    """
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)


def restored(value: Any) -> Any:
    """Return a JSON value with whole floats as ints and marked texts as the values they stand for."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        return int(value)
    if isinstance(value, str) and value.startswith(_PREFIX):
        kind, _, text = value.removeprefix(_PREFIX).partition("=")
        if kind == "none":
            return None
        if kind == "bool":
            return text.lower() == "true"
        return int(float(text)) if kind == "int" else float(text)
    if isinstance(value, list):
        return [restored(item) for item in value]
    if isinstance(value, dict):
        # protobuf keeps no order; by name, a command line made of it is the same every time.
        return {key: restored(item) for key, item in sorted(value.items())}
    return value
