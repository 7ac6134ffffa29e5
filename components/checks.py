"""Checks of values that would fail a step, made where the value is written: when a pipeline is compiled or started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_runtime.errors import InputError, UnknownNameError
from elastic_runtime.evaluation.gates import GATES
from elastic_runtime.evaluation.gates import check_gates as check_limits_of_gates
from elastic_runtime.jobs.nodes import parse_nodes
from kfp_elastic.components.authoring import is_constant

__all__ = ["check_gates", "check_nodes"]


def check_nodes(where: str, value: Any, workers: int = 1) -> None:
    """Raise `InputError` for `value` if it does not say how many nodes; `where` names the field in the message."""
    if not isinstance(value, str):
        raise InputError(f"{where}={value!r:.80} is not text: write MIN:MAX, such as '1:2'")
    try:
        parse_nodes(value, workers)
    except InputError as error:
        # It is no option of the command line here.
        reason = str(error).removeprefix(f"--nodes {value!r}: ").replace("--nodes", "nodes")
        raise InputError(f"{where}={value!r:.80}: {reason}") from error


def check_gates(gates: Any) -> None:
    """Raise `InputError` for a name that is no gate, and for a limit that is none.

    A limit that is only known when the pipeline runs is left to that run.
    """
    if isinstance(gates, Mapping):
        for name in gates:
            if name not in GATES:
                raise UnknownNameError.of("gate", str(name), GATES)
        gates = {name: limit for name, limit in gates.items() if is_constant(limit)}
    check_limits_of_gates(gates)
