"""The machine under random schedules of crashes, leaves, cuts, scaling and new coordinators."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elastic_runtime.jobs.nodes import parse_nodes

sys.path.insert(0, str(Path(__file__).parent))
from simulation import TOTAL_STEPS, Simulation

RANGES = [("1", 1), ("1:3", 1), ("2:3", 2), ("1,2,4", 1), ("2:4", 1), ("3", 2)]


@pytest.mark.parametrize(("nodes", "workers"), RANGES)
@pytest.mark.parametrize("in_place", [True, False])
def test_every_job_ends_well_and_keeps_its_steps(nodes: str, workers: int, in_place: bool) -> None:
    for seed in range(60):
        world = Simulation(seed, nodes=parse_nodes(nodes, workers), in_place=in_place)
        world.run(1500)
        world.run(60_000, quiet=True)
        assert world.done is not None, f"seed {seed}: stuck in {world.machine and world.machine.phase}"
        assert world.done.state == "succeeded", f"seed {seed}: {world.done}"
        assert world.highest == TOTAL_STEPS
