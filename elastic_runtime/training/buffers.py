"""Buffers (BatchNorm's statistics and counters): saved at step start, put back, and carried by a float32 sum.

A sum over ranks in which only rank 0 is not zero gives rank 0's value exactly. Floats of up to 32 bits travel as they
are; every other dtype of up to 64 bits as its bits, in three limbs of 22 bits, which float32 holds exactly. So small
buffers ride in the gradients' last bucket and are bit for bit equal on all ranks after every commit.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

__all__ = ["LARGE", "Buffers"]

LARGE = 65_536
"""Elements from which a buffer is large: broadcast and saved only when its version says that it was written."""
_LIMB = 22
_MASK = (1 << _LIMB) - 1
_LIMBS = 3
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Buffers:
    """The non-parameter buffers of some modules, in one order on all ranks."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        seen: set[int] = set()
        self._places: list[tuple[nn.Module, str]] = []
        self._large: list[tuple[nn.Module, str]] = []
        for module in modules:
            for owner in module.modules():
                for name, buffer in owner._buffers.items():
                    if buffer is None or id(buffer) in seen:
                        continue
                    seen.add(id(buffer))
                    (self._large if buffer.numel() > LARGE else self._places).append((owner, name))
        self._saved: list[torch.Tensor] = []
        self._saved_large: list[torch.Tensor] = []
        self._saved_versions: list[tuple[int, int]] = []
        self._sent_versions: list[tuple[int, int]] = []
        now = self.tensors()
        self._plain = [place for place, one in enumerate(now) if one.dtype in _FLOATS]
        self._bits = [place for place, one in enumerate(now) if one.dtype not in _FLOATS]
        self._plain_size = sum(now[place].numel() for place in self._plain)
        self._bits_size = sum(_words(now[place]) for place in self._bits)

    def tensors(self) -> list[torch.Tensor]:
        """Return the small buffers as they are now."""
        return [owner._buffers[name] for owner, name in self._places]  # type: ignore[misc]

    def large(self) -> list[torch.Tensor]:
        """Return the large buffers as they are now."""
        return [owner._buffers[name] for owner, name in self._large]  # type: ignore[misc]

    @property
    def size(self) -> int:
        """Float32 numbers that `write` needs."""
        return self._plain_size + _LIMBS * self._bits_size

    def save(self) -> None:
        """Remember all values: the state that an abandoned step goes back to."""
        now = self.tensors()
        if len(self._saved) != len(now) or any(
            old.shape != new.shape or old.dtype != new.dtype
            for old, new in zip(self._saved, now, strict=True)
        ):
            self._saved = [buffer.detach().clone() for buffer in now]
        elif now:
            with torch.no_grad():
                torch._foreach_copy_(self._saved, now)
        versions = _versions(self.large())
        if versions != self._saved_versions:
            self._saved_large = [buffer.detach().clone() for buffer in self.large()]
            self._saved_versions = versions

    def restore(self) -> None:
        """Put back what `save` remembered."""
        for places, saved in ((self._places, self._saved), (self._large, self._saved_large)):
            for (owner, name), value in zip(places, saved, strict=False):
                current = owner._buffers[name]
                if current is None or current.shape != value.shape or current.dtype != value.dtype:
                    owner._buffers[name] = value.clone()
                else:
                    with torch.no_grad():
                        current.copy_(value)
        self._saved_versions = []

    def write(self, target: torch.Tensor) -> None:
        """Write all small buffers into `target`, float32 of `size` elements."""
        now = self.tensors()
        if self._plain:
            plain = [now[place].detach().reshape(-1).float() for place in self._plain]
            target[: self._plain_size].copy_(torch.cat(plain))
        if self._bits:
            words = torch.cat([_to_words(now[place].detach()) for place in self._bits]).to(target.device)
            limbs = torch.stack([(words >> (_LIMB * limb)) & _MASK for limb in range(_LIMBS)])
            target[self._plain_size :].copy_(limbs.reshape(-1))

    @torch.no_grad()
    def read(self, source: torch.Tensor) -> None:
        """Set all small buffers from what `write` wrote."""
        now = self.tensors()
        at = 0
        for place in self._plain:
            buffer = now[place]
            buffer.copy_(source[at : at + buffer.numel()].view(buffer.shape))
            at += buffer.numel()
        if not self._bits:
            return
        limbs = source[self._plain_size :].reshape(_LIMBS, self._bits_size).to(torch.int64)
        words = limbs[0] | (limbs[1] << _LIMB) | (limbs[2] << (2 * _LIMB))
        at = 0
        for place in self._bits:
            buffer = now[place]
            count = _words(buffer)
            buffer.copy_(_from_words(words[at : at + count], buffer))
            at += count

    def large_written(self) -> bool:
        """Whether a large buffer was written since this was last asked."""
        versions = _versions(self.large())
        written = versions != self._sent_versions
        self._sent_versions = versions
        return written


def _versions(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor._version) for tensor in tensors]


def _words(buffer: torch.Tensor) -> int:
    return buffer.numel() * (2 if buffer.dtype == torch.complex128 else 1)


def _to_words(buffer: torch.Tensor) -> torch.Tensor:
    flat = buffer.reshape(-1)
    if flat.dtype in (torch.float64, torch.complex64, torch.complex128):
        return flat.contiguous().view(torch.int64)
    return flat.to(torch.int64)


def _from_words(words: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if like.dtype in (torch.float64, torch.complex64, torch.complex128):
        return words.contiguous().view(like.dtype).view(like.shape)
    return words.to(like.dtype).view(like.shape)
