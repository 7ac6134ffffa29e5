from __future__ import annotations

import pytest

from elastic_runtime.errors import InputError
from elastic_runtime.launching.step import TrainRequest, command_line, whole_numbers

PLACES = {"dataset": "/data", "model": "/model", "checkpoints": "/ckpt"}


@pytest.mark.parametrize(
    ("carried", "wanted"),
    [
        ({"widths": [64.0, 32.0]}, {"widths": [64, 32]}),
        ([1.0, 2.0, 0.5], [1, 2, 0.5]),
        ({"a": {"b": [3.0, "x", None, True]}}, {"a": {"b": [3, "x", None, True]}}),
        (1e300, int(1e300)),
        ("1.0", "1.0"),
    ],
)
def test_numbers_that_kfp_made_floats_are_whole_again(carried: object, wanted: object) -> None:
    found = whole_numbers(carried)
    assert found == wanted
    assert repr(found) == repr(wanted)


def test_places_are_filled_in() -> None:
    request = TrainRequest(arguments=["--data", "{dataset}", "--out={model}", 3.0, 0.5, None, "{other}"])
    assert command_line(request, PLACES) == ["--data", "/data", "--out=/model", "3", "0.5", "{other}"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (64.0, ["--p=64"]), (2e-05, ["--p=2e-05"]), ("relu", ["--p=relu"]), ("", ["--p="]), (True, ["--p"]),
        (False, []), (None, []), ([64.0, 32.0], ["--p=[64, 32]"]), ({"a": 1.0}, ['--p={"a": 1}']), ([], ["--p=[]"]),
        ("None", ["--p=None"]), ([None], ["--p=[null]"]),
    ],
)  # fmt: skip
def test_hyperparameters_become_options(value: object, words: list[str]) -> None:
    assert command_line(TrainRequest(hyperparameters={"p": value}), PLACES) == words


@pytest.mark.parametrize("name", ["", "-x", "a=b", "a b", "a\n"])
def test_a_hyperparameter_that_cannot_be_an_option_is_named(name: str) -> None:
    with pytest.raises(InputError, match="hyperparameters"):
        command_line(TrainRequest(hyperparameters={name: 1}), PLACES)


@pytest.mark.parametrize("argument", [True, ["a"], {"a": 1}])
def test_an_argument_that_is_no_word_is_named(argument: object) -> None:
    with pytest.raises(InputError, match="arguments"):
        command_line(TrainRequest(arguments=[argument]), PLACES)
