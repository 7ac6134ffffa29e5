from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_runtime.names import MAX_LENGTH, is_valid, unique_name, valid_name

DNS_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


@pytest.mark.parametrize(
    "text",
    [
        "my-trainer.py",
        "A" * 120,
        "under_score",
        "Ünïcode-名前",
        "",
        "9lives",
        "-x-",
        "a" * 63 + "b",
        "\ud800",
        "名前",
    ],
)
def test_any_text_gives_a_valid_stable_name(text: str) -> None:
    name = valid_name(text)
    assert DNS_LABEL.fullmatch(name)
    assert len(name) <= MAX_LENGTH
    assert valid_name(text) == name


@given(st.text(max_size=200))
def test_every_text_gives_a_valid_name(text: str) -> None:
    assert is_valid(valid_name(text))
    assert is_valid(unique_name(text))


@pytest.mark.parametrize("text", ["digits", "a", "a-1", "a" * 63])
def test_a_valid_name_stays_as_it_is(text: str) -> None:
    assert valid_name(text) == text


def test_texts_that_look_alike_get_different_names() -> None:
    names = {valid_name(text) for text in ("my_job", "My_job", "my.job", "my job", "my-job")}
    assert len(names) == 5


def test_unique_names_differ() -> None:
    assert len({unique_name("train") for _ in range(100)}) == 100
