"""Where `--kill-worker` strikes: in the middle of an epoch of the training step, and of a local run only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from elastic_runtime.errors import InputError
from kfp_elastic.pipelines import RegisteredPipeline

__all__ = ["FAULTS_VARIABLE", "TRAIN_STEP", "kill_environment", "middle_step"]

FAULTS_VARIABLE = "ELASTIC_FAULTS"
"""Environment variable in which a training worker finds the faults to inject."""

TRAIN_STEP = "elastic-train"
"""The step that trains, as kfp names it."""

_VICTIM_RANK = 1


def kill_environment(
    entry: RegisteredPipeline, pipeline_spec: Any, parameters: Mapping[str, Any]
) -> dict[str, str]:
    """Return the variables with which one worker of the training step of `entry` is killed.

    Raises `InputError` for a pipeline without a training step, and for one whose size of epoch is not known.
    """
    if f"comp-{TRAIN_STEP}" not in pipeline_spec.components:
        raise InputError(f"--kill-worker: pipeline {entry.name} has no step {TRAIN_STEP}")
    defaults = {
        name: declared.default_value.number_value
        for name, declared in pipeline_spec.root.input_definitions.parameters.items()
        if name in {"epochs", "batch_size"}
    }
    sizes = {**defaults, **{name: parameters[name] for name in defaults if name in parameters}}
    if entry.train_rows is None or len(sizes) != 2:
        raise InputError(
            f"--kill-worker: the number of steps of pipeline {entry.name} is not known: use digits"
        )
    step = middle_step(entry.train_rows, int(sizes["batch_size"]), int(sizes["epochs"]))
    return {FAULTS_VARIABLE: f"kill rank={_VICTIM_RANK} step={step}"}


def middle_step(rows: int, batch_size: int, epochs: int) -> int:
    """Return a step two thirds into the second epoch, or into the only one.

    The second, because something has been saved by then: the recovery has a checkpoint to go on from.
    """
    per_epoch = max(1, math.ceil(rows / max(1, batch_size)))
    return max(1, (5 if epochs > 1 else 2) * per_epoch // 3)
