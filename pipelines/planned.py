"""Which steps a compiled pipeline has: those that a run may leave out are known only from there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from typing import Any

import yaml

__all__ = ["planned_steps"]


def planned_steps(compiled: str) -> list[str]:
    """Return the names of the steps of a compiled pipeline, in an order in which they can run.

    Steps inside conditions and loops have their own name alone. Importers start no process and are left out.
    """
    spec = next(iter(yaml.safe_load_all(compiled)))
    return list(dict.fromkeys(_steps(spec, spec["root"]["dag"])))


def _steps(spec: Mapping[str, Any], dag: Mapping[str, Any]) -> Iterator[str]:
    tasks = dag["tasks"]
    graph = {name: task.get("dependentTasks", ()) for name, task in tasks.items()}
    for name in TopologicalSorter(graph).static_order():
        component = spec["components"][tasks[name]["componentRef"]["name"]]
        if "dag" in component:
            yield from _steps(spec, component["dag"])
        elif "container" in spec["deploymentSpec"]["executors"][component["executorLabel"]]:
            yield name
