"""A model folder gives back what was put in, for every kind of module, and is whole or not a model at all."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from elastic_runtime.errors import InputError, IntegrityError, MissingFileError
from elastic_runtime.models import load_model, load_weights, read_config, save_model

FEATURES = [f"f{i}" for i in range(8)]
CLASSES = ["red", "green", "blue"]


class Tied(torch.nn.Module):
    """Two layers share a weight, one weight is stored transposed, one bias is part of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.head = torch.nn.Linear(8, 3)
        self.head.weight = torch.nn.Parameter(torch.randn(8, 3).t())
        self.head.bias = torch.nn.Parameter(torch.randn(100)[10:13])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))))


def with_norm() -> torch.nn.Module:
    module = torch.nn.Sequential(
        torch.nn.Linear(8, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.GELU(),
        torch.nn.Dropout(0.5),
        torch.nn.Linear(16, 3),
    )
    for _ in range(3):
        module(torch.randn(32, 8) * 3 + 1)  # so that the running statistics matter
    return module


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.head = torch.nn.Linear(8, 3)
        self.register_buffer("scale", torch.full((3,), 0.5), persistent=False)
        self.constant = torch.tensor([1.0, 2.0, 3.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.encoder(x.reshape(x.shape[0], 2, 4))
        return self.head(tokens.flatten(1)) * self.scale + self.constant


def convolution() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(12, 3)
    )


def save(folder: Path, module: torch.nn.Module, rows: int = 4, shape: tuple[int, ...] = (8,)):
    example = torch.randn(rows, *shape)
    return save_model(
        folder, module, example, task="classification", features=FEATURES, target="colour", classes=CLASSES
    )


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (Tied(), (8,)),
        (with_norm(), (8,)),
        (Attention(), (8,)),
        (convolution(), (1, 2, 4)),
        (torch.nn.DataParallel(torch.nn.Linear(8, 3)), (8,)),
        (torch.nn.Linear(8, 3).requires_grad_(False), (8,)),
        (torch.nn.Linear(8, 3).to(torch.float64), (8,)),
    ],
    ids=["tied", "norm", "attention", "convolution", "wrapped", "frozen", "double"],
)
@pytest.mark.parametrize("rows", [1, 4])
def test_predictions_and_weights_survive(
    tmp_path: Path, module: torch.nn.Module, shape: tuple[int, ...], rows: int
) -> None:
    if next(module.parameters()).dtype == torch.float64:
        with pytest.raises(InputError, match="fails for the example"):
            save(tmp_path / "model", module, rows, shape)
        return
    module.train()
    before = copy.deepcopy(module.state_dict())
    save(tmp_path / "model", module, rows, shape)
    assert all(part.training for part in module.modules())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())

    loaded = load_model(tmp_path / "model")
    module.eval()
    for n in (1, 2, 3, 17):
        features = np.random.default_rng(n).normal(size=(n, 8)).astype(np.float32)
        with torch.no_grad():
            expected = module(torch.from_numpy(features).reshape(n, *shape)).numpy()
        np.testing.assert_allclose(loaded.predict(features), expected, rtol=1e-5, atol=1e-6)
    empty = loaded.predict(np.empty((0, 8), dtype=np.float32))
    assert (empty.shape, empty.dtype) == ((0, 3), np.float32)

    bare = module.module if isinstance(module, torch.nn.DataParallel) else module
    again = load_weights(tmp_path / "model")
    assert {name: value.tolist() for name, value in bare.state_dict().items()} == {
        name: value.tolist() for name, value in again.items()
    }
    bare.load_state_dict(again)


def test_the_folder_is_as_documented(tmp_path: Path) -> None:
    config = save(tmp_path, torch.nn.Linear(8, 3))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "model.pt2",
        "model.safetensors",
    ]
    document = json.loads((tmp_path / "config.json").read_text())
    assert document["schema"] == 1
    assert document["task"] == "classification"
    assert document["target"] == "colour"
    assert document["features"] == FEATURES
    assert document["classes"] == CLASSES
    assert document["input"] == {"name": "features", "shape": [-1, 8], "datatype": "FP32"}
    assert document["output"] == {"name": "logits", "shape": [-1, 3], "datatype": "FP32"}
    assert document["extra"] == {}
    assert document["versions"]["torch"] == torch.__version__
    assert set(document["files"]) == {"model.pt2", "model.safetensors"}
    assert read_config(tmp_path) == config
    assert set(load_file(tmp_path / "model.safetensors")) == {"weight", "bias"}


def test_the_graph_says_nothing_about_the_machine(tmp_path: Path) -> None:
    save(tmp_path, Tied())
    content = (tmp_path / "model.pt2").read_bytes()
    assert str(Path(__file__).parent).encode() not in content
    assert str(Path(torch.__file__).parent).encode() not in content


@pytest.mark.parametrize("width", [None, 1])
def test_regression(tmp_path: Path, width: int | None) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if width else self.layer(x).squeeze(1)

    module = Model()
    extra = {"steps": 10, "nested": {"a": [1, 2.5]}}
    config = save_model(
        tmp_path, module, torch.randn(3, 8), task="regression", features=FEATURES, target="price", extra=extra
    )
    assert config.output.to_dict() == {
        "name": "predictions",
        "shape": [-1, 1] if width else [-1],
        "datatype": "FP32",
    }
    assert config.extra == extra
    features = np.ones((2, 8), dtype=np.float32)
    with torch.no_grad():
        np.testing.assert_allclose(
            load_model(tmp_path).predict(features), module(torch.from_numpy(features)).numpy(), rtol=1e-6
        )


def test_single_modes_are_put_back(tmp_path: Path) -> None:
    module = with_norm()
    module.train()
    module[1].eval()
    save(tmp_path, module)
    assert [part.training for part in module] == [True, False, True, True, True]


def test_what_ddp_and_compile_add_is_taken_off(tmp_path: Path) -> None:
    module = with_norm()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(module)
        wrapped(torch.randn(4, 8)).sum().backward()
        save(tmp_path / "ddp", wrapped)
        save(tmp_path / "both", torch.compile(wrapped, backend="eager"))
    finally:
        torch.distributed.destroy_process_group()
    save(tmp_path / "bare", module)
    features = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    expected = load_model(tmp_path / "bare").predict(features)
    for name in ("ddp", "both"):
        np.testing.assert_array_equal(load_model(tmp_path / name).predict(features), expected)
        assert set(load_weights(tmp_path / name)) == set(module.state_dict())
    assert module.training


class Branches(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :3] if x.sum() > 0 else -x[:, :3]


class Random(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :3] + torch.rand(x.shape[0], 3)


class Returns(torch.nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor):
        return self.make(x)


class Broken(torch.nn.Linear):
    def get_extra_state(self) -> object:
        return {"not": "a tensor"}


LINEAR = torch.nn.Linear(8, 3)
ROWS = torch.randn(4, 8)


@pytest.mark.parametrize(
    ("module", "example", "changes", "message"),
    [
        ("text", ROWS, {}, "module='text' is a str"),
        (LINEAR, [[1.0] * 8], {}, "example is a list"),
        (LINEAR, ROWS.double(), {}, "example has type torch.float64"),
        (LINEAR, ROWS[:0], {}, r"example has shape \(0, 8\)"),
        (LINEAR, ROWS[0], {}, r"example has shape \(8,\)"),
        (LINEAR, torch.randn(4, 7), {"features": FEATURES[:7]}, "fails for the example"),
        (LINEAR, ROWS, {"features": FEATURES[:7]}, "features has 7 names, but a row of the input has 8"),
        (LINEAR, ROWS, {"features": [*FEATURES[:7], "f0"]}, "features names 'f0' more than once"),
        (LINEAR, ROWS, {"features": list(range(8))}, "features holds 0, a int: give text, such as '0'"),
        (LINEAR, ROWS, {"task": "ranking"}, "task='ranking' is none of classification, regression"),
        (LINEAR, ROWS, {"target": ""}, "target='' is not the name of a column"),
        (LINEAR, ROWS, {"classes": None}, "classes is None"),
        (LINEAR, ROWS, {"classes": ["a", "b"]}, r"output has shape \[-1, 3\], but there are 2 classes"),
        (LINEAR, ROWS, {"classes": [0, 1, 2]}, "classes holds 0, a int"),
        (LINEAR, ROWS, {"task": "regression"}, "classes=.* is given for regression"),
        (
            LINEAR,
            ROWS,
            {"task": "regression", "classes": None},
            r"output has shape \[-1, 3\]: a regression model",
        ),
        (LINEAR, ROWS, {"extra": {"loss": float("nan")}}, "extra=.* cannot be written as JSON"),
        (LINEAR, ROWS, {"extra": {"array": np.ones(2)}}, "extra=.* cannot be written as JSON"),
        (Branches(), ROWS, {}, "Branches cannot be exported"),
        (Random(), ROWS, {}, "Random gives other values when it is exported"),
        (Returns(lambda x: (x, x)), ROWS, {}, "module returns a tuple"),
        (Returns(lambda x: x.sum(0)), ROWS, {}, r"module returns shape \(8,\) for 4 rows"),
        (Returns(lambda x: x.argmax(1)), ROWS, {}, "module returns type torch.int64"),
        (Returns(lambda x: x[:, :3] * float("inf")), ROWS, {}, "NaN or infinite values"),
        (Broken(8, 3), ROWS, {}, "module's state '_extra_state' is a dict"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, module, example, changes, message: str) -> None:
    arguments = {
        "task": "classification",
        "features": FEATURES,
        "target": "colour",
        "classes": CLASSES,
        **changes,
    }
    folder = tmp_path / "model"
    with pytest.raises(InputError, match=message):
        save_model(folder, module, example, **arguments)
    assert not folder.exists()


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        save(tmp_path / "model", LINEAR)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([[1.0] * 8], r"expected an array of shape \(n, 8\), float32; given a list"),
        (np.ones((2, 7), np.float32), r"given shape \(2, 7\)"),
        (np.ones(8, np.float32), r"given shape \(8,\)"),
        (np.ones((2, 8), np.complex64), "given type complex64"),
        (np.full((2, 8), "1"), "given type <U1"),
        (np.ones((2, 8), bool), "given type bool"),
        (np.ones((2, 8), object), "given type object"),
    ],
)
def test_wrong_features_are_refused(tmp_path: Path, features: np.ndarray, message: str) -> None:
    save(tmp_path, LINEAR)
    with pytest.raises(InputError, match=message):
        load_model(tmp_path).predict(features)


def test_features_of_any_layout_and_number_type(tmp_path: Path) -> None:
    save(tmp_path, LINEAR)
    model = load_model(tmp_path)
    whole = np.arange(32).reshape(4, 8)
    expected = model.predict(whole.astype(np.float32))
    frozen = whole.astype(np.float32)
    frozen.flags.writeable = False
    for features in (whole, whole.astype(np.float64), np.asfortranarray(whole, dtype=np.float32), frozen):
        np.testing.assert_array_equal(model.predict(features), expected)
    np.testing.assert_array_equal(model.predict(whole.astype(np.float32)[::2]), expected[::2])


def test_predict_from_several_threads(tmp_path: Path) -> None:
    save(tmp_path, with_norm())
    model = load_model(tmp_path)
    inputs = [np.random.default_rng(i).normal(size=(i + 1, 8)).astype(np.float32) for i in range(8)]
    expected = [model.predict(features) for features in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(100):
            same = np.array_equal(model.predict(inputs[index]), expected[index])
            wrong.extend([] if same else [index])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("name", ["model.pt2", "model.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_files_are_named(tmp_path: Path, name: str, damage: str) -> None:
    save(tmp_path, LINEAR)
    path = tmp_path / name
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content if damage == "flip" else content[:-1])
    with pytest.raises(IntegrityError, match=name.replace(".", r"\.")):
        load_model(tmp_path)


def test_overwriting_replaces_the_model(tmp_path: Path) -> None:
    save(tmp_path, LINEAR)
    other = torch.nn.Linear(8, 3)
    save(tmp_path, other)
    assert torch.equal(load_weights(tmp_path)["weight"], other.weight.detach())
    assert len(list(tmp_path.iterdir())) == 3


def test_a_failure_while_writing_leaves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when the second file is put in place: what is there must not be taken for a model."""
    save(tmp_path, LINEAR)
    original = Path.replace

    def full_disk(path: Path, target: Path) -> Path:
        if path.name == "model.pt2":
            raise OSError(28, "No space left on device")
        return original(path, target)

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, torch.nn.Linear(8, 3))
    monkeypatch.undo()
    with pytest.raises(MissingFileError, match="never finished"):
        load_model(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
