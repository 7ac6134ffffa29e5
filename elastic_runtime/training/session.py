"""One worker through all its rounds: its place, its process group, what it holds, and what becomes of a broken step."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastic_runtime.errors import InputError, JobFailed
from elastic_runtime.training.buffers import Buffers
from elastic_runtime.training.channel import AgentLink, RoundChanged
from elastic_runtime.training.codec import pack, unpack
from elastic_runtime.training.group import RoundGroup, is_broken_collective
from elastic_runtime.training.place import Place, seed_everything
from elastic_runtime.training.reduction import Reducer
from elastic_runtime.training.state import Attached, Position
from elastic_runtime.training.step import Step
from elastic_runtime.training.sync import Standing, agree, broadcast_state
from elastic_runtime.worker import checkpoint, progress

__all__ = ["Session"]

_logger = logging.getLogger(__name__)
_PATIENCE = 10.0
"""Seconds that the agent has to explain a broken collective; without an explanation the error is the script's."""
_EXPLANATION = 2.0
"""Seconds that the agent has to explain a group that could not be made."""
_JOINS = 3
"""Groups in a row that may fail for no reason that the agent knows."""
_CHECKPOINT_LEAST = 10.0
_CHECKPOINT_SHARE = 30
"""A checkpoint is due after this many times the seconds that the last one took: about 3 % of the time."""


class Session:
    """What outlives a `train()` call."""

    def __init__(self, *, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.device = device
        self.group = RoundGroup(device)
        self.link = AgentLink.from_environment(self.group.interrupt)
        self.place = Place.from_environment(joined=self.link is None)
        self.position = Position()
        self.remembered: dict[str, Any] = {}
        """Values of `job.once`."""
        self.loaders: dict[int, Any] = {}
        """Loader workers by the number of the `steps()` call that they serve."""
        self.calls = 0
        """`steps()` calls of this `train()` call."""
        self.current: Step | None = None
        """The step that has begun and is not committed."""
        self.reducer = Reducer([], Buffers([]), world=1, group=self.group)
        self._buffers = Buffers([])
        self._held: Attached | None = None
        self._fresh = True
        self._torn = False
        self._lineage = -1
        self._in_round = False
        self._in_step = False
        self._stop = False
        self._stepped = False
        self._schedules: list[int] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._saved_at = time.monotonic()
        self._saving_took = 0.0

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The attached GradScaler."""
        return self._held.scaler if self._held else None

    def change_pending(self) -> bool:
        """Whether the agent wants the round to end."""
        return self.link is not None and self.link.pending()

    def check(self) -> None:
        """Raise `RoundChanged` if the round is over: called wherever a step may be left."""
        if self.link is not None and self.link.urgent():
            raise RoundChanged(f"round {self.place.round} ended")

    # ------------------------------------------------------------------------------------------------ rounds

    def attach(self, named: Mapping[str, Any]) -> Attached:
        """Take objects in: join the round if there is none yet, and bring their state in step. Collective."""
        if self._in_step:
            raise InputError(
                "attach: called twice, or after steps(): attach everything in one call, before the steps"
            )
        attached = Attached(named, self.device)
        if self._held is not None:
            attached.check_names(list(self._held.objects), "the one before")
        self._bring_in_step(attached)
        return attached

    def need_peers(self) -> None:
        """Join the round for a script that attaches nothing. Collective."""
        if not self._in_step:
            self._bring_in_step(self._held or Attached({}, self.device))

    def begin_call(self) -> None:
        """`train()` is about to be called (again): a worker that knows the job joins its next round at once."""
        self.calls = 0
        self._in_step = False
        if not self._fresh:
            self._enter()

    def finish(self) -> None:
        """`train()` returned: wait until all ranks are done. Raises `RoundChanged` if a round comes before that."""
        if self.link is None:
            return
        self.need_peers()
        self.link.finish(self.position.step)

    def explains(self, error: BaseException) -> bool:
        """Whether `error` is what a lost peer looks like: the agent says so, or does within ten seconds."""
        if self.link is None or not self._in_round or not is_broken_collective(error):
            return False
        # Peers that wait for this rank are set free at once, before anybody has told them.
        self.group.interrupt()
        return self.link.wait_for_change(_PATIENCE)

    def settle(self) -> None:
        """Come out of a broken round: put back what the abandoned step touched, destroy the group."""
        step, self.current = self.current, None
        self._stop = False
        if step is not None:
            self.group.interrupt()
            if not self.reducer.abandon():
                self._make_reducer()
            if self._state_moved(step):
                self._torn = True
                _logger.warning("state torn: step=%d rank=%d", step.index, self.place.rank)
            else:
                self._buffers.restore()
        self.leave_round()

    def leave_round(self) -> None:
        """Destroy the group of the round, if there is one."""
        if self.link is not None:
            self.link.settled()
        self._in_round = False
        self.group.destroy()

    def close(self) -> None:
        """End loader workers, hooks and the group."""
        for loader in self.loaders.values():
            loader.close()
        self.loaders.clear()
        self.reducer.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.leave_round()

    def _enter(self) -> None:
        tries = _JOINS
        while self.link is not None:
            self.leave_round()
            go = self.link.ask(
                step=self.position.step, round_=self.place.round, torn=self._torn, fresh=self._fresh
            )
            self.place = Place.of(go)
            try:
                self.group.make(go)
            except RuntimeError:
                self.group.interrupt()
                if not self.link.wait_for_change(_EXPLANATION):
                    # Nobody died: the round's store did, perhaps. Ready again, the round is formed anew elsewhere.
                    tries -= 1
                    if not tries:
                        raise
                continue
            self._in_round = True
            return
        if "MASTER_ADDR" in os.environ and not dist.is_initialized():
            self.group.make_from_environment()
        self._in_round = True

    def _bring_in_step(self, attached: Attached) -> None:
        while True:
            try:
                if not self._in_round:
                    self._enter()
                self._synchronise(attached)
                break
            except RoundChanged:
                if not self._fresh:
                    raise
            except RuntimeError as error:
                # A fresh worker has nothing to lose and its script has been told nothing: it tries the next round
                # here. A survivor's script knows its rank by now: run() calls it again.
                if not self._fresh or not self.explains(error):
                    raise
            self.leave_round()
        self._in_step = True
        seed_everything(self.seed, rank=self.place.rank, moment=self.position.step + 1)
        if self.link is not None:
            self.link.send({"kind": "joined", "round": self.place.round})

    def _synchronise(self, attached: Attached) -> None:
        self.check()
        world, rank = self.place.world_size, self.place.rank
        own = Standing(self.position.step, self.position.digest(), self._fresh, self._torn, self._lineage)
        source = agree(own, source=self.place.source, world=world)
        given: Any = None
        restored = False
        if source is not None:
            if rank == source:
                given, restored = self._give(attached)
            if world > 1:
                given = broadcast_state(given, source=source, rank=rank, device=self.device)
            restored = restored or bool(given["restored"])
        if source is not None and (rank != source or restored):
            attached.check_names(list(given["state"]), f"rank {source} or the checkpoint")
            attached.load(given["state"])
            self.position = Position.of(given["position"])
            self._lineage = int(given.get("lineage", -1))  # Not in a checkpoint of an older version.
        elif self._held is not None and not attached.same_objects(self._held):
            attached.load(self._held.state())
        self._hold(attached)

    def _give(self, attached: Attached) -> tuple[dict[str, Any], bool]:
        if self.place.source < 0:
            found = checkpoint.load(_checkpoint_dir())
            if found is not None:
                stored, step = found
                _logger.info("resumed from a checkpoint: step=%d", step)
                state = unpack(stored["text"], stored["tensors"])
                return {**state, "restored": True}, True
            if self._torn:
                raise JobFailed(
                    f"every worker was lost in the middle of step {self.position.step} and there is no checkpoint: "
                    "the job has no whole state left"
                )
        return {**self._payload(self._held or attached), "restored": False}, False

    def _payload(self, attached: Attached) -> dict[str, Any]:
        return {"position": self.position.text(), "lineage": self._lineage, "state": attached.state()}

    def _hold(self, attached: Attached) -> None:
        same = self._held is not None and attached.same_objects(self._held)
        self._held, self._fresh, self._torn = attached, False, False
        if not same:
            for hook in self._hooks:
                hook.remove()
            self._hooks = [
                optimizer.register_step_post_hook(self._note_step)
                for optimizer in attached.optimizers.values()
            ]
            self._buffers = Buffers(attached.modules.values())
        if not same or not self.reducer.fits(attached.parameters, self.place.world_size):
            self._make_reducer()

    def _make_reducer(self) -> None:
        self.reducer.close()
        parameters = self._held.parameters if self._held else []
        self.reducer = Reducer(parameters, self._buffers, world=self.place.world_size, group=self.group)

    def _note_step(self, *_arguments: Any) -> None:
        self._stepped = True

    # ------------------------------------------------------------------------------------------------- steps

    def begin_steps(self) -> int | None:
        """The next `steps()` call of this `train()` call: return its committed steps; None if it was left for good."""
        segments = self.position.segments
        for earlier in segments[: self.calls]:
            earlier[1] = 1  # the script has gone on, so whatever is left of them is not wanted
        self.calls += 1
        if len(segments) < self.calls:
            segments.append([0, 0])
        done, left = segments[self.calls - 1]
        return None if left else done

    def private_sockets(self) -> frozenset[int]:
        """Inodes of the sockets that a helper process must not keep open."""
        if self.link is None:
            return self.group.sockets
        return self.group.sockets | {os.fstat(self.link.fileno()).st_ino}

    def begin_step(self, step: Step) -> None:
        """A step starts: remember what has to be put back if it is abandoned."""
        if self._stop:
            raise RoundChanged(f"round {self.place.round} ends by agreement")
        self.check()
        held = self._held
        assert held is not None
        if not self.reducer.fits(held.parameters, self.place.world_size):
            self._make_reducer()  # something was frozen or unfrozen: by the same script at the same step everywhere
        self.reducer.begin(world=self.place.world_size)
        if self.link is not None:
            self._buffers.save()
            self._stepped = False
            self._schedules = [scheduler.last_epoch for scheduler in held.schedulers]
        self.current = step

    def committed(self, step: Step) -> None:
        """A step counts: move the position, report it, save a checkpoint if one is due."""
        self.current = None
        self._stop = step.stop
        self._lineage = self.place.round
        self.position.step += 1
        self.position.samples += step.samples
        self.position.segments[self.calls - 1][0] += 1
        self.report({"loss": step.loss, "samples": self.position.samples, **step.figures}, fault=True)

    def report(self, figures: Mapping[str, float], *, fault: bool) -> None:
        """Write a line of metrics as the present rank 0; with `fault`, planned faults act."""
        place = self.place
        progress.report(
            rank=place.rank,
            world_size=place.world_size,
            round_=place.round,
            step=self.position.step,
            figures=figures,
            fault=fault,
        )

    def leave_if_over(self) -> None:
        """After a commit: raise `RoundChanged` if the round is over, or all ranks agreed that it ends here."""
        if self._stop:
            raise RoundChanged(f"round {self.place.round} ends after step {self.position.step} by agreement")
        self.check()

    def save_if_due(self, every: float | None) -> None:
        """Save a checkpoint on rank 0 if the last is `every` seconds old (None: at a cost of about 3 %; 0: never)."""
        folder = _checkpoint_dir()
        if folder is None or self.place.rank or every == 0 or self._held is None:
            return
        due = max(_CHECKPOINT_LEAST, _CHECKPOINT_SHARE * self._saving_took) if every is None else every
        begin = time.monotonic()
        if begin - self._saved_at < due:
            return
        text, tensors = pack(self._payload(self._held))
        try:
            checkpoint.save(folder, {"text": text, "tensors": tensors}, step=self.position.step)
        except OSError as error:
            _logger.warning("checkpoint not saved: step=%d reason=%s", self.position.step, error)
        self._saved_at = time.monotonic()
        self._saving_took = self._saved_at - begin

    def _state_moved(self, step: Step) -> bool:
        if self._stepped:
            return True
        held = self._held
        if held is None or not step.reduced:
            return False
        schedules = [scheduler.last_epoch for scheduler in held.schedulers]
        return held.has_other_state or schedules != self._schedules


def _checkpoint_dir() -> Path | None:
    folder = os.environ.get("ELASTIC_CHECKPOINT_DIR")
    return Path(folder) if folder else None
