from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic_runtime.errors import InputError
from elastic_runtime.training.buffers import LARGE, Buffers
from elastic_runtime.training.codec import pack, unpack


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, 2: [None, True, 0.1, float("inf"), "ä"], (1, 2): b"\0\xff"},
        OrderedDict([("z", 1), ("a", 2)]),
        Counter({3: 2, 7: 1}),
        {"betas": (0.9, 0.999), "seen": {1, 2}},
        np.float64(0.5),
    ],
)  # fmt: skip
def test_values_come_back_as_they_were(value: Any) -> None:
    text, tensors = pack(value)
    found = unpack(text, tensors)
    assert found == value
    assert type(found) is type(value) or isinstance(value, np.generic)


def test_optimizer_and_scheduler_states_come_back() -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3])
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    text, tensors = pack({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()})
    found = unpack(text, [tensor.clone() for tensor in tensors])
    other = torch.optim.AdamW(nn.Linear(3, 2).parameters())
    again = torch.optim.lr_scheduler.MultiStepLR(other, [9])
    other.load_state_dict(found["optimizer"])
    again.load_state_dict(found["scheduler"])
    assert again.milestones == Counter([1, 1, 3])
    for old, new in zip(optimizer.state.values(), other.state.values(), strict=True):
        for key in old:
            assert torch.equal(old[key], new[key])


def test_what_cannot_pass_is_named() -> None:
    with pytest.raises(InputError, match=r"state\['a'\]\[1\]=.* is a object"):
        pack({"a": [1, object()]})


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("short", torch.tensor([1.5, -2.25], dtype=torch.bfloat16))
        self.register_buffer("precise", torch.tensor([[1e-300, float("nan")]], dtype=torch.float64))
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("none", None)
        self.register_buffer("big", torch.zeros(LARGE + 1), persistent=False)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5))
def test_a_float32_sum_carries_integers_exactly(values: list[int]) -> None:
    module = nn.Module()
    module.register_buffer("numbers", torch.tensor(values))
    buffers = Buffers([module])
    segment = torch.empty(buffers.size)
    buffers.write(segment)
    module.numbers.zero_()
    buffers.read(segment + torch.zeros_like(segment))
    assert module.numbers.tolist() == values


def test_every_kind_of_buffer_is_carried_bit_for_bit() -> None:
    module = Odd()
    module.norm(torch.randn(4, 5))
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    buffers = Buffers([module])
    segment = torch.empty(buffers.size)
    buffers.write(segment)
    for buffer in buffers.tensors():
        buffer.zero_()
    buffers.read(segment)
    for name, value in module.state_dict().items():
        assert torch.equal(value.nan_to_num(7), expected[name].nan_to_num(7)), name


def test_an_abandoned_step_is_taken_back() -> None:
    module = Odd()
    buffers = Buffers([module])
    for _ in range(2):
        module.norm(torch.randn(4, 5))
        module.big.add_(1)
        buffers.save()
    expected = {name: value.clone() for name, value in [*module.state_dict().items(), ("big", module.big)]}
    module.norm(torch.randn(4, 5))
    module.big.add_(1)
    module.short = module.short * 2  # replaced, not written
    buffers.restore()
    for name, value in [*module.state_dict().items(), ("big", module.big)]:
        assert torch.equal(value.nan_to_num(7), expected[name].nan_to_num(7)), name
    assert int(module.norm.num_batches_tracked) == 2


def test_large_buffers_are_sent_only_when_written() -> None:
    module = Odd()
    buffers = Buffers([module])
    buffers.large_written()
    assert not buffers.large_written()
    module.big.add_(1)
    assert buffers.large_written()
