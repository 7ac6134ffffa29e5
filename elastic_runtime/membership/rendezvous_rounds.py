"""The rounds of torchrun's agents, as a pure state machine: no I/O, the clock is passed in.

torchrun's unit is the node: its agent stops its own workers and asks for the next round. So this machine is smaller
than `machine.Membership`, and knows nothing of workers or budgets. What a node is in:

    idle ──join──▶ waiting ──go──▶ meeting ──all have met──▶ member ──join──▶ waiting …
                      ▲                │
                      └──── again ─────┘   somebody was lost before all had met

A round is let go when everybody who may be expected is there: as many nodes as the job may have; or, after a round
that broke, all its survivors; or, the first time, when nobody else came for `last_call` seconds. Members learn from
`waiting` that they should come: of a node that wants to join, and of one that was lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_runtime.membership.members import Worker, ranks

__all__ = ["Again", "Begin", "Proceed", "Reply", "Rounds"]

Address = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Proceed:
    """A node's place in a round; it connects to the store and says that it has met."""

    node: str
    round: int
    rank: int
    world: int
    store: Address
    """Store of the round; the node of rank 0 holds it."""


@dataclass(frozen=True, kw_only=True)
class Begin:
    """All nodes of the round have met."""

    node: str
    round: int


@dataclass(frozen=True, kw_only=True)
class Again:
    """The round came to nothing; the node joins again, with another store."""

    node: str
    round: int


Reply = Proceed | Begin | Again


@dataclass
class _Node:
    """One connected agent."""

    name: str
    state: str = "idle"
    """`idle`, `waiting`, `meeting` or `member`."""
    round: int = -1
    """The newest round that it was given a place in."""
    rank: int = -1
    store: Address = ("", 0)
    arrival: int = 0
    met: bool = False


class Rounds:
    """Who is in which round. Every input returns what to tell the nodes; `tick` is to be called ten times a second."""

    def __init__(
        self, minimum: int, maximum: int, *, now: float, last_call: float = 3.0, return_limit: float = 60.0,
        meeting_limit: float = 30.0, takeover: float = 3.0,
    ) -> None:  # fmt: skip
        """Prepare for a job of `minimum` to `maximum` nodes. All limits are in seconds.

        last_call: how long a first round that could begin waits for one more node, counted from the last arrival.
        return_limit: how long a broken round waits for the members that have not come back.
        meeting_limit: how long the nodes of a new round may take to meet.
        takeover: how long a machine that was started in mid-job waits for the nodes that it does not know yet.
        """
        self.minimum, self.maximum = minimum, maximum
        self.round = -1
        self.world = 0
        """Nodes of the current round when it was formed."""
        self.closed = False
        """Whether the job is over: no node gets a place any more."""
        self._last_call, self._return_limit, self._meeting_limit = last_call, return_limit, meeting_limit
        self._takeover_until = now + takeover
        self._nodes: dict[str, _Node] = {}
        self._arrivals = 0
        self._changed = now
        """When the last node arrived, was lost, or came back."""
        self._broken_since: float | None = None
        self._met_by = 0.0

    # --- what happens ------------------------------------------------------------------------------------------

    def connected(
        self, node: str, now: float, *, round: int, rank: int, world: int, member: bool
    ) -> list[Reply]:
        """An agent is there; it says in which round it has its place, and whether its workers run in it."""
        replies = self.lost(node, now) if node in self._nodes else []
        if self.closed:
            return replies
        self._nodes[node] = _Node(node, "member" if member else "idle", round, rank)
        if round > self.round:
            # A coordinator before this one led that round.
            self.round, self.world, self._broken_since = round, world, None
        return replies + self._look(now)

    def join(self, node: str, store: Address, now: float) -> list[Reply]:
        """A node wants a place in the next round, and offers a store for it."""
        known = self._nodes.get(node)
        if known is None or self.closed:
            return []
        replies = self._give_up_meeting(now) if known.state == "meeting" else []
        if known.state != "waiting":
            self._arrivals += 1
            known.arrival = self._arrivals
            self._changed = now
        known.state, known.store = "waiting", store
        return replies + self._look(now)

    def met(self, node: str, round: int, now: float) -> list[Reply]:
        """A node has reached the store of its round."""
        known = self._nodes.get(node)
        if known is None or known.state != "meeting" or known.round != round:
            return []
        known.met = True
        return self._look(now)

    def lost(self, node: str, now: float) -> list[Reply]:
        """A node's connection is gone."""
        known = self._nodes.pop(node, None)
        if known is None or self.closed:
            return []
        self._changed = now
        replies = self._give_up_meeting(now) if known.state == "meeting" else []
        return replies + self._look(now)

    def close(self) -> None:
        """A node says that the job is over."""
        self.closed = True

    def tick(self, now: float) -> list[Reply]:
        """Time went by."""
        return [] if self.closed else self._look(now)

    # --- what follows ------------------------------------------------------------------------------------------

    def waiting(self, node: str) -> int:
        """Return how many nodes wait for this one to come to the next round: torchrun's `num_nodes_waiting`.

        Above 0 as well when a member of its round is lost, or when the others have gone on without it.
        """
        return self.all_waiting().get(node, 0)

    def all_waiting(self) -> dict[str, int]:
        """Return `waiting` of every node that has its place in a round."""
        waiting = sum(n.state == "waiting" for n in self._nodes.values())
        current = max(1, waiting) if self._broken_since is not None else waiting
        if self._broken_since is None and self.world >= self.maximum:
            current = 0  # There is no room: those that wait are spares.
        return {
            name: 0 if self.closed else current if node.round == self.round else max(1, waiting)
            for name, node in self._nodes.items()
            if node.state == "member"
        }

    def is_spare(self, node: str) -> bool:
        """Return whether a node waits and was not in the current round."""
        known = self._nodes.get(node)
        return known is not None and known.state == "waiting" and known.round != self.round

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that are connected."""
        return tuple(self._nodes)

    def _look(self, now: float) -> list[Reply]:
        meeting = [n for n in self._nodes.values() if n.state == "meeting"]
        if meeting:
            if all(n.met for n in meeting):
                for node in meeting:
                    node.state = "member"
                return [Begin(node=n.name, round=self.round) for n in meeting] + self._look(now)
            return self._give_up_meeting(now) if now >= self._met_by else []
        staying = self._staying()
        if self.round >= 0 and len(staying) < self.world and not self._taking_over(now):
            self._broken_since = now if self._broken_since is None else self._broken_since
        waiting = [n for n in self._nodes.values() if n.state == "waiting"]
        if len(waiting) < self.minimum or not self._is_time(waiting, staying, now):
            return []
        return self._let_go(waiting, now)

    def _staying(self) -> list[_Node]:
        return [n for n in self._nodes.values() if n.state == "member" and n.round == self.round]

    def _taking_over(self, now: float) -> bool:
        """Whether nodes of a round that an earlier coordinator formed may still be on their way to this one."""
        known = sum(n.round == self.round for n in self._nodes.values())
        return now < self._takeover_until and known < self.world

    def _is_time(self, waiting: list[_Node], staying: list[_Node], now: float) -> bool:
        if self.round >= 0 and self._broken_since is None:
            return False  # A round runs, or its nodes are not all known yet.
        if staying:
            # They have been told, and have workers to stop first.
            assert self._broken_since is not None
            return now - max(self._broken_since, self._changed) >= self._return_limit
        survivors = any(n.round == self.round >= 0 for n in waiting)
        return survivors or len(waiting) >= self.maximum or now - self._changed >= self._last_call

    def _let_go(self, waiting: list[_Node], now: float) -> list[Reply]:
        """Give the places: who had a rank below the new size keeps it; who came late and finds no place waits on."""
        waiting.sort(
            key=lambda n: (n.round != self.round, n.rank if n.rank >= 0 else self.maximum, n.arrival)
        )
        size = min(len(waiting), self.maximum)
        known = [Worker(node=n.name, slot=0, spawn=0, rank=n.rank, round=n.round) for n in waiting]
        given = ranks(known, size)
        store = self._nodes[given[0].node].store
        self.round += 1
        self._takeover_until = now  # From here on it knows every node itself.
        self.world, self._broken_since, self._met_by = size, None, now + self._meeting_limit
        for rank, worker in given.items():
            node = self._nodes[worker.node]
            node.state, node.round, node.rank, node.met = "meeting", self.round, rank, False
        return [
            Proceed(node=worker.node, round=self.round, rank=rank, world=size, store=store)
            for rank, worker in given.items()
        ]

    def _give_up_meeting(self, now: float) -> list[Reply]:
        """The round will not come about: its nodes have to join again, for its store may be gone."""
        meeting = [n for n in self._nodes.values() if n.state == "meeting"]
        for node in meeting:
            node.state = "idle"
        self._broken_since, self._changed = now, now
        return [Again(node=n.name, round=self.round) for n in meeting]
