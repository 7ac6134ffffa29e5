"""What a script attached, by name, and how far the job has come: the state that rounds hand on."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from elastic_runtime.errors import InputError
from elastic_runtime.training.module import ElasticDataParallel

__all__ = ["Attached", "Position"]


@dataclass
class Position:
    """How far the job has come: committed steps, samples, and the steps of each `job.steps()` call in turn."""

    step: int = 0
    """Committed steps of the whole job."""
    samples: int = 0
    """Samples of these steps."""
    segments: list[list[int]] = field(default_factory=list)
    """For each `steps()` call: [its committed steps, whether it was left early for good]."""

    def text(self) -> str:
        """Return it as JSON."""
        return json.dumps([self.step, self.samples, self.segments])

    @classmethod
    def of(cls, text: str) -> Position:
        """Return what `text()` was made of."""
        step, samples, segments = json.loads(text)
        return cls(step, samples, segments)

    def digest(self) -> int:
        """Return a number of 62 bits that differs where the position does."""
        return int.from_bytes(hashlib.sha256(self.text().encode()).digest()[:8], "big") >> 2


class Attached:
    """The objects of one `attach` call, by name: modules, optimizers and all else that has a state_dict."""

    def __init__(self, named: Mapping[str, Any], device: torch.device) -> None:
        """Check the objects and move modules to `device`. Raises `InputError` that names what cannot be attached."""
        self.objects: dict[str, Any] = {name: _checked(name, value) for name, value in named.items()}
        self.modules = {name: one for name, one in self.objects.items() if isinstance(one, nn.Module)}
        self.optimizers = {name: one for name, one in self.objects.items() if isinstance(one, Optimizer)}
        self.schedulers = [
            one for one in self.objects.values() if isinstance(one, torch.optim.lr_scheduler.LRScheduler)
        ]
        scalers = [one for one in self.objects.values() if isinstance(one, torch.amp.GradScaler)]
        if len(scalers) > 1:
            raise InputError(
                f"attach: {len(scalers)} GradScalers given: attach one, step.backward scales by it"
            )
        self.scaler: torch.amp.GradScaler | None = scalers[0] if scalers else None
        for module in self.modules.values():
            module.to(device)
        for optimizer in self.optimizers.values():
            _move_state(optimizer)
        self.parameters = self._parameters()
        self.wrapped = tuple(ElasticDataParallel(module) for module in self.modules.values())
        self._warn_of_strangers()

    @property
    def has_other_state(self) -> bool:
        """Whether something is attached of which nobody can say whether it changed."""
        known = len(self.modules) + len(self.optimizers) + len(self.schedulers)
        return len(self.objects) > known

    def same_objects(self, other: Attached) -> bool:
        """Whether `other` holds the very same objects under the same names."""
        return self.objects.keys() == other.objects.keys() and all(
            self.objects[name] is other.objects[name] for name in self.objects
        )

    def check_names(self, names: list[str], whose: str) -> None:
        """Raise `InputError` unless `names`, which `whose` attached, are those of this object."""
        missing = sorted(set(names) ^ set(self.objects))
        if missing:
            raise InputError(
                f"attach: {missing[0]!r} is attached by only one of this train() call and {whose}: "
                "attach the same names in every call on every worker"
            )

    def state(self) -> dict[str, Any]:
        """Return the state_dict of every object, by name; the tensors are not copied."""
        return {name: one.state_dict() for name, one in self.objects.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned. Raises `InputError` that names the object it does not fit."""
        for name, one in self.objects.items():
            try:
                one.load_state_dict(state[name])
            except (RuntimeError, ValueError, KeyError) as error:
                raise InputError(
                    f"attach: the job's state of {name!r} does not fit the object that is attached now: {error}; "
                    "build the same thing in every train() call"
                ) from error

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        seen: set[int] = set()
        found = []
        for name, module in self.modules.items():
            for path, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    found.append((f"{name}.{path}", parameter))
        return found

    def _warn_of_strangers(self) -> None:
        own = {id(parameter) for _, parameter in self.parameters}
        for name, optimizer in self.optimizers.items():
            strangers = sum(id(one) not in own for group in optimizer.param_groups for one in group["params"])
            if strangers:
                warnings.warn(
                    f"attach: {strangers} parameters of {name!r} belong to no attached module: they are neither summed "
                    "over the workers nor handed to a new one; attach their module too",
                    stacklevel=5,
                )


def _checked(name: str, value: Any) -> Any:
    if isinstance(value, ElasticDataParallel):
        return value.module
    if isinstance(value, DistributedDataParallel | DataParallel):
        raise InputError(
            f"attach: {name!r} is a {type(value).__name__}: attach the bare module, attach returns the wrapped one"
        )
    if isinstance(value, nn.Module):
        for path, part in value.named_modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
                raise InputError(
                    f"attach: {name}.{path} has sparse=True: only dense gradients are summed over workers; "
                    "make it with sparse=False"
                )
        return value
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return value
    raise InputError(
        f"attach: {name}={value!r:.80} is a {type(value).__name__} without state_dict and load_state_dict: attach "
        "modules, optimizers, schedulers, or give the class these two methods"
    )


def _move_state(optimizer: Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if key != "step" and isinstance(value, torch.Tensor) and value.device != parameter.device:
                state[key] = value.to(parameter.device)
