"""Whose fault a silence is: that of who says nothing, or of who hears nothing."""

from __future__ import annotations

import pytest

from elastic_runtime.membership.silence import Silence

NAMES = ("a", "b", "c")


def story(silence: Silence, until: float, quiet: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Let each node answer every quarter second, but for its quiet time; return when each was taken for lost."""
    lost: dict[str, float] = {}
    now = 0.0
    while now < until:
        for name in NAMES:
            begin, end = quiet.get(name, (until, until))
            if name not in lost and not begin <= now < end:
                silence.heard(name, now)
        for name in silence.lost(now):
            lost[name] = now
            silence.forget(name)
        now += 0.25
    return lost


@pytest.mark.parametrize("apart", [True, False])
def test_one_that_says_nothing_is_lost_a_heartbeat_later(apart: bool) -> None:
    assert story(Silence(1.0, apart=apart), 20, {"b": (5.0, 20.0)}) == {"b": 6.0}


@pytest.mark.parametrize("apart", [True, False])
def test_a_short_silence_is_none(apart: bool) -> None:
    assert story(Silence(1.0, apart=apart), 20, {"b": (5.0, 5.9)}) == {}


def test_half_of_them_are_lost_while_the_other_half_is_heard() -> None:
    assert story(Silence(1.0, apart=True), 20, {"b": (5.0, 15.0), "c": (5.0, 15.0)}) == {"b": 6.0, "c": 6.0}


@pytest.mark.parametrize("back", [(7.0, 7.0, 7.0), (7.0, 9.0, 12.5), (5.75, 6.25, 6.5), (60.0, 61.0, 62.0)])
def test_none_is_lost_while_none_is_heard_nor_while_they_come_back(back: tuple[float, ...]) -> None:
    quiet = {name: (5.0, end) for name, end in zip(NAMES, back, strict=True)}
    assert story(Silence(1.0, apart=True), 80, quiet) == {}


def test_the_one_that_does_not_come_back_is_lost_in_the_end() -> None:
    quiet = {"a": (5.0, 7.0), "b": (5.0, 7.0), "c": (5.0, 40.0)}
    (name, when), *others = story(Silence(1.0, apart=True), 30, quiet).items()
    assert (name, others) == ("c", [])
    assert 7.0 + 1.0 < when < 7.0 + 1.0 + 6.0


def test_on_one_machine_all_may_be_lost_at_once() -> None:
    quiet = dict.fromkeys(NAMES, (5.0, 30.0))
    assert story(Silence(1.0, apart=False), 30, quiet) == dict.fromkeys(NAMES, 6.0)


def test_how_long_nobody_was_heard() -> None:
    silence = Silence(1.0, apart=True)
    assert silence.deaf(100.0) == 0.0  # Nobody was ever there.
    silence.heard("a", 100.0)
    silence.heard("b", 100.5)
    assert [silence.deaf(now) for now in (101.0, 101.5, 103.5)] == [0.0, 0.0, 3.0]
    silence.forget("a")
    assert silence.deaf(103.5) == 3.0
    silence.forget("b")
    assert silence.deaf(103.5) == 0.0
