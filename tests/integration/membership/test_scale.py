"""The benchmark's own coordinator and agents on a small scale: real sockets, two processes, constant cost a node."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def benchmark_module() -> ModuleType:
    """The program `benchmarks/membership_scale.py`."""
    folder = Path(__file__).parents[3] / "benchmarks"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("membership_scale", folder / "membership_scale.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


def test_messages_and_bytes_of_a_node_do_not_depend_on_the_size_of_the_job(
    benchmark_module: ModuleType,
) -> None:
    small, used = benchmark_module.measure(8, changes=2)
    large, _ = benchmark_module.measure(96, changes=2)
    # join, welcome, start, started, hello, ready, go, joined; and one node offers another store.
    assert 8 <= large["messages"] <= small["messages"] <= 10
    # change, ready, go, joined.
    assert 4 <= large["reform_messages"] <= small["reform_messages"] <= 6
    for name in ("bytes", "reform_bytes"):
        assert large[name] < 1.2 * small[name], (
            f"{name}: {small[name]:.0f} for 8 nodes, {large[name]:.0f} for 96"
        )
    assert used["memory"] > 0
