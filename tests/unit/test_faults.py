from __future__ import annotations

import pytest

from elastic_runtime.errors import InputError
from elastic_runtime.testing import faults


def test_a_plan_survives_its_notation() -> None:
    planned = [faults.kill(rank=1, step=5), faults.stop(rank=0, step=9), faults.exit_with(3, rank=2, step=1)]
    with faults.plan(*planned, base={"PATH": "/bin"}) as environment:
        assert environment["PATH"] == "/bin"
        assert faults.parse(environment[faults.VARIABLE]) == planned


@pytest.mark.parametrize(
    "text", ["kill", "kill rank=1", "kill rank=x step=1", "burn rank=1 step=1", "kill step=1 rank=1"]
)
def test_a_wrong_plan_is_named(text: str) -> None:
    with pytest.raises(InputError, match=faults.VARIABLE):
        faults.parse(text)


def test_no_plan_is_no_fault() -> None:
    assert faults.parse("") == []
    assert faults.parse(" ; ") == []
