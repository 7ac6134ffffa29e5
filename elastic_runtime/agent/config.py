"""What an agent is told about its job: one file for all agents of the job."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from elastic_runtime import __version__
from elastic_runtime.errors import IntegrityError
from elastic_runtime.jobs.folder import write_json
from elastic_runtime.jobs.spec import Program

__all__ = ["AgentConfig", "fingerprint"]


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """One job as its agents see it."""

    name: str
    """Job name."""
    program: Program
    """What each worker runs."""
    arguments: Sequence[str] = ()
    """Command line of the program."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Extra environment of every worker."""
    workers: int
    """Workers that a node has room for."""
    nodes: int
    """Most nodes of the job on this machine: they share its processors."""
    max_restarts: int
    grace: float
    """Seconds between SIGTERM and SIGKILL."""
    job_dir: str
    """Folder of events, metrics, logs and checkpoints."""
    output_dir: str
    coordinator: tuple[str, int]
    """Address of the coordinator."""
    secret: str
    """Path of the file with the job's secret."""
    store_host: str = "127.0.0.1"
    """Address at which this machine's stores can be reached by all workers of the job."""
    preload: Sequence[str] = ()
    """Modules that an agent's own zygote imports beside torch; a supervisor has one for all its agents."""
    silence: float = 5.0
    """Seconds without a word of the coordinator after which an agent without a supervisor connects anew."""
    patience: float = 600.0
    """Seconds without a coordinator after which such an agent gives up."""

    def write(self, path: Path) -> None:
        """Write it for `read`."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> AgentConfig:
        """Read what `write` wrote. Raises `IntegrityError` if that is not there."""
        try:
            document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            document.pop("schema")
            host, port = document["coordinator"]
            program = Program(**document["program"])
            return cls(**{**document, "program": program, "coordinator": (str(host), int(port))})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"{path}: is no agent's configuration: {error!r}") from error


def fingerprint(program: Program) -> dict[str, Any]:
    """Return what all nodes of a job must have alike: the program and the versions of what runs it."""
    from importlib import metadata  # Only agents need it, and it takes as long to import as all else here.

    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "none"
    return {
        "program": program.sha256()[:16] or "unknown",
        "torch": torch.partition("+")[0],
        "kfp-elastic": __version__,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
