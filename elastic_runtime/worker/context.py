"""Where a worker finds itself: torchrun's variables plus the folders of the job."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Context", "context"]


@dataclass(frozen=True, kw_only=True)
class Context:
    """The place of this worker in its job. In a plain `python script.py` there is one worker, rank 0."""

    rank: int
    """Number of this worker in the whole job, from 0."""
    local_rank: int
    """Number of this worker on its node, from 0."""
    world_size: int
    """Workers of this round."""
    round: int
    """Number of the agreed membership, from 0; it grows with every restart."""
    job_dir: Path | None
    """Folder of the job's events and metrics; None in a plain run."""
    output_dir: Path
    """Folder for the model (`ELASTIC_OUTPUT_DIR`, else ./output)."""
    checkpoint_dir: Path | None
    """Folder for checkpoints (`ELASTIC_CHECKPOINT_DIR`); None in a plain run, which neither saves nor resumes."""

    @property
    def distributed(self) -> bool:
        """Whether a launcher started this worker, so that `init_process_group` finds its peers."""
        return "MASTER_ADDR" in os.environ


def context() -> Context:
    """Return this worker's context, read from the environment."""
    job_dir = os.environ.get("ELASTIC_JOB_DIR")
    checkpoint_dir = os.environ.get("ELASTIC_CHECKPOINT_DIR")
    return Context(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        round=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        job_dir=Path(job_dir) if job_dir else None,
        output_dir=Path(os.environ.get("ELASTIC_OUTPUT_DIR", "output")),
        checkpoint_dir=Path(checkpoint_dir) if checkpoint_dir else None,
    )
