"""The lease itself, the thread that keeps it, and the lock of one machine."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path

import pytest

from elastic_runtime.errors import InputError, IntegrityError
from elastic_runtime.membership.leadership import Keeper, Lease, MachineLock


class Scripted:
    """A back end whose renewals are given: True, False or a lease that is not extended."""

    interval = 0.001

    def __init__(self, *answers):
        self.answers = list(answers)
        self.releases = 0

    def acquire(self, timeout, *, above=0):
        return Lease(self, term=above + 1, holder="me", until=time.monotonic() + 60)

    def renew(self):
        return self.answers.pop(0) if self.answers else True

    def release(self):
        self.releases += 1

    def close(self):
        self.release()


def test_a_lease_is_valid_until_its_end_and_never_again():
    lease = Lease(Scripted(), term=3, holder="me", until=10.0)
    assert lease.valid(9.9)
    assert not lease.valid(10.0)
    lease.extend(12.0)
    lease.extend(11.0)
    assert lease.valid(11.9)
    lease.end()
    lease.extend(99.0)
    assert not lease.valid(0.0)
    assert lease.until == -math.inf
    assert not lease.renew()


@pytest.mark.parametrize("answers", [[False], [True, True, False, True]])
def test_a_loss_is_told_once(answers):
    lease, told, seen = Scripted(*answers).acquire(1), [], threading.Event()
    keeper = Keeper(lease, lambda lost: (told.append(lost), seen.set()))
    assert seen.wait(30)
    keeper.stop()
    assert told == [lease]
    assert not lease.valid(time.monotonic())


def test_a_lease_that_ran_out_is_lost_even_if_its_back_end_says_otherwise():
    source, seen = Scripted(), threading.Event()
    lease = Lease(source, term=1, holder="me", until=time.monotonic() - 1)
    keeper = Keeper(lease, lambda _: seen.set())
    assert seen.wait(30)
    keeper.stop()


def test_after_stop_nothing_is_told():
    source, told = Scripted(), []
    source.interval = 0.2
    source.answers = [False]
    lease = source.acquire(1)
    keeper = Keeper(lease, told.append)
    keeper.stop()
    assert told == []
    assert lease.valid(time.monotonic())


def test_the_lock_is_had_by_one_at_a_time_in_terms_that_grow(tmp_path):
    path = tmp_path / "leader"
    first, second = MachineLock(path), MachineLock(path)
    terms = []
    for _ in range(5):
        lease = first.acquire(10)
        assert lease.valid(time.monotonic())
        assert lease.renew()
        assert second.acquire(0.0) is None
        assert second.acquire(0.05) is None
        terms.append(lease.term)
        lease.release()
        assert not lease.valid(time.monotonic())
        assert not lease.renew()
        first, second = second, first
    assert terms == [1, 2, 3, 4, 5]
    assert first.acquire(1, above=40).term == 41
    first.close()
    assert MachineLock(path).acquire(1).term == 42


def test_who_waits_gets_it_as_soon_as_it_is_free(tmp_path):
    path = tmp_path / "leader"
    first, got = MachineLock(path), []
    lease = first.acquire(1)
    waiter = threading.Thread(target=lambda: got.append(MachineLock(path).acquire(30)))
    waiter.start()
    lease.release()
    waiter.join(30)
    assert got[0].term == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data, slot: data[:slot] + b"9" * 30 + data[slot + 30 :],
        lambda data, slot: data[:slot] + bytes(64) + data[slot + 64 :],
    ],
)
@pytest.mark.parametrize("term", [1, 2, 3, 6])
def test_a_write_that_was_cut_short_costs_no_term(tmp_path, term, spoil):
    """The slot of the next term is spoilt, as by a power cut while it was written; that term was never used."""
    path = tmp_path / "leader"
    for _ in range(term):
        lock = MachineLock(path)
        lease = lock.acquire(1)
        lease.release()
    assert lease.term == term
    path.write_bytes(spoil(path.read_bytes().ljust(128, b"\0"), (term + 1) % 2 * 64))
    assert MachineLock(path).acquire(1).term == term + 1


def test_a_lock_file_that_holds_something_else_is_refused(tmp_path):
    path = tmp_path / "leader"
    path.write_text("somebody's diary\n" * 20)
    with pytest.raises(IntegrityError, match="holds no term"):
        MachineLock(path).acquire(1)
    assert path.read_text().startswith("somebody's diary")


@pytest.mark.parametrize("replace", [False, True])
def test_who_holds_a_lock_that_was_removed_notices(tmp_path, replace):
    path = tmp_path / "leader"
    lock = MachineLock(path)
    lease = lock.acquire(1)
    path.unlink()
    if replace:
        path.touch()
    assert not lease.renew()
    assert not lease.valid(time.monotonic())
    other = MachineLock(path).acquire(1, above=lease.term)
    assert other.term == 2


@pytest.mark.parametrize("where", ["none/leader", "folder"])
def test_a_place_that_cannot_be_locked_is_named(tmp_path, where):
    (tmp_path / "folder").mkdir()
    with pytest.raises(
        InputError, match=f"lock '.*{where}': .*: give a file in a folder that can be written"
    ):
        MachineLock(tmp_path / where).acquire(1)


def test_nothing_is_left_open(tmp_path):
    def descriptors():
        return {str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}

    path = tmp_path / "leader"
    held = MachineLock(path)
    lease = held.acquire(1)
    for _ in range(20):
        assert MachineLock(path).acquire(0.0) is None
    lease.release()
    assert str(path) not in descriptors()
