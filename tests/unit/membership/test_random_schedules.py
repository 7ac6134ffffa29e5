"""The machine under random schedules of crashes, hangs, torn states, leaves, cuts, scaling and new coordinators."""

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
    given_up = 0
    for seed in range(30):
        world = Simulation(seed, nodes=parse_nodes(nodes, workers), in_place=in_place)
        world.run(1500)
        world.run(60_000, quiet=True)
        assert world.done is not None, f"seed {seed}: stuck in {world.machine and world.machine.phase}"
        if world.done.state == "failed" and world.done.reason.endswith(
            "lost 6 times in a row, and the job needs it"
        ):
            given_up += 1  # Right for a node that was killed so often before it took a step.
            continue
        assert world.done.state == "succeeded", f"seed {seed}: {world.done}"
        assert world.highest == TOTAL_STEPS
    assert given_up <= 6


@pytest.mark.parametrize(("nodes", "workers"), RANGES)
@pytest.mark.parametrize("in_place", [True, False])
def test_every_job_comes_to_its_desired_size(nodes: str, workers: int, in_place: bool) -> None:
    for seed in range(5):
        world = Simulation(seed, nodes=parse_nodes(nodes, workers), in_place=in_place)
        world.total = 1 << 60
        world.run(1500)
        world.run(15_000, quiet=True)
        machine = world.machine
        if world.done is not None and world.done.reason.endswith(
            "lost 6 times in a row, and the job needs it"
        ):
            continue
        assert machine is not None
        desired = machine.desired if in_place else machine.desired // workers * workers
        assert (machine.phase, machine.world_size) == ("running", desired), f"seed {seed}: {world.done}"
