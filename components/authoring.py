"""How our components are declared: one image, no pip install, arguments that mean the same everywhere."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable
from typing import Any, overload

from kfp import dsl
from kfp.dsl import pipeline_channel, pipeline_task
from kfp.dsl.python_component import PythonComponent
from kfp.dsl.types import type_utils

from elastic_runtime import __version__
from elastic_runtime.errors import InputError, UnknownNameError
from kfp_elastic.components.run_time import MARKS, NONE

__all__ = [
    "DEFAULT_IMAGE",
    "IMAGE",
    "MAX_PARAMETER_BYTES",
    "ElasticComponent",
    "component",
    "is_constant",
    "json_bytes",
    "parameter_kind",
]

DEFAULT_IMAGE = f"kfp-elastic:{__version__}"
"""The image in the compiled files of this repository, whatever the environment of who compiled them."""

IMAGE = os.environ.get("KFP_ELASTIC_IMAGE") or DEFAULT_IMAGE
"""Container image of every step; it must have this package. `KFP_ELASTIC_IMAGE` or `--image` sets another."""

MAX_PARAMETER_BYTES = 100_000
"""kfp hands all arguments of a step to one process argument, which Linux limits to 128 KiB."""

_RESTORE = """
from kfp_elastic.components import run_time

{name} = run_time.with_restored_arguments({name})
"""

_START = "python3 -m kfp.dsl.executor_main"
_START_SAFELY = "python3 -P -m kfp.dsl.executor_main"

Completed = Callable[[dict[str, Any]], dict[str, Any]]
Checked = Callable[[dict[str, Any]], None]

_CHANNELS = (pipeline_channel.PipelineChannel, pipeline_task.PipelineTask)


class ElasticComponent(PythonComponent):  # type: ignore[misc]
    """A kfp component whose call checks and normalises its arguments before any task exists.

    `None` for an optional input is the same as leaving it out, a whole number is accepted for a float, and a
    value that kfp cannot carry (infinite, not JSON, over `MAX_PARAMETER_BYTES`) is refused by name.

    A pipeline parameter inside a list or dict, such as `{"epochs": epochs}`, arrives with its type (kfp alone
    would hand over text). Only numbers, booleans and plain text can stand there, for kfp writes the text into JSON
    as it is: `pipeline run` refuses, before it starts, one with quotes, backslashes or line breaks.
    """

    completed: Completed | None = None
    """See `component`."""
    checked: Checked | None = None
    """See `component`."""

    @property
    def _written(self) -> str:
        """Name as it stands in the author's code; kfp's own has `-` for `_`."""
        return str(self.python_func.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> pipeline_task.PipelineTask:
        """Create the task. Raises `InputError` for a value that cannot be passed and for an unknown name."""
        inputs = self.component_spec.inputs or {}
        if self.completed is not None:
            kwargs = self.completed(kwargs)
        kept: dict[str, Any] = {}
        total = 0
        for name, value in kwargs.items():
            if name not in inputs:
                raise UnknownNameError.of(f"parameter of {self._written}()", name, inputs)
            if value is None:
                if inputs[name].optional:
                    continue
                raise InputError(f"{self._written}(): {name}=None, but {name} is required: give a value")
            kept[name], size = self._checked(name, value, parameter_kind(inputs[name].type))
            total += size
        if total > MAX_PARAMETER_BYTES:
            raise InputError(
                f"{self._written}(): the parameters {', '.join(kept)} are {total:,} bytes long together; "
                f"a step may have {MAX_PARAMETER_BYTES:,}: put the longest into a file and pass its path"
            )
        self._check_constants({name: kwargs[name] for name in kept})
        return super().__call__(*args, **kept)

    def _check_constants(self, arguments: dict[str, Any]) -> None:
        if self.checked is None:
            return
        try:
            self.checked({name: value for name, value in arguments.items() if _may_be_checked(value)})
        except InputError as error:
            raise type(error)(f"{self._written}(): {error}") from error

    def _checked(self, name: str, value: Any, kind: str) -> tuple[Any, int]:
        if isinstance(value, _CHANNELS):
            return value, 0
        where = f"{self._written}(): {name}={value!r:.80}"
        if kind == "NUMBER_DOUBLE" and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{where} is not a finite number")
        try:
            value = _marked(value)
            size = json_bytes(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"{where} cannot be written as JSON: {error}") from error
        if size > MAX_PARAMETER_BYTES:
            raise InputError(
                f"{where} … is {size:,} bytes long; a parameter may have {MAX_PARAMETER_BYTES:,}: "
                "put it into a file and pass its path or URL"
            )
        return value, size


def is_constant(value: Any) -> bool:
    """Whether `value` is known when the pipeline is compiled: it holds no parameter or output of the pipeline."""
    if isinstance(value, pipeline_task.PipelineTask):
        return False
    return not pipeline_channel.extract_pipeline_channels_from_any(value)


def _may_be_checked(value: Any) -> bool:
    # Of a dict, the check itself tells the constants from the rest.
    return isinstance(value, dict) or is_constant(value)


def json_bytes(value: Any) -> int:
    """Return how many bytes `value` takes as kfp writes it: JSON in ASCII.

    Raises `ValueError` for a number that is not finite and `TypeError` for an object that is not JSON.
    """
    return len(json.dumps(value, allow_nan=False))


def parameter_kind(declared: Any) -> str:
    """Return kfp's name of a declared parameter type (`NUMBER_DOUBLE` for `Float`), empty for an artifact."""
    if type_utils.get_parameter_type(declared) is None:
        return ""
    return str(type_utils.get_parameter_type_name(declared))


@overload
def component(function: Callable[..., Any]) -> ElasticComponent: ...
@overload
def component(
    *, completed: Completed | None = None, checked: Checked | None = None
) -> Callable[[Callable[..., Any]], ElasticComponent]: ...
def component(
    function: Callable[..., Any] | None = None,
    *,
    completed: Completed | None = None,
    checked: Checked | None = None,
) -> ElasticComponent | Callable[[Callable[..., Any]], ElasticComponent]:
    """Declare `function` as a component of this package (used as a decorator).

    `completed` gets the arguments of each call and returns those to use: for what only the author's machine knows.
    `checked` gets those that are constants (a dict may still hold parameters of the pipeline, see `is_constant`)
    and raises `InputError` for what the step would refuse.
    """
    if function is None:
        return functools.partial(_component, completed=completed, checked=checked)
    return _component(function, completed=completed, checked=checked)


def _component(
    function: Callable[..., Any], *, completed: Completed | None, checked: Checked | None
) -> ElasticComponent:
    made = dsl.component(function, base_image=IMAGE, install_kfp_package=False)
    # kfp puts the function's source last into the command; what is added to it runs in the step's process.
    command = made.component_spec.implementation.container.command
    command[-1] += _RESTORE.format(name=function.__name__)
    # A user's own `elastic_runtime/` in the current folder must not be taken for ours.
    command[:-1] = [part.replace(_START, _START_SAFELY) for part in command[:-1]]
    ours = ElasticComponent(component_spec=made.component_spec, python_func=made.python_func)
    ours.completed = completed
    ours.checked = checked
    return ours


def _marked(value: Any) -> Any:
    """Return a list or dict with every pipeline parameter in it as kfp's placeholder, marked by its type."""
    if isinstance(value, pipeline_task.PipelineTask):
        value = value.output
    if isinstance(value, pipeline_channel.PipelineParameterChannel):
        kind = parameter_kind(value.channel_type)
        if kind == "STRING":
            return str(value)
        if kind in MARKS:
            return MARKS[kind] + str(value)
    if isinstance(value, pipeline_channel.PipelineChannel):
        raise TypeError(
            f"kfp cannot put {value.full_name} inside a list or dict: pass it as a parameter of its own"
        )
    if isinstance(value, list | tuple):
        return [NONE if item is None else _marked(item) for item in value]
    if isinstance(value, dict):
        return {key: NONE if item is None else _marked(item) for key, item in value.items()}
    return value
