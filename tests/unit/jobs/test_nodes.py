from __future__ import annotations

import pytest

from elastic_runtime.errors import InputError
from elastic_runtime.jobs.nodes import NodeRange, parse_j, parse_nodes, parse_workers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2x1", (2, 2, 1)),
        ("1:3x1", (1, 3, 1)),
        ("1:3x4", (1, 3, 4)),
        ("3", (3, 3, 1)),
        (" 2x2 ", (2, 2, 2)),
    ],
)
def test_j_is_parsed(text: str, expected: tuple[int, int, int]) -> None:
    nodes = parse_j(text)
    assert (nodes.minimum, nodes.maximum, nodes.workers) == expected


@pytest.mark.parametrize(
    "text",
    [
        "3:2x1",
        "0x1",
        "2x0",
        "-1x1",
        "x",
        "2:x1",
        "",
        "1:2:3x1",
        "1x1x1",
        "٣x1",
        "1.5x1",
        "9999999x1",
        "0:2x1",
    ],
)
def test_a_wrong_j_is_one_error_that_names_the_value_and_the_form(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_j(text)
    message = str(caught.value)
    assert message.startswith(f"-j {text!r}")
    assert "[MIN:]MAXxK" in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["100000x2", "999999x999999"])
def test_an_absurd_number_of_workers_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="workers are more than"):
        parse_j(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1:3", NodeRange(minimum=1, maximum=3)), ("2", NodeRange(minimum=2, maximum=2)),
     ("4,1,2,2", NodeRange(minimum=1, maximum=4, sizes=(1, 2, 4)))],
)  # fmt: skip
def test_nodes_are_parsed(text: str, expected: NodeRange) -> None:
    assert parse_nodes(text) == expected


@pytest.mark.parametrize("text", ["3:1", "0", "1,,2", "1,x", "a", "", "1:0", "-1", "0,1"])
def test_wrong_nodes_are_one_error(text: str) -> None:
    with pytest.raises(InputError, match=r"^--nodes"):
        parse_nodes(text)


@pytest.mark.parametrize(
    ("notation", "live", "size"),
    [("1,2,4", 3, 2), ("1,2,4", 4, 4), ("2,4", 1, 0), ("1:3", 5, 3), ("2:3", 1, 0), ("2:3", 2, 2)],
)
def test_the_largest_allowed_size(notation: str, live: int, size: int) -> None:
    assert parse_nodes(notation).largest(live) == size


@pytest.mark.parametrize("notation", ["1:3", "2", "1,2,4"])
def test_the_notation_survives_a_round_trip(notation: str) -> None:
    assert str(parse_nodes(notation)) == notation


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.5", ""])
def test_wrong_workers_are_one_error(text: str) -> None:
    with pytest.raises(InputError, match="--nproc-per-node"):
        parse_workers(text)


def test_auto_counts_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,5")
    assert parse_workers("auto") == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert parse_workers("auto") == 1
