"""Which values the parameters of this package's pipelines may have, checked before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elastic_runtime.errors import InputError
from elastic_runtime.evaluation.gates import check_gates
from kfp_elastic.components.checks import check_nodes
from kfp_elastic.pipelines import RegisteredPipeline

__all__ = ["LIMITS", "check_limits"]

_Check = Callable[[str, Any], None]


def _from(low: int) -> _Check:
    def check(name: str, value: Any) -> None:
        if value < low:
            raise InputError(f"parameter {name}={value!r} is below {low}: give a whole number from {low}")

    return check


def _above_zero(name: str, value: Any) -> None:
    if not value > 0:
        raise InputError(f"parameter {name}={value!r} is not above 0: give a number such as 0.003")


def _gate(name: str, value: Any) -> None:
    try:
        check_gates({name: value})
    except InputError as error:
        raise InputError(f"parameter {str(error).removeprefix('gates: ')}") from error


def _nodes(name: str, value: Any) -> None:
    check_nodes(f"parameter {name}", value)


LIMITS: dict[str, _Check] = {
    "epochs": _from(1),
    "batch_size": _from(1),
    "lr": _above_zero,
    "nodes": _nodes,
    "max_restarts": _from(0),
    "min_accuracy": _gate,
    "min_r2": _gate,
    "seed": _from(0),
}
"""The check of every parameter that has one, by the name that it has in our pipelines."""


def check_limits(values: Mapping[str, Any], entry: RegisteredPipeline) -> None:
    """Raise `InputError` for the first of `values` that a run of `entry` could not use.

    The values have their types already (see `parameters.checked_parameters`). In a compiled file of the user the
    same names may mean something else: its steps check their own.
    """
    if entry.is_file:
        return
    for name, value in values.items():
        if name in LIMITS:
            LIMITS[name](name, value)
