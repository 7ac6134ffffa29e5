"""What `train` is given: its place, its steps, and what to report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from elastic_runtime.errors import InputError
from elastic_runtime.training.data import Plan, micro_batches, share
from elastic_runtime.training.loading import InlineLoader, Loader, WorkerLoader, to_device
from elastic_runtime.training.session import Session
from elastic_runtime.training.step import Step

__all__ = ["Job"]

T = TypeVar("T")
_OWN_FIGURES = frozenset(["round", "step", "time", "world_size"])


class Job:
    """The job as one worker sees it. Made by `elastic.run`, a new one for every `train()` call."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._epoch = 0
        self._phases: list[str] = []

    @property
    def rank(self) -> int:
        """Number of this worker in the round, from 0. A new worker has a provisional one until `attach`."""
        return self._session.place.rank

    @property
    def local_rank(self) -> int:
        """Number of this worker on its node, from 0."""
        return self._session.place.local_rank

    @property
    def world_size(self) -> int:
        """Workers of the round. Provisional in a new worker until `attach`."""
        return self._session.place.world_size

    @property
    def device(self) -> torch.device:
        """Where modules and batches are: the GPU of this worker's local rank, else the CPU."""
        return self._session.device

    @property
    def epoch(self) -> int:
        """Epoch of the present step in its `steps()` call, from 0."""
        return self._epoch

    @property
    def global_step(self) -> int:
        """Committed steps of the job, through all rounds. It does not change inside a step's body."""
        return self._session.position.step

    @property
    def output_dir(self) -> Path:
        """Folder for the model (`ELASTIC_OUTPUT_DIR`, else ./output)."""
        return Path(os.environ.get("ELASTIC_OUTPUT_DIR", "output"))

    def attach(self, **named: Any) -> Any:
        """Hand the job its state: modules, optimizers, schedulers, a GradScaler, anything with a state_dict.

        Call it once in every `train()` call, before the steps, with the same names on every worker. It moves modules to
        `job.device`; joins the round; puts the job's state into the objects (the same objects as before keep it, new
        ones get it; a new worker gets it from another one; a job that starts again, from its newest checkpoint); and
        returns the module to call, wrapped as DistributedDataParallel: a tuple in the order given if there are several,
        an empty one without any. Random numbers are seeded from the job's seed, the rank and the step.

        Raises `InputError` that names the object and the fix.
        """
        wrapped = self._session.attach(named).wrapped
        return wrapped[0] if len(wrapped) == 1 else wrapped

    def steps(
        self,
        dataset: Any,
        *,
        global_batch: int,
        epochs: int,
        micro_batch: int | None = None,
        drop_last: bool = False,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        weights: Any = None,
        checkpoint_every: float | None = None,
    ) -> Iterator[Step]:
        """Give the steps that are left of `epochs` passes over a map-style `dataset`.

        `global_batch`: samples of a step over all workers, whatever their number. `micro_batch`: samples that this
        worker takes at once; None takes its whole share. `weights`: relative frequency of each sample, drawn with
        replacement. `num_workers` loader processes stay through changes if `dataset` is the same object in every
        `train()` call. `checkpoint_every`: seconds between checkpoints; None costs about 3 % of the time, 0 saves none.

        Gradients belong to a step: those that lie about when it starts are dropped (to accumulate, use `micro_batch`).
        Several calls one after another continue where the job is. Raises `InputError` that names the parameter.
        """
        session = self._session
        plan = Plan.of(
            dataset,
            global_batch=global_batch,
            epochs=epochs,
            drop_last=drop_last,
            shuffle=shuffle,
            seed=session.seed,
            weights=weights,
        )
        for name, value, least in (("micro_batch", micro_batch, 1), ("num_workers", num_workers, 0)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise InputError(f"{name}={value!r} must be a whole number of at least {least}")
        if checkpoint_every is not None and not checkpoint_every >= 0:
            raise InputError(f"checkpoint_every={checkpoint_every!r} must be at least 0 seconds")

        def loader(call: int) -> Loader:
            if not num_workers:
                return InlineLoader(dataset, collate_fn)
            key = (id(dataset), id(collate_fn), num_workers, pin_memory)
            known = session.loaders.get(call)
            if known is not None and known.key == key:
                return known  # type: ignore[no-any-return]
            if known is not None:
                known.close()
            made = WorkerLoader(
                dataset,
                collate_fn,
                workers=num_workers,
                pin_memory=pin_memory,
                private=session.private_sockets(),
                key=key,
            )
            session.loaders[call] = made
            return made

        return self._steps(plan, micro_batch, loader, checkpoint_every)

    def log(self, **scalars: float) -> None:
        """Add figures to the line of metrics that rank 0 writes when the step commits (it has `loss` and `samples`
        anyway); outside a step, write them as a line of their own. Call it on every rank.

        Raises `InputError` for a figure called step, time, round or world_size, which every line has.
        """
        taken = _OWN_FIGURES.intersection(scalars)
        if taken:
            raise InputError(f"job.log: {min(taken)!r} is a name of its own: give your figure another one")
        figures = {name: float(value) for name, value in scalars.items()}
        if self._session.current is not None:
            self._session.current.figures.update(figures)
        else:
            self._session.report(figures, fault=False)

    def once(self, key: str, fn: Callable[[], T]) -> T:
        """Return `fn()`, called the first time in this process; later, in every `train()` call, the same value.

        For what must outlive a change, whose `train()` call loses its locals: a logger, an open file, a dataset. Each
        worker process has its own.
        """
        values = self._session.remembered
        if key not in values:
            values[key] = fn()
        return values[key]  # type: ignore[no-any-return]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name a time without steps (evaluation, compiling), so that it is not taken for a hang. May be nested."""
        self._phases.append(name)
        self._tell_phase()
        try:
            yield
        finally:
            self._phases.pop()
            self._tell_phase()

    def _tell_phase(self) -> None:
        if self._session.link is not None:
            self._session.link.send({"kind": "phase", "name": self._phases[-1] if self._phases else None})

    def _steps(
        self, plan: Plan, micro_batch: int | None, loader: Callable[[int], Loader], every: float | None
    ) -> Iterator[Step]:
        session = self._session
        session.need_peers()
        done = session.begin_steps()
        if done is None or done >= plan.total:
            return
        place = session.place
        source = loader(session.calls)
        source.aim(
            part
            for parts in plan.shares(done, rank=place.rank, world=place.world_size, micro_batch=micro_batch)
            for part in parts
        )
        base = session.position.step - done
        for number in range(done, plan.total):
            self._epoch = plan.epoch(number)
            own = share(plan.whole(number), rank=place.rank, world=place.world_size)
            step = Step(
                session,
                index=base + number,
                epoch=self._epoch,
                samples=plan.size(number),
                sizes=[len(part) for part in micro_batches(own, micro_batch)],
                fetch=lambda: to_device(source.next(), session.device),
            )
            session.begin_step(step)
            yield step
            step.commit()
            session.save_if_due(every)
            session.leave_if_over()
