"""A deadlock of torch at the end of a script, and how it is kept out of our workers.

Each backward pass stores a Python object in thread-local state (for compiled code that runs in device threads), and a
gloo collective that DistributedDataParallel starts there keeps a copy. When the collective is over, gloo's thread
drops the copy, for which it needs the interpreter's lock. A script that at that moment drops its last reference to
the process group holds that lock and waits for gloo's thread: both wait for ever. It takes only that the script ends
within milliseconds of its last step (seen with torch 2.13 in about one of five runs of a short script).
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["keep_context_out_of_collectives"]

_KEY = "context"


def keep_context_out_of_collectives() -> None:
    """Leave that object out as long as CUDA is not in use: without device threads nobody looks for it.

    Called twice, or with a torch that stores nothing, it does nothing.
    """
    functions: Any = torch._C
    stash = getattr(functions, "_stash_obj_in_tls", None)
    remove = getattr(functions, "_remove_obj_from_tls", None)
    if stash is None or getattr(stash, "elastic", False):
        return

    def stash_unless_context(key: str, value: object) -> None:
        if key != _KEY or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            stash(key, value)

    def remove_if_there(key: str) -> None:
        if key != _KEY or functions._is_key_in_tls(key):
            assert remove is not None
            remove(key)

    stash_unless_context.elastic = True  # type: ignore[attr-defined]
    functions._stash_obj_in_tls = stash_unless_context
    if remove is not None:
        functions._remove_obj_from_tls = remove_if_there
