"""`elastic.run`: calls `train` again and again until the job is done, through all changes of its membership."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist

from elastic_runtime.errors import InputError
from elastic_runtime.training.channel import RoundChanged
from elastic_runtime.training.job import Job
from elastic_runtime.training.place import job_seed, seed_everything
from elastic_runtime.training.session import Session
from elastic_runtime.worker.torch_exit import keep_context_out_of_collectives

__all__ = ["run"]

_logger = logging.getLogger(__name__)
_state = {"running": False, "in_place": False}


def run(
    train: Callable[[Job], object], *, seed: int = 0, reproducible: bool = False, logical_shards: int = 8
) -> None:
    """Train: call `train(job)`, and again with a new `job` whenever workers come or go, until it returns.

    - Under this project's agent, survivors of a change stay: `train` is left by `RoundChanged` and called again; locals
      are lost, attached state, `job.once` and the position in the data are not.
    - Under plain torchrun there is one round; a lost peer's error leaves `run`, and torchrun starts all again.
    - In `python script.py` there is one worker and no process group.

    `seed`: of the sample order, and of each worker's random numbers at the start of a round (torch, numpy, random);
    `ELASTIC_SEED` wins. `logical_shards` belongs to `reproducible`, which is not available yet.

    Returns None when all workers are done. Raises `InputError` for wrong parameters or a call inside `train`, whatever
    `train` raises, and `SystemExit(0)` in a worker that is to leave the job.
    """
    _check(train, seed, reproducible, logical_shards)
    keep_context_out_of_collectives()
    _state["running"] = True
    session: Session | None = None
    try:
        session = Session(seed=job_seed(seed), device=_device())
        _state["in_place"] = session.link is not None
        if session.link is not None and dist.is_initialized():
            raise InputError("a process group is there already: leave init_process_group to elastic.run")
        seed_everything(session.seed, rank=session.place.rank, moment=0)
        _loop(train, session)
    except BaseException:
        if session is not None:
            # Peers that wait for this rank are set free now, not when the interpreter has ended.
            session.group.interrupt()
        raise
    finally:
        _state["running"] = False
        if session is not None:
            session.close()


def _loop(train: Callable[[Job], object], session: Session) -> None:
    while True:
        broken: str
        try:
            session.begin_call()
            train(Job(session))
            session.finish()
            return
        except RoundChanged as change:
            broken = str(change)
        except Exception as error:
            if not session.explains(error):
                raise
            broken = f"{type(error).__name__}: {error}"
        # Outside the handlers: what the frames of the traceback held is free by now, sockets included.
        _logger.info(
            "round left: rank=%d step=%d reason=%.200s", session.place.rank, session.position.step, broken
        )
        session.settle()


def _device() -> torch.device:
    if torch.cuda.is_available():
        from elastic_runtime.training.place import Place

        device = torch.device(
            "cuda", Place.from_environment(joined=False).local_rank % torch.cuda.device_count()
        )
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _check(train: object, seed: object, reproducible: object, logical_shards: object) -> None:
    if not callable(train):
        raise InputError(f"train={train!r:.80} is not a function: give one that takes the job")
    for name, value, least in (("seed", seed, 0), ("logical_shards", logical_shards, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{name}={value!r} must be a whole number of at least {least}")
    if reproducible:
        raise InputError("reproducible=True is not available yet: leave it out")
    if _state["running"]:
        raise InputError("elastic.run is called inside train(): call it once, at the end of the script")
    if _state["in_place"]:
        raise InputError("elastic.run was called before in this worker: a job runs one train function")
