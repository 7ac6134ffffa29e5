"""A process group on a port of the script's own works under the agent too.

torch takes `TORCHELASTIC_USE_AGENT_STORE` to mean that the agent serves the store of every group, whatever its
address: `init_process_group(init_method="tcp://host:port")` on another port then waits for a store that nobody serves
(torch 2.13, under torchrun as well). Only the round's own address is the agent's; at any other, rank 0 serves.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

__all__ = ["serve_own_stores"]

_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"


def serve_own_stores() -> None:
    """Have rank 0 serve stores that are not at `MASTER_ADDR` and `MASTER_PORT`.

    Called twice, or with a torch that makes its stores in another way, it does nothing.
    """
    # Not by `from torch.distributed import`: that name is a function there.
    module: Any = importlib.import_module("torch.distributed.rendezvous")
    create = getattr(module, "_create_c10d_store", None)
    used = getattr(module, "_torchelastic_use_agent_store", None)
    if create is None or used is None or getattr(create, "elastic", False):
        return

    def create_store(hostname: str, port: int, *arguments: Any, **named: Any) -> Any:
        own = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")) != (hostname, str(port))
        if not own or not used():
            return create(hostname, port, *arguments, **named)
        value = os.environ.pop(_VARIABLE)
        try:
            return create(hostname, port, *arguments, **named)
        finally:
            os.environ[_VARIABLE] = value

    create_store.elastic = True  # type: ignore[attr-defined]
    module._create_c10d_store = create_store
