"""Where this worker stands in the present round, in the environment and as an object; and its random seeds."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import numpy as np
import torch

from elastic_runtime.training.channel import Go

__all__ = ["Place", "job_seed", "seed_everything"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of this worker."""

    rank: int
    local_rank: int
    world_size: int
    round: int
    """Number of the round; -1 before the first."""
    term: int
    source: int
    """Rank that gives its state at the start of the round; -1 if nobody has any."""

    @classmethod
    def from_environment(cls, *, joined: bool) -> Place:
        """Return the place that torchrun's variables name: rank 0 of 1 without them. `joined` if it holds already."""
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            round=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if joined else -1,
            term=0,
            source=-1,
        )

    @classmethod
    def of(cls, go: Go) -> Place:
        """Return the place that the agent gave, and bring torchrun's variables up to date with it."""
        os.environ.update(
            RANK=str(go.rank),
            LOCAL_RANK=str(go.local_rank),
            WORLD_SIZE=str(go.world_size),
            LOCAL_WORLD_SIZE=str(go.local_world_size),
            GROUP_RANK=str(go.group_rank),
            GROUP_WORLD_SIZE=str(go.group_world_size),
            ROLE_RANK=str(go.rank),
            ROLE_WORLD_SIZE=str(go.world_size),
            MASTER_ADDR=go.store[0],
            MASTER_PORT=str(go.store[1]),
            TORCHELASTIC_RESTART_COUNT=str(go.round),
        )
        return cls(
            rank=go.rank,
            local_rank=go.local_rank,
            world_size=go.world_size,
            round=go.round,
            term=go.term,
            source=go.source,
        )


def job_seed(given: int) -> int:
    """Return the seed of the job: the command line's (`ELASTIC_SEED`), else the one `given` to `elastic.run`."""
    return int(os.environ.get("ELASTIC_SEED") or given)


def seed_everything(seed: int, *, rank: int, moment: int) -> None:
    """Seed torch (all devices), numpy and random from these numbers: other ranks, other values."""
    words = np.random.SeedSequence((seed, rank, moment)).generate_state(4, np.uint64)
    torch.manual_seed(int(words[0] >> np.uint64(1)))
    np.random.seed(int(words[1] & np.uint64(0xFFFFFFFF)))  # the legacy state is what scripts draw from
    random.seed(int(words[2]))
