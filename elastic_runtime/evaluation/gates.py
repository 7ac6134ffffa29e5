"""Quality gates: the limits that a model must keep, and the verdict with its reasons in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_runtime.errors import InputError, UnknownNameError

__all__ = [
    "GATES",
    "Gate",
    "GateResult",
    "Rule",
    "applicable_to",
    "check_gates",
    "judge",
]

CLASSIFICATION = "classification"
REGRESSION = "regression"

_ROUNDING = 1e-12  # 0.96 - 0.95 is a little more than 0.01 in binary, and keeps a limit of 0.01 all the same


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A limit that a user can set."""

    name: str
    what: str
    tasks: tuple[str, ...]
    low: float
    high: float
    at_least: bool
    """True when the value must reach the limit, False when it must not exceed it."""


def _gates(*gates: Gate) -> dict[str, Gate]:
    return {gate.name: gate for gate in gates}


_BOTH = (CLASSIFICATION, REGRESSION)
_CLASSES = (CLASSIFICATION,)
_VALUES = (REGRESSION,)
_INF = math.inf

GATES: dict[str, Gate] = _gates(
    Gate(name="min_accuracy", what="accuracy", tasks=_CLASSES, low=0, high=1, at_least=True),
    Gate(name="min_f1", what="macro F1", tasks=_CLASSES, low=0, high=1, at_least=True),
    Gate(name="min_auc", what="area under the ROC curve", tasks=_CLASSES, low=0, high=1, at_least=True),
    Gate(
        name="max_calibration_error",
        what="expected calibration error",
        tasks=_CLASSES,
        low=0,
        high=1,
        at_least=False,
    ),
    Gate(
        name="min_slice_accuracy",
        what="accuracy of the worst slice",
        tasks=_CLASSES,
        low=0,
        high=1,
        at_least=True,
    ),
    Gate(name="min_r2", what="R²", tasks=_VALUES, low=-_INF, high=1, at_least=True),
    Gate(name="max_rmse", what="root mean squared error", tasks=_VALUES, low=0, high=_INF, at_least=False),
    Gate(name="max_mae", what="mean absolute error", tasks=_VALUES, low=0, high=_INF, at_least=False),
    Gate(
        name="max_regression",
        what="drop against the baseline",
        tasks=_BOTH,
        low=-_INF,
        high=_INF,
        at_least=False,
    ),
)
"""Every gate by name."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One gate as it was applied."""

    name: str
    limit: float
    value: float
    passed: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """The verdict over all rules."""

    passed: bool
    reason: str
    rules: tuple[Rule, ...] = ()

    @property
    def verdict(self) -> str:
        """`passed` or `failed`: the value that a pipeline branches on."""
        return "passed" if self.passed else "failed"


def check_gates(gates: Mapping[str, Any]) -> dict[str, float]:
    """Return `gates` with float limits.

    Raises `UnknownNameError` for a name that is no gate and `InputError` for a limit that is not a number or
    that no value of the metric could meaningfully have.
    """
    if not isinstance(gates, Mapping):
        raise InputError(f"gates={gates!r:.80} is not a mapping of gate names to limits")
    checked = {}
    for name, limit in gates.items():
        if name not in GATES:
            raise UnknownNameError.of("gate", str(name), GATES)
        gate = GATES[name]
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not math.isfinite(limit):
            raise InputError(f"gates: {name}={limit!r:.80} is not a finite number")
        if not gate.low <= limit <= gate.high:
            fraction = (
                f"; for {limit:g} percent write {limit / 100:g}"
                if (gate.low, gate.high) == (0, 1) and 1 < limit <= 100
                else ""
            )
            raise InputError(
                f"gates: {name}={limit!r} is {_outside(gate)} of its metric ({gate.what}){fraction}"
            )
        checked[str(name)] = float(limit)
    return checked


def _outside(gate: Gate) -> str:
    if math.isinf(gate.low):
        return f"above {gate.high:g}, the largest value"
    if math.isinf(gate.high):
        return f"below {gate.low:g}, the smallest value"
    return f"outside {gate.low:g} to {gate.high:g}, the range"


def applicable_to(gates: Mapping[str, float], task: str) -> None:
    """Raise `InputError` for the first gate that does not apply to `task`."""
    for name in gates:
        if task not in GATES[name].tasks:
            fitting = [gate.name for gate in GATES.values() if task in gate.tasks]
            raise InputError(
                f"gates: {name} applies to {' and '.join(GATES[name].tasks)}, but the task is {task}: "
                f"remove it or use one of {', '.join(fitting)}"
            )


def judge(limits: Mapping[str, float], values: Mapping[str, tuple[float, str]]) -> GateResult:
    """Compare the values with their limits.

    `values` has, for each gate in `limits`, the value of its metric (finite) and where it was measured, which
    goes into the reason. Values are compared as they are, not their intervals: ask for a stricter limit where
    the interval matters.
    """
    if not limits:
        return GateResult(passed=True, reason="no limit was asked for, so there was nothing to fail")
    rules = tuple(_applied(GATES[name], limit, *values[name]) for name, limit in limits.items())
    broken = [rule for rule in rules if not rule.passed]
    if broken:
        reason = f"{len(broken)} of {len(rules)} limits broken: " + "; ".join(rule.reason for rule in broken)
    else:
        reason = "every limit is kept" if len(rules) > 1 else "the limit is kept"
    return GateResult(passed=not broken, reason=reason, rules=rules)


def _applied(gate: Gate, limit: float, value: float, where: str) -> Rule:
    kept = value >= limit - _ROUNDING if gate.at_least else value <= limit + _ROUNDING
    relation = {
        (True, True): "is at least",
        (True, False): "is below",
        (False, True): "is at most",
        (False, False): "is above",
    }[gate.at_least, kept]
    measured, bound = _told_apart(value, limit)
    place = f" {where}" if where else ""
    if gate.name == "max_regression":
        direction = "worse" if value > 0 else "better"
        reason = (
            f"{where} is {measured.removeprefix('-')} {direction} than the baseline's, allowed is at most "
            f"{bound} worse"
        )
    else:
        reason = f"{gate.what}{place} {measured} {relation} {bound}"
    return Rule(name=gate.name, limit=limit, value=value, passed=kept, reason=reason)


def _told_apart(value: float, limit: float) -> tuple[str, str]:
    # "0.95 is below 0.95" helps nobody: give as many digits as it takes.
    for digits in range(4, 18):
        shown = f"{value:.{digits}g}", f"{limit:.{digits}g}"
        if abs(value - limit) <= _ROUNDING or shown[0] != shown[1]:
            return shown
    return repr(value), repr(limit)
