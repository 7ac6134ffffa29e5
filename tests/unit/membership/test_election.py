"""The vote among candidates over random schedules: lost, doubled, late messages, partitions, pauses, crashes."""

from __future__ import annotations

import copy
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_runtime.errors import InputError
from elastic_runtime.membership.leadership.election import Election, Persist, Send, Vote

LEASE = 1.0


class Cluster:
    """Candidates, the network between them, their disks, and one clock for the test alone."""

    def __init__(self, size: int, seed: int) -> None:
        self.names = [f"c{number}" for number in range(size)]
        self.rng = random.Random(seed)
        self.now = 0.0
        self.disks = {name: Vote() for name in self.names}
        self.nodes = {name: self._new(name) for name in self.names}
        self.flying: list[tuple[str, str, dict]] = []
        self.cut: set[frozenset[str]] = set()
        self.paused: set[str] = set()
        self.leaders: dict[int, str] = {}
        self.lied = False
        for node in self.nodes.values():
            self.perform(node.name, node.campaign(self.now))

    def _new(self, name: str) -> Election:
        return Election(
            name,
            self.names,
            now=self.now,
            vote=self.disks[name],
            lease=LEASE,
            rng=random.Random(self.rng.random()),
        )

    def perform(self, name, actions, *, stop_after=None):
        """Carry out what `name` wants; it dies after `stop_after` of it."""
        for number, action in enumerate(actions):
            if number == stop_after:
                self.crash(name)
                return
            if isinstance(action, Persist):
                assert action.vote.term >= self.disks[name].term, "a vote was forgotten"
                if action.vote.term == self.disks[name].term:
                    assert self.disks[name].voted_for in ("", action.vote.voted_for), "it voted twice"
                self.disks[name] = action.vote
            elif isinstance(action, Send):
                # Everything that is said is covered by what is stored.
                said = action.message
                if said["kind"] in ("request", "heartbeat") or (said["kind"] == "vote" and said["granted"]):
                    assert said["term"] <= self.disks[name].term
                if said["kind"] == "request":
                    assert self.disks[name] == Vote(said["term"], name)
                if said["kind"] == "vote" and said["granted"]:
                    assert self.disks[name] == Vote(said["term"], action.to)
                self.flying.append((name, action.to, copy.deepcopy(dict(said))))
        self.check()

    def crash(self, name):
        self.nodes[name] = self._new(name)
        self.paused.discard(name)
        self.nodes[name].campaign(self.now)
        self.check()

    def check(self):
        for name, node in self.nodes.items():
            if node.leads:
                assert self.leaders.setdefault(node.term, name) == name, f"two leaders in term {node.term}"
        valid = [name for name, node in self.nodes.items() if node.lease_until > self.now]
        assert self.lied or len(valid) <= 1, f"{valid} hold a lease at the same time"

    def valid(self):
        return [name for name, node in self.nodes.items() if node.lease_until > self.now]

    def deliver(self, index, *, keep=False, stop_after=None):
        if not self.flying:
            return
        index %= len(self.flying)
        sender, to, message = self.flying[index]
        if not keep:
            del self.flying[index]
        if frozenset((sender, to)) not in self.cut and to not in self.paused:
            self.perform(
                to, self.nodes[to].receive(sender, copy.deepcopy(message), self.now), stop_after=stop_after
            )

    def advance(self, seconds):
        self.now += seconds
        self.check()
        for name in self.names:
            node = self.nodes[name]
            if name not in self.paused and self.now >= node.next_tick:
                self.perform(name, node.tick(self.now))
            if name not in self.paused and not node.campaigning:
                self.perform(name, node.campaign(self.now))

    def run(self, seconds, latency=0.01, until=lambda: False):
        """Let everything work as it should."""
        end = self.now + seconds
        while self.now < end and not until():
            for _ in range(len(self.flying)):
                self.deliver(0)
            self.advance(latency)
        return until()


steps = st.one_of(
    st.tuples(st.just("deliver"), st.integers(0, 50)),
    st.tuples(st.just("deliver"), st.integers(0, 50)),
    st.tuples(st.just("deliver"), st.integers(0, 50)),
    st.tuples(st.just("double"), st.integers(0, 50)),
    st.tuples(st.just("lose"), st.integers(0, 50)),
    st.tuples(st.just("advance"), st.floats(0.001, 0.4)),
    st.tuples(st.just("advance"), st.floats(0.001, 0.4)),
    st.tuples(st.just("leap"), st.floats(0.5, 3.0)),
    st.tuples(st.just("settle"), st.floats(0.1, 2.0)),
    st.tuples(st.just("crash"), st.integers(0, 6)),
    st.tuples(st.just("crash in"), st.integers(0, 50), st.integers(0, 2)),
    st.tuples(st.just("pause"), st.integers(0, 6)),
    st.tuples(st.just("wake"), st.integers(0, 6)),
    st.tuples(st.just("cut"), st.integers(0, 6), st.integers(0, 6)),
    st.tuples(st.just("heal"),),
    st.tuples(st.just("resign"), st.integers(0, 6)),
    st.tuples(st.just("above"), st.integers(0, 6), st.integers(0, 9)),
)  # fmt: skip


def play(cluster, schedule):
    for step in schedule:
        name = (
            cluster.names[step[1] % len(cluster.names)]
            if len(step) > 1 and isinstance(step[1], int)
            else None
        )
        node = cluster.nodes.get(name) if name else None
        match step:
            case ("deliver", index):
                cluster.deliver(index)
            case ("double", index):
                cluster.deliver(index, keep=True)
            case ("lose", index) if cluster.flying:
                del cluster.flying[index % len(cluster.flying)]
            case ("advance" | "leap", seconds):
                cluster.advance(seconds)
            case ("settle", seconds):
                cluster.run(seconds)
            case ("crash", _):
                cluster.crash(name)
            case ("crash in", index, after):
                cluster.deliver(index, stop_after=after)
            case ("pause", _):
                cluster.paused.add(name)
            case ("wake", _):
                cluster.paused.discard(name)
            case ("cut", _, other):
                cluster.cut.add(frozenset((name, cluster.names[other % len(cluster.names)])))
            case ("heal",):
                cluster.cut.clear()
            case ("resign", _) if name not in cluster.paused:
                cluster.perform(name, node.campaign(cluster.now, wanted=False))
            case ("above", _, more) if name not in cluster.paused:
                cluster.perform(name, node.campaign(cluster.now, above=node.term + more))
            case ("disconnect", _, other) if name not in cluster.paused:
                node.disconnected(cluster.names[other % len(cluster.names)], cluster.now)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from([1, 3, 3, 5]), st.integers(0, 2**32), st.lists(steps, max_size=120))
def test_never_two_leaders_in_a_term_nor_two_leases_at_a_time_and_in_the_end_one(size, seed, schedule):
    cluster = Cluster(size, seed)
    play(cluster, schedule)
    cluster.paused.clear()
    cluster.cut.clear()
    assert cluster.run(20 * LEASE, until=lambda: len(cluster.valid()) == 1), "nobody was elected"
    # What was still on its way may depose it once more. After that, undisturbed, it stays, and all others follow it.
    cluster.run(5 * LEASE)
    assert cluster.run(20 * LEASE, until=lambda: len(cluster.valid()) == 1)
    leader = cluster.nodes[cluster.valid()[0]]
    cluster.run(3 * LEASE)
    assert cluster.valid() == [leader.name]
    assert {node.leader for node in cluster.nodes.values()} == {leader.name}


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([3, 5]),
    st.integers(0, 2**32),
    st.lists(
        st.one_of(steps, st.tuples(st.just("disconnect"), st.integers(0, 6), st.integers(0, 6))), max_size=120
    ),
)
def test_untrue_disconnections_never_give_two_leaders_in_a_term(size, seed, schedule):
    cluster = Cluster(size, seed)
    cluster.lied = True
    play(cluster, schedule)


def test_long_random_runs_elect_and_keep_the_rules():
    """The same over schedules that are longer than hypothesis likes, and without shrinking."""
    kinds = (
        ["deliver"] * 40
        + ["double", "lose", "crash", "pause", "wake", "wake", "cut", "heal", "resign"]
        + ["advance"] * 12
    )
    elected = 0
    for seed in range(60):
        rng = random.Random(seed)
        cluster = Cluster(rng.choice([3, 5]), seed)
        for _ in range(1500):
            kind = rng.choice(kinds)
            arguments = {
                "heal": (),
                "advance": (rng.uniform(0.001, 0.1),),
                "cut": (rng.randrange(7), rng.randrange(7)),
            }
            play(cluster, [(kind, *arguments.get(kind, (rng.randrange(50),)))])
        elected += len(cluster.leaders)
    assert elected > 100, "the schedules are too hostile to show anything"


def elect(size=3, seed=0):
    cluster = Cluster(size, seed)
    assert cluster.run(5, until=lambda: len(cluster.valid()) == 1)
    cluster.run(0.5)
    return cluster, cluster.valid()[0]


def test_a_minority_elects_nobody_and_raises_no_term():
    cluster, leader = elect(5)
    alone = [name for name in cluster.names if name != leader][:2]
    rest = [name for name in cluster.names if name not in alone]
    cluster.cut = {frozenset((one, other)) for one in alone for other in rest}
    before = {name: cluster.nodes[name].term for name in cluster.names}
    for _ in range(100):
        cluster.run(0.5)
        assert cluster.valid() == [leader]
    assert {name: cluster.nodes[name].term for name in cluster.names} == before
    cluster.cut.clear()
    cluster.run(3)
    assert cluster.valid() == [leader]
    assert {name: cluster.nodes[name].term for name in cluster.names} == before


def test_a_leader_that_is_cut_off_loses_its_lease_before_another_has_one():
    cluster, leader = elect(3)
    term = cluster.nodes[leader].term
    cluster.cut = {frozenset((leader, other)) for other in cluster.names if other != leader}
    assert cluster.run(10, latency=0.001, until=lambda: cluster.valid() == [])
    assert cluster.run(10, latency=0.001, until=lambda: len(cluster.valid()) == 1)
    new = cluster.valid()[0]
    assert new != leader
    assert cluster.nodes[new].term > term
    cluster.cut.clear()
    cluster.run(3)
    assert cluster.valid() == [new]
    assert cluster.nodes[leader].leader == new


def test_a_leader_that_slept_has_no_lease_when_it_wakes():
    cluster, leader = elect(3)
    cluster.paused.add(leader)
    assert cluster.run(10, until=lambda: any(name != leader for name in cluster.valid()))
    cluster.run(2)
    new = cluster.valid()
    cluster.paused.clear()
    assert cluster.nodes[leader].leads
    assert cluster.nodes[leader].lease_until < cluster.now
    cluster.run(2)
    assert cluster.valid() == new
    assert not cluster.nodes[leader].leads


@pytest.mark.parametrize("told", [True, False])
def test_a_death_that_is_told_is_not_waited_for(told):
    times = []
    for seed in range(20):
        cluster, leader = elect(3, seed)
        cluster.paused.add(leader)
        cluster.lied = told
        begun = cluster.now
        if told:
            for name in cluster.names:
                cluster.nodes[name].disconnected(leader, cluster.now)
        assert cluster.run(
            10, latency=0.002, until=lambda cluster=cluster, leader=leader: set(cluster.valid()) - {leader}
        )
        times.append(cluster.now - begun)
    assert max(times) < 0.5 * LEASE if told else min(times) > 0.7 * LEASE
    assert max(times) < 3 * LEASE


def test_who_resigns_is_followed_at_once():
    cluster, leader = elect(3)
    begun = cluster.now
    node = cluster.nodes[leader]
    cluster.perform(leader, node.campaign(cluster.now, wanted=False))
    assert node.lease_until == -math.inf
    assert cluster.run(10, latency=0.002, until=lambda: len(cluster.valid()) == 1)
    assert cluster.now - begun < LEASE


def test_terms_are_above_what_was_asked_for():
    cluster, leader = elect(3)
    node = cluster.nodes[leader]
    cluster.perform(leader, node.campaign(cluster.now, above=1000))
    assert cluster.run(
        10, until=lambda: len(cluster.valid()) == 1 and cluster.nodes[cluster.valid()[0]].term > 1000
    )


def test_a_voter_that_was_restarted_waits_before_it_helps_another():
    cluster, leader = elect(3)
    follower, other = (name for name in cluster.names if name != leader)
    cluster.crash(follower)
    term = cluster.nodes[follower].term
    ask = {"kind": "ask", "term": term + 1}
    assert cluster.nodes[follower].receive(other, ask, cluster.now)[0].message["granted"] is False
    assert cluster.nodes[follower].receive(other, ask, cluster.now + LEASE)[0].message["granted"] is True


def test_who_follows_a_leader_votes_for_nobody_else_until_it_was_silent_for_a_lease():
    cluster, leader = elect(3)
    follower, other = (cluster.nodes[name] for name in cluster.names if name != leader)
    term, heard = follower.term, cluster.now
    follower.receive(leader, {"kind": "heartbeat", "term": term, "beat": 99}, heard)
    request = {"kind": "request", "term": term + 1}
    (answer,) = follower.receive(other.name, request, heard + 0.9 * LEASE)
    assert (answer.message["granted"], follower.term) == (False, term)
    persist, answer = follower.receive(other.name, request, heard + LEASE)
    assert persist == Persist(Vote(term + 1, other.name))
    assert answer.message["granted"] is True
    # Told twice, it says the same; another one gets nothing in that term.
    assert follower.receive(other.name, request, heard + 2.5 * LEASE)[-1].message["granted"] is True
    assert follower.receive(leader, request, heard + 5 * LEASE)[-1].message["granted"] is False


def test_a_leader_of_an_old_term_is_told_so_and_not_followed():
    cluster, leader = elect(3)
    follower = next(node for node in cluster.nodes.values() if node.name != leader)
    old, later = follower.term, cluster.now + 2 * LEASE
    other = next(name for name in cluster.names if name not in (leader, follower.name))
    follower.receive(other, {"kind": "request", "term": old + 5}, later)
    (answer,) = follower.receive(leader, {"kind": "heartbeat", "term": old, "beat": 1}, later + 0.1)
    assert answer.message == {"kind": "stale", "term": old, "known": old + 5}
    assert follower.leader is None
    node = cluster.nodes[leader]
    assert node.receive(follower.name, answer.message, later + 0.1) == [Persist(Vote(old + 5))]
    assert not node.leads


def test_a_lease_counts_from_when_it_was_asked_for_not_from_when_the_answer_came():
    node = Election("a", ["a", "b", "c"], now=0.0, lease=LEASE, rng=random.Random(0))
    node.campaign(0.0)
    node.tick(1.0)
    requests = node.receive("b", {"kind": "would", "term": 1, "granted": True}, 1.1)
    assert [action.message["kind"] for action in requests if isinstance(action, Send)] == [
        "request",
        "request",
    ]
    beats = node.receive("c", {"kind": "vote", "term": 1, "granted": True}, 1.5)
    assert node.lease_until == pytest.approx(1.1 + 0.9 * LEASE)
    beat = beats[0].message["beat"]
    node.receive("b", {"kind": "alive", "term": 1, "beat": beat + 1}, 1.6)
    assert node.lease_until == pytest.approx(1.1 + 0.9 * LEASE), "a beat that was never sent"
    node.receive("b", {"kind": "alive", "term": 1, "beat": beat}, 1.8)
    assert node.lease_until == pytest.approx(1.5 + 0.9 * LEASE)
    (first, *_) = node.tick(1.9)
    node.receive("c", {"kind": "alive", "term": 1, "beat": first.message["beat"]}, 2.3)
    assert node.lease_until == pytest.approx(1.9 + 0.9 * LEASE)
    assert node.tick(1.9 + 0.9 * LEASE) == []
    assert not node.leads


@pytest.mark.parametrize(
    "message",
    [
        {}, {"kind": "vote"}, {"kind": "vote", "term": "9"}, {"kind": "vote", "term": True, "granted": True}, {"kind": "heartbeat", "term": -1},
        {"kind": "alive", "term": 1, "beat": []}, {"kind": "nonsense", "term": 1}, {"kind": "stale", "term": 1, "known": "x"},
    ],
)  # fmt: skip
def test_what_makes_no_sense_changes_nothing(message):
    cluster, leader = elect(3)
    node = cluster.nodes[leader]
    before = (node.term, node.leads, node.lease_until)
    peer = next(name for name in cluster.names if name != leader)
    assert not any(isinstance(action, Persist) for action in node.receive(peer, message, cluster.now))
    node.receive("stranger", {"kind": "request", "term": 99}, cluster.now)
    assert (node.term, node.leads, node.lease_until) == before


@pytest.mark.parametrize(
    ("name", "names", "said"),
    [
        ("a", ["a", "b"], "2 is even"),
        ("a", ["a", "b", "b"], "give each one another name"),
        ("x", ["a", "b", "c"], "candidate 'x': is not among"),
        ("a", [], "0 is even"),
    ],
)
def test_a_list_that_cannot_vote_is_refused(name, names, said):
    with pytest.raises(InputError, match=said):
        Election(name, names, now=0.0)
