"""The environment of a worker: torchrun's contract, the job's folders, and safe defaults for one machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_runtime.agent.config import AgentConfig
    from elastic_runtime.membership.actions import Place

__all__ = ["DEFAULTS", "worker_environment"]

DEFAULTS = {
    "PYTHONUNBUFFERED": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}
"""What workers and zygote get unless the environment says otherwise."""


def worker_environment(
    config: AgentConfig, place: Place, *, round_: int, store: tuple[str, int]
) -> dict[str, str]:
    """Return the whole environment of the worker at `place`."""
    threads = max(1, len(os.sched_getaffinity(0)) // (config.workers * config.nodes))
    folder = Path(config.job_dir)
    defaults = {"OMP_NUM_THREADS": str(threads), **DEFAULTS}
    return {
        **defaults,
        **os.environ,
        "ELASTIC_JOB_DIR": str(folder),
        "ELASTIC_OUTPUT_DIR": config.output_dir,
        "ELASTIC_CHECKPOINT_DIR": str(folder / "checkpoints"),
        **config.environment,
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.slot),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.group_rank),
        "GROUP_WORLD_SIZE": str(place.group_world_size),
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": store[0],
        "MASTER_PORT": str(store[1]),
        "TORCHELASTIC_RESTART_COUNT": str(round_),
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        "TORCHELASTIC_RUN_ID": config.name,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
