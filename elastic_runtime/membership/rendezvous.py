"""torchrun's rendezvous backend `elastic`: `torchrun --rdzv-backend=elastic --rdzv-endpoint=HOST:PORT …`.

The entry point group `torchrun.handlers` names `get_handler`. torch loads it whenever torch.distributed.elastic is
imported, in every program: so nothing here is imported before somebody asks for a handler.

What is in `--rdzv-conf`, as `name=value,…`

    secret_file         path of the job's secret, the same on all nodes; without it that of ELASTIC_SECRET_FILE
    is_host             whether this node starts the coordinator; without it the nodes that HOST is an address of
    join_timeout        seconds in which a round must come about (600)
    last_call_timeout   seconds that a first round which could begin waits for one more node (3)
    heartbeat           seconds after which a node that says nothing is taken for lost (5)
    read_timeout        seconds for the operations of the round's store (60)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_runtime.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

__all__ = ["SECRET_VARIABLE", "RendezvousConfig", "create_handler", "get_handler"]

SECRET_VARIABLE = "ELASTIC_SECRET_FILE"
_OF_TORCH = (
    "close_timeout", "heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt", "rank", "store_type",
    "timeout",
)  # fmt: skip
"""What torch adds by itself, and what its c10d backend takes and has no meaning here."""


@dataclass(frozen=True, kw_only=True)
class RendezvousConfig:
    """One torchrun agent's view of its job."""

    host: str
    """Host of the coordinator."""
    port: int
    run_id: str
    """Name of the job; all its agents give the same."""
    minimum: int
    """Nodes below which no round begins."""
    maximum: int
    secret_file: Path
    is_host: bool | None = None
    """Whether this node may start the coordinator; None: if `host` is this machine."""
    local_addr: str | None = None
    """Address at which other nodes reach this one; None: the one from which it reaches the coordinator."""
    join_timeout: float = 600.0
    last_call_timeout: float = 3.0
    heartbeat: float = 5.0
    read_timeout: float = 60.0

    @classmethod
    def parse(
        cls, given: Mapping[str, Any], *, host: str, port: int, run_id: str, minimum: int, maximum: int,
        local_addr: str | None = None, environment: Mapping[str, str] = os.environ,
    ) -> RendezvousConfig:  # fmt: skip
        """Return the configuration in `--rdzv-conf`. Raises `InputError` that names the key, the value and the fix."""
        seconds = ("join_timeout", "last_call_timeout", "heartbeat", "read_timeout")
        known = (*seconds, "is_host", "secret_file")
        for name in given:
            if name not in known and name not in _OF_TORCH:
                raise InputError(f"--rdzv-conf {name}: the elastic backend takes {', '.join(sorted(known))}")
        path = given.get("secret_file") or environment.get(SECRET_VARIABLE)
        if not path:
            raise InputError(
                "--rdzv-conf secret_file: missing: the nodes of a job share a secret: make one with "
                "`(umask 077; openssl rand -hex 32 > FILE)`, copy it to every node, and give its path with "
                f"--rdzv-conf secret_file=FILE or in {SECRET_VARIABLE}"
            )
        return cls(
            host=host, port=port, run_id=run_id, minimum=minimum, maximum=maximum, local_addr=local_addr,
            secret_file=Path(str(path)), is_host=_boolean(given.get("is_host")),
            **{name: _seconds(name, given[name]) for name in seconds if name in given},
        )  # fmt: skip


def _boolean(value: Any) -> bool | None:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if value is None:
        return None
    if (found := words.get(str(value).lower())) is None:
        raise InputError(f"--rdzv-conf is_host={value}: give true or false")
    return found


def _seconds(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < 1e9:
        raise InputError(f"--rdzv-conf {name}={value}: give a number of seconds above 0")
    return number


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what makes a handler: torch calls this once, when it looks for backends."""
    return create_handler


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Return a handler of these parameters, which begins to connect.

    Raises `InputError` for parameters that cannot be right, and `MissingFileError` if there is no secret.
    """
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    from elastic_runtime.membership.rendezvous_handler import ElasticRendezvousHandler

    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=29400)
    if not params.run_id:
        raise InputError("--rdzv-id: missing: give the job a name, the same on all nodes")
    config = RendezvousConfig.parse(
        params.config, host=host, port=port, run_id=params.run_id, minimum=params.min_nodes,
        maximum=params.max_nodes, local_addr=params.local_addr,
    )  # fmt: skip
    return ElasticRendezvousHandler(config)
