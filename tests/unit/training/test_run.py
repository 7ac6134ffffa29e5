from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import elastic_runtime as elastic
from elastic_runtime.errors import InputError


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "MASTER_ADDR",
        "RANK",
        "WORLD_SIZE",
        "ELASTIC_CHANNEL",
        "ELASTIC_CHECKPOINT_DIR",
        "ELASTIC_SEED",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def data(samples: int = 10) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(samples, 3, generator=generator), torch.randn(samples, 1, generator=generator)
    )


def test_gradient_and_loss_are_those_of_the_global_batch() -> None:
    net = nn.Linear(3, 1)
    dataset = data()
    checked = []

    def train(job: elastic.Job) -> None:
        model = job.attach(net=net)
        for step in job.steps(dataset, global_batch=4, epochs=2, micro_batch=3, shuffle=False):
            for x, y in step:
                step.backward((model(x) - y).square().mean())
            first = step.index % 3 * 4
            x, y = dataset.tensors[0][first : first + 4], dataset.tensors[1][first : first + 4]
            whole = (net(x) - y).square().mean()
            (expected,) = torch.autograd.grad(whole, [net.weight])
            torch.testing.assert_close(net.weight.grad, expected)
            assert step.loss == pytest.approx(whole.item(), rel=1e-5)
            checked.append(job.global_step)

    elastic.run(train)
    assert checked == list(range(6))


def test_weights_that_do_not_add_up_are_divided_by() -> None:
    net = nn.Linear(3, 1, bias=False)

    def train(job: elastic.Job) -> None:
        model = job.attach(net=net)
        for step in job.steps(data(4), global_batch=4, epochs=1, micro_batch=2, shuffle=False):
            losses = []
            for weight, (x, _) in zip((1.0, 7.0), step, strict=True):
                loss = model(x).mean()
                losses.append((loss, weight))
                step.backward(loss, weight=weight)
            x = data(4).tensors[0]
            torch.testing.assert_close(net.weight.grad, (x[:2].mean(0) * 1 + x[2:].mean(0) * 7)[None] / 8)
            assert step.loss == pytest.approx(sum(value.item() * w for value, w in losses) / 8)

    elastic.run(train)


def test_what_commits_and_what_does_not() -> None:
    seen: list[Any] = []

    def train(job: elastic.Job) -> None:
        job.attach(net=nn.Linear(3, 1))
        for step in job.steps(data(), global_batch=5, epochs=5):
            for _ in step:
                pass
            if step.index == 1:
                continue
            if step.index == 3:
                break
        seen.append(job.global_step)
        for step in job.steps(data(), global_batch=10, epochs=3):
            for _ in step:
                pass
            seen.append((step.index, step.epoch, job.global_step, job.epoch))
            if step.epoch == 1:
                step.commit()
                seen.append(job.global_step)
                return

    elastic.run(train)
    assert seen == [3, (3, 0, 3, 0), (4, 1, 4, 1), 5]


def test_reports_one_line_a_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from elastic_runtime.worker import progress

    monkeypatch.setenv("ELASTIC_JOB_DIR", str(tmp_path))
    progress._metrics.cache_clear()

    def train(job: elastic.Job) -> None:
        model = job.attach(net=nn.Linear(3, 1))
        for step in job.steps(data(), global_batch=4, epochs=1):
            for x, _ in step:
                step.backward(model(x).mean())
            job.log(lr=0.5)
        with pytest.raises(InputError, match="'time' is a name of its own"):
            job.log(time=1.0)

    try:
        elastic.run(train)
    finally:
        progress._metrics.cache_clear()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(one["step"], one["samples"], one["lr"], one["world_size"]) for one in lines] == [
        (1, 4, 0.5, 1), (2, 8, 0.5, 1), (3, 10, 0.5, 1),
    ]  # fmt: skip


def test_resumes_from_its_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ELASTIC_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    steps: list[int] = []
    weights: list[torch.Tensor] = []

    def train(job: elastic.Job) -> None:
        net = nn.Linear(3, 1)
        optimizer = torch.optim.Adam(net.parameters())
        model = job.attach(net=net, optimizer=optimizer)
        if steps:
            torch.testing.assert_close(net.weight, weights[2], rtol=0, atol=0)
            assert optimizer.state_dict()["state"][0]["step"] == 3
        for step in job.steps(data(), global_batch=2, epochs=1, checkpoint_every=1e-9):
            for x, _ in step:
                step.backward(model(x).mean())
            optimizer.step()
            steps.append(step.index)
            weights.append(net.weight.detach().clone())
            if steps == [0, 1, 2, 3]:
                raise KeyError("after step 3, before its commit")

    with pytest.raises(KeyError):
        elastic.run(train)
    elastic.run(train)
    assert steps == [0, 1, 2, 3, 3, 4]


def test_the_wrapped_module_is_ddp_to_tools() -> None:
    def train(job: elastic.Job) -> None:
        first, second = job.attach(a=nn.Linear(2, 2), b=nn.BatchNorm1d(2))
        assert isinstance(first, DistributedDataParallel)
        assert isinstance(first.module, nn.Linear)
        assert list(second.state_dict()) == [f"module.{name}" for name in nn.BatchNorm1d(2).state_dict()]
        with second.no_sync():
            second(first(torch.ones(2, 2)))
        for name in ("join", "register_comm_hook", "scatter", "gather"):
            arguments = () if name == "join" else (None, None)
            if name == "scatter":
                arguments = (None, None, None)
            with pytest.raises(InputError, match=name):
                getattr(first, name)(*arguments)

    elastic.run(train)


def test_a_scaler_scales_gradients_and_not_the_loss() -> None:
    net = nn.Linear(3, 1)

    def train(job: elastic.Job) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        model = job.attach(net=net, optimizer=optimizer, scaler=scaler)
        for step in job.steps(data(4), global_batch=4, epochs=1):
            for x, _ in step:
                loss = model(x).mean()
                step.backward(loss)
            assert step.loss == pytest.approx(loss.item())
            before = net.weight.detach().clone()
            torch.testing.assert_close(net.weight.grad, data(4).tensors[0].mean(0, keepdim=True) * 1024)
            scaler.step(optimizer)
            scaler.update()
            torch.testing.assert_close(net.weight, before - 0.1 * data(4).tensors[0].mean(0, keepdim=True))

    elastic.run(train)


def misuse_left_early(job: elastic.Job) -> None:
    job.attach(net=nn.Linear(3, 1))
    for step in job.steps(data(), global_batch=4, epochs=1, micro_batch=1):
        for _ in step:
            break


def misuse_plain_backward(job: elastic.Job) -> None:
    model = job.attach(net=nn.Linear(3, 1))
    for step in job.steps(data(), global_batch=4, epochs=1):
        for x, _ in step:
            model(x).mean().backward()


def misuse_vector_loss(job: elastic.Job) -> None:
    model = job.attach(net=nn.Linear(3, 1))
    for step in job.steps(data(), global_batch=4, epochs=1):
        for x, _ in step:
            step.backward(model(x))


def misuse_early_loss(job: elastic.Job) -> None:
    job.attach(net=nn.Linear(3, 1))
    for step in job.steps(data(), global_batch=4, epochs=1):
        _ = step.loss


MISUSES = [
    (misuse_left_early, "left before its end"),
    (misuse_plain_backward, "call step.backward"),
    (misuse_vector_loss, r"loss has shape \(4, 1\)"),
    (misuse_early_loss, "read it after"),
    (lambda job: [job.attach(a=nn.Linear(1, 1)), job.attach(b=nn.Linear(1, 1))], "called twice"),
    (lambda job: job.attach(a=3), "a=3 is a int without state_dict"),
    (lambda job: job.attach(a=nn.Embedding(2, 2, sparse=True)), "sparse=False"),
    (lambda job: job.attach(a=nn.DataParallel(nn.Linear(1, 1))), "attach the bare module"),
    (lambda job: job.steps(data(), global_batch=4, epochs=1, micro_batch=0), "micro_batch=0"),
    (lambda job: job.steps(data(), global_batch=4, epochs=1, num_workers=-1), "num_workers=-1"),
    (lambda job: elastic.run(lambda inner: None), "called inside train"),
]


@pytest.mark.parametrize(("train", "message"), MISUSES, ids=[message for _, message in MISUSES])
def test_misuse_gets_one_clear_error(train: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        elastic.run(train)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed=-1"),
        ({"reproducible": True}, "not available yet"),
        ({"logical_shards": 0}, "logical_shards=0"),
    ],
)
def test_bad_options_of_run(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        elastic.run(lambda job: None, **options)


def test_an_optimizer_of_strangers_is_warned_of() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    with pytest.warns(UserWarning, match="2 parameters of 'optimizer' belong to no attached module"):
        elastic.run(lambda job: job.attach(net=nn.Linear(1, 1), optimizer=optimizer))


def test_random_numbers_follow_the_seed() -> None:
    drawn = []

    def train(job: elastic.Job) -> None:
        job.attach()
        drawn.append(torch.rand(1).item())

    elastic.run(train, seed=1)
    elastic.run(train, seed=1)
    elastic.run(train, seed=2)
    assert drawn[0] == drawn[1] != drawn[2]


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, elastic_runtime as e; e.RoundChanged; assert 'torch' not in sys.modules; print(e.__version__)"
    assert subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()
