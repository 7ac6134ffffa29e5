"""The rounds of torchrun's agents: when they begin, who gets which rank, and what members are told."""

from __future__ import annotations

import random
from collections import deque

import pytest

from elastic_runtime.membership.rendezvous_rounds import Again, Begin, Proceed, Reply, Rounds


class Job:
    """Agents around the machine. `places` is what each was told last; messages to agents arrive at once."""

    def __init__(self, minimum: int, maximum: int, now: float = 100.0) -> None:
        self.now = now
        self.range = (minimum, maximum)
        self.rounds = Rounds(minimum, maximum, now=now)
        self.places: dict[str, Proceed] = {}
        self.begun: dict[str, Proceed] = {}
        self.again: set[str] = set()
        self.stores = 0

    def take(self, replies: list[Reply], *, meet: bool = True) -> None:
        for reply in replies:
            if isinstance(reply, Proceed):
                self.places[reply.node] = reply
                if meet:
                    self.take(self.rounds.met(reply.node, reply.round, self.now))
            elif isinstance(reply, Begin):
                self.begun[reply.node] = self.places[reply.node]
            elif isinstance(reply, Again):
                self.again.add(reply.node)

    def join(self, *names: str, meet: bool = True) -> None:
        for name in names:
            if name not in self.rounds.nodes:
                self.take(
                    self.rounds.connected(name, self.now, round=-1, rank=-1, world=0, member=False), meet=meet
                )
            self.stores += 1
            self.take(self.rounds.join(name, (name, self.stores), self.now), meet=meet)

    def lose(self, *names: str) -> None:
        for name in names:
            self.begun.pop(name, None)
            self.take(self.rounds.lost(name, self.now))

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.rounds.tick(self.now))

    def ranks(self, number: int) -> dict[str, int]:
        return {name: place.rank for name, place in self.begun.items() if place.round == number}


def test_a_full_round_begins_at_once_with_one_store() -> None:
    job = Job(2, 3)
    job.join("c", "a", "b")
    assert sorted(job.ranks(0).values()) == [0, 1, 2]
    first = next(name for name, rank in job.ranks(0).items() if rank == 0)
    assert {place.store[0] for place in job.begun.values()} == {first}, "the node of rank 0 holds the store"
    assert {place.world for place in job.begun.values()} == {3}
    assert all(job.rounds.waiting(name) == 0 for name in "abc")


def test_a_round_below_its_maximum_waits_for_a_moment_only() -> None:
    job = Job(2, 3)
    job.join("a")
    job.later(60)
    assert not job.places, "below the minimum it waits"
    job.join("b")
    assert not job.places
    job.later(2.9)
    assert not job.places
    job.later(0.2)
    assert job.ranks(0) == {"a": 0, "b": 1}


def test_members_learn_of_a_loss_and_go_on_at_once_with_their_ranks() -> None:
    job = Job(2, 3)
    job.join("a", "b", "c")
    ranks = job.ranks(0)
    lost = next(name for name, rank in ranks.items() if rank == 0)
    rest = [name for name in "abc" if name != lost]
    job.lose(lost)
    assert [job.rounds.waiting(name) for name in rest] == [1, 1]
    job.join(rest[0])
    assert not job.ranks(1), "the other one is still to come"
    job.join(rest[1])
    after = job.ranks(1)
    assert sorted(after.values()) == [0, 1]
    kept = next(name for name in rest if ranks[name] == 1)
    assert after[kept] == 1, "a survivor keeps its rank"
    assert {job.places[name].store[0] for name in rest} == {name for name in rest if after[name] == 0}
    assert [job.rounds.waiting(name) for name in rest] == [0, 0]


def test_a_newcomer_is_let_in_with_everybody() -> None:
    job = Job(2, 3)
    job.join("b", "c")
    job.later(4)
    job.join("a")  # Its name sorts first: no reason to move anybody.
    assert [job.rounds.waiting(name) for name in "bc"] == [1, 1]
    job.join("b", "c")
    assert job.ranks(1) == {"b": 0, "c": 1, "a": 2}
    assert {place.store[0] for place in job.begun.values()} == {"b"}


def test_a_spare_disturbs_nobody_and_takes_the_place_of_a_lost_node() -> None:
    job = Job(1, 2)
    job.join("a", "b", "c")
    assert job.ranks(0) == {"a": 0, "b": 1}
    assert [job.rounds.waiting(name) for name in "ab"] == [0, 0]
    job.later(1000)
    assert "c" not in job.places
    job.lose("a")
    assert job.rounds.waiting("b") == 1
    job.join("b")
    assert job.ranks(1) == {"b": 1, "c": 0}


def test_a_broken_round_waits_for_its_members_but_not_for_ever() -> None:
    job = Job(1, 3)
    job.join("a", "b", "c")
    job.lose("a")
    job.join("b")
    job.later(59)
    assert not job.ranks(1), "c may take its time to stop its workers"
    job.later(2)
    assert job.ranks(1) == {"b": 1 - 1} or job.ranks(1) == {"b": 0}
    assert job.rounds.waiting("c") >= 1, "the others went on without it"
    job.join("c")
    assert job.rounds.waiting("b") == 1
    job.join("b")
    assert sorted(job.ranks(2)) == ["b", "c"]


@pytest.mark.parametrize("who", ["holder", "other"])
def test_a_loss_before_all_have_met_starts_over(who: str) -> None:
    job = Job(2, 3)
    job.join("a", "b", "c", meet=False)
    assert len(job.places) == 3
    assert not job.begun
    lost = next(name for name, place in job.places.items() if (place.rank == 0) == (who == "holder"))
    rest = {name for name in "abc" if name != lost}
    job.take(job.rounds.met(min(rest), 0, job.now))
    job.lose(lost)
    assert job.again == rest
    job.join(*sorted(rest))
    assert set(job.ranks(1)) == rest


def test_a_node_that_never_meets_does_not_hold_up_the_others_for_ever() -> None:
    job = Job(2, 2)
    job.join("a", "b", meet=False)
    job.take(job.rounds.met("a", 0, job.now))
    job.later(31)
    assert job.again == {"a", "b"}
    job.join("a", "b")
    assert sorted(job.ranks(1)) == ["a", "b"]


def test_after_the_end_nobody_is_told_to_come_or_let_in() -> None:
    job = Job(1, 3)
    job.join("a", "b", "c")
    job.rounds.close()
    job.lose("a")
    assert [job.rounds.waiting(name) for name in "bc"] == [0, 0]
    job.join("b", "d")
    job.later(100)
    assert not job.ranks(1)


def test_another_coordinator_takes_over_without_a_stop() -> None:
    job = Job(2, 3)
    job.join("a", "b", "c")
    before, places = job.rounds, dict(job.begun)
    job.rounds = Rounds(*job.range, now=job.now)

    def back(name: str) -> None:
        place = places[name]
        job.take(
            job.rounds.connected(name, job.now, round=0, rank=place.rank, world=place.world, member=True)
        )

    back("a")
    job.later(1)
    back("b")
    assert [job.rounds.waiting(name) for name in "ab"] == [0, 0], "c may be on its way"
    back("c")
    job.later(10)
    assert [job.rounds.waiting(name) for name in "abc"] == [0, 0, 0]
    assert job.rounds.round == before.round
    job.lose("c")
    assert [job.rounds.waiting(name) for name in "ab"] == [1, 1]


def test_another_coordinator_notices_who_does_not_come_back() -> None:
    job = Job(2, 3)
    job.join("a", "b", "c")
    places = dict(job.begun)
    job.rounds = Rounds(*job.range, now=job.now)
    for name in "ab":
        place = places[name]
        job.take(
            job.rounds.connected(name, job.now, round=0, rank=place.rank, world=place.world, member=True)
        )
    job.later(3.1)
    assert [job.rounds.waiting(name) for name in "ab"] == [1, 1]
    job.join("a", "b")
    assert sorted(job.ranks(1).values()) == [0, 1]


@pytest.mark.parametrize("seed", range(200))
def test_random_schedules_end_in_one_round_of_all(seed: int) -> None:
    """Agents crash, come, are slow; coordinators die. Whatever happened, once it is quiet all are in one round."""
    chance = random.Random(seed)
    minimum, maximum = chance.choice([(1, 3), (2, 3), (2, 4), (3, 3)])
    now = 0.0
    rounds = Rounds(minimum, maximum, now=now)
    agents: dict[str, dict[str, object]] = {}
    inbox: dict[str, deque[Reply]] = {}
    given: dict[int, dict[int, str]] = {}
    offered: dict[int, set[tuple[str, int]]] = {}
    epoch, stores = 0, 0

    def take(replies: list[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, Proceed):
                number = 1000 * epoch + reply.round
                places = given.setdefault(number, {})
                assert reply.rank not in places, "a rank twice"
                places[reply.rank] = reply.node
                assert minimum <= reply.world <= maximum
                offered.setdefault(number, set()).add(reply.store)
                assert len(offered[number]) == 1, "one store a round"
            if reply.node in inbox:
                inbox[reply.node].append(reply)

    def join(name: str) -> None:
        nonlocal stores
        stores += 1
        agents[name]["state"] = "waiting"
        take(rounds.join(name, (name, stores), now))

    def connect(name: str) -> None:
        agent = agents[name]
        inbox[name].clear()
        agent["connected"] = True
        take(
            rounds.connected(
                name, now, round=int(str(agent["round"])), rank=int(str(agent["rank"])),
                world=int(str(agent["world"])), member=agent["state"] == "member",
            )
        )  # fmt: skip
        if agent["state"] != "member":
            join(name)

    def hear(name: str) -> None:
        agent, reply = agents[name], inbox[name].popleft()
        if isinstance(reply, Proceed):
            agent.update(state="meeting", round=reply.round, rank=reply.rank, world=reply.world)
            take(rounds.met(name, reply.round, now))
        elif isinstance(reply, Begin) and reply.round == agent["round"] and agent["state"] == "meeting":
            agent["state"] = "member"
        elif isinstance(reply, Again) and reply.round == agent["round"] and agent["state"] != "member":
            join(name)

    def turn() -> None:
        nonlocal now
        now += chance.choice([0.01, 0.1, 1.0])
        take(rounds.tick(now))
        for name in list(agents):
            if chance.random() < 0.5:
                continue
            agent = agents[name]
            if not agent["connected"]:
                connect(name)
            elif inbox[name]:
                hear(name)
            elif agent["state"] == "member" and rounds.waiting(name):
                join(name)

    for _ in range(150):
        what = chance.random()
        if what < 0.10 and len(agents) < maximum + 1:
            name = f"n{len(agents)}-{chance.randrange(10**9)}"
            agents[name] = {"state": "idle", "round": -1, "rank": -1, "world": 0, "connected": False}
            inbox[name] = deque()
        elif what < 0.15 and agents:
            name = chance.choice(sorted(agents))
            del agents[name], inbox[name]
            take(rounds.lost(name, now))
        elif what < 0.18:
            epoch += 1
            rounds = Rounds(minimum, maximum, now=now)
            for agent in agents.values():
                agent["connected"] = False
        elif what < 0.22 and agents:  # A worker fails: its agent comes by itself.
            name = chance.choice(sorted(agents))
            if agents[name]["state"] == "member" and agents[name]["connected"]:
                join(name)
        turn()
    while len(agents) < minimum:
        name = f"late{len(agents)}"
        agents[name] = {"state": "idle", "round": -1, "rank": -1, "world": 0, "connected": False}
        inbox[name] = deque()
    for _ in range(3000):
        turn()
    members = [name for name in agents if agents[name]["state"] == "member"]
    assert len(members) == min(len(agents), maximum)
    assert {agents[name]["round"] for name in members} == {rounds.round}
    assert sorted(int(str(agents[name]["rank"])) for name in members) == list(range(len(members)))
