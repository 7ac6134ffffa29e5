"""The environment of a worker: torchrun's contract, the job's folders, and safe defaults for one machine."""

from __future__ import annotations

import os
from dataclasses import dataclass

from elastic_runtime.jobs.folder import JobFolder
from elastic_runtime.jobs.spec import JobSpec

__all__ = ["Place", "worker_environment"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a worker stands in its round."""

    number: int
    """Number of the round."""
    group: int
    """Rank of its node."""
    rank: int
    local_rank: int
    world: int
    """Workers of the round."""


def worker_environment(
    spec: JobSpec, folder: JobFolder, *, place: Place, name: str, store: tuple[str, int]
) -> dict[str, str]:
    """Return what the worker at `place` of the job `name` gets in addition to the agent's own environment."""
    workers = spec.nodes.workers
    threads = max(1, len(os.sched_getaffinity(0)) // (workers * spec.nodes.maximum))
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    return {
        **{key: value for key, value in defaults.items() if key not in os.environ},
        "ELASTIC_JOB_DIR": str(folder.path),
        "ELASTIC_OUTPUT_DIR": spec.output_dir or str(folder.path / "output"),
        "ELASTIC_CHECKPOINT_DIR": str(folder.path / "checkpoints"),
        **spec.environment,
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world),
        "LOCAL_WORLD_SIZE": str(workers),
        "GROUP_RANK": str(place.group),
        "GROUP_WORLD_SIZE": str(place.world // workers),
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world),
        "ROLE_NAME": "default",
        "MASTER_ADDR": store[0],
        "MASTER_PORT": str(store[1]),
        "TORCHELASTIC_RESTART_COUNT": str(place.number),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": name,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
