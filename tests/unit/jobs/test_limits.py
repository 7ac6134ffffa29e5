from __future__ import annotations

import pytest

from elastic_runtime.errors import InputError
from elastic_runtime.jobs.nodes import parse_nodes
from elastic_runtime.jobs.spec import JobSpec, Program


def spec(**more: object) -> JobSpec:
    return JobSpec(program=Program(script="a.py"), nodes=parse_nodes("1"), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"arguments": ["a", "x" * 131_071]},
            r"argument 2 of the program: 131,072 bytes .* put it in a file",
        ),
        ({"arguments": ["x" * 100_000] * 11}, r"argument 11 of the program"),
        ({"arguments": ["ü" * 66_000]}, r"132,001 bytes"),
        ({"environment": {"A": "x" * 131_071}}, r"environment variable A: 131,074 bytes"),
        ({"arguments": ["\ud800"]}, r"argument 1 of the program: surrogates not allowed"),
        ({"environment": {"RANK": "1"}}, r"environment variable RANK: the launcher sets it"),
    ],
)
def test_what_no_process_can_be_given_is_refused(more: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        spec(**more)


def test_what_just_fits_is_taken() -> None:
    assert len(spec(arguments=["x" * 131_070]).arguments[0]) == 131_070
