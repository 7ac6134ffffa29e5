"""How our components are declared: image, no pip install, and arguments that mean the same locally and compiled."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from typing import Any

from kfp import dsl
from kfp.dsl import pipeline_task
from kfp.dsl.python_component import PythonComponent

from elastic_runtime import __version__
from elastic_runtime.errors import InputError

__all__ = ["IMAGE", "MAX_PARAMETER_BYTES", "ElasticComponent", "component"]

IMAGE = os.environ.get("KFP_ELASTIC_IMAGE", f"kfp-elastic:{__version__}")
"""Container image of every step; it must have this package. `KFP_ELASTIC_IMAGE` or `--image` sets another."""

MAX_PARAMETER_BYTES = 100_000
"""kfp hands all arguments of a step to one process argument, which Linux limits to 128 KiB."""


class ElasticComponent(PythonComponent):
    """A kfp component whose call checks and normalises its arguments before any task exists.

    `None` for an optional input is the same as leaving it out, a whole number is accepted for a float, and a
    value that kfp cannot carry (infinite, over `MAX_PARAMETER_BYTES`) is refused by name.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> pipeline_task.PipelineTask:
        """Create the task. Raises `InputError` for a value that cannot be passed."""
        inputs = self.component_spec.inputs or {}
        kept = {}
        for name, value in kwargs.items():
            if value is None and name in inputs and inputs[name].optional:
                continue
            kind = inputs[name].type if name in inputs else ""
            kept[name] = self._checked(name, value, kind)
        return super().__call__(*args, **kept)

    def _checked(self, name: str, value: Any, kind: str) -> Any:
        where = f"{self.name}(): {name}={value!r:.80}"
        if kind == "NUMBER_DOUBLE" and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{where} is not a finite number")
        if isinstance(value, str | list | dict):
            try:
                size = len(json.dumps(value, allow_nan=False).encode())
            except (TypeError, ValueError) as error:
                raise InputError(f"{where} cannot be written as JSON: {error}") from error
            if size > MAX_PARAMETER_BYTES:
                raise InputError(
                    f"{where} … is {size:,} bytes long; a parameter may have {MAX_PARAMETER_BYTES:,}: "
                    "put it into a file and pass its path or URL"
                )
        return value


def component(function: Callable[..., Any]) -> ElasticComponent:
    """Declare `function` as a component of this package (used as a decorator)."""
    made = dsl.component(function, base_image=IMAGE, install_kfp_package=False)
    return ElasticComponent(component_spec=made.component_spec, python_func=made.python_func)
