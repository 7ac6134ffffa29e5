"""The vote of an odd number of candidates, without I/O: the clock and the randomness are passed in.

Raft's leader election (Ongaro and Ousterhout, 2014) without its log, with the pre-vote and the leader lease of
Ongaro's thesis (sections 9.6, 6.4):

- a candidate asks for votes in a term of its own; each voter gives one vote a term, and stores it before it answers;
- it first asks, without effect, whether it would be elected, so that who is cut off does not raise the term;
- who votes for a leader, or hears from it, promises not to help another for `lease` seconds. The leader counts from
  the moment it asked, the voters from the moment they were asked, which is later: a leader whose majority answered
  within that time has the only valid lease, provided that clocks run at about the same speed (`MARGIN`) and that no
  `disconnected` was untrue. That two never lead in one term needs neither.

Term 0 is "never voted". A voter that was restarted waits for `lease` seconds before it helps anybody, for it has
forgotten what it promised.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_runtime.errors import InputError
from elastic_runtime.membership.leadership.lease import MARGIN

__all__ = ["Action", "Election", "Persist", "Send", "Vote"]


@dataclass(frozen=True)
class Vote:
    """What a candidate must not forget."""

    term: int = 0
    """Highest term that it knows of."""
    voted_for: str = ""
    """Whom it gave its vote in that term; empty if nobody yet."""


@dataclass(frozen=True)
class Persist:
    """Store this on disk before any later action is carried out."""

    vote: Vote


@dataclass(frozen=True)
class Send:
    """Send a message; it may be lost."""

    to: str
    message: Mapping[str, Any] = field(hash=False)


Action = Persist | Send


class Election:
    """One candidate's state. Methods return what is to be done, in this order; call `tick` at `next_tick`."""

    def __init__(
        self,
        name: str,
        candidates: Iterable[str],
        *,
        now: float,
        vote: Vote | None = None,
        lease: float = 1.0,
        rng: random.Random | None = None,
    ) -> None:
        """Start, or start again with the `vote` that was stored. `lease` is in seconds.

        Raises `InputError` if the candidates are not an odd number of names that differ, this one's among them.
        """
        names = list(candidates)
        if len(set(names)) != len(names) or not all(isinstance(each, str) and each for each in names):
            raise InputError(f"candidates {names!r}: give each one another name")
        if len(names) % 2 == 0:
            raise InputError(
                f"candidates {names!r}: {len(names)} is even: an even number cannot outvote more losses than one "
                "fewer; give an odd number (of two hosts, the launcher is the third)"
            )
        if name not in names:
            raise InputError(f"candidate {name!r}: is not among the candidates {names!r}")
        if not 0 < lease < math.inf:
            raise InputError(f"lease {lease!r}: is not a number of seconds above 0")
        self.name = name
        self._peers = tuple(each for each in names if each != name)
        self._majority = len(names) // 2 + 1
        self._length = lease
        self._rng = rng or random.Random()
        self._vote = vote or Vote()
        self.campaigning = False
        """Whether it wants to lead, not only to vote; see `campaign`."""
        self.leader: str | None = None
        """Who leads as far as this one knows; itself when it does."""
        self._role = "follower"  # or "asking" (without effect), "candidate", "leader"
        self._promised = now + lease if self.term else -math.inf
        self._backoff = 0.0
        self._next_try = now + self._pause()
        self._supporters: set[str] = set()
        self._asked = now
        self._beat = 0
        self._next_beat = math.inf
        self._sent: dict[int, float] = {}
        self._acked: dict[str, float] = {}

    @property
    def term(self) -> int:
        """Highest term that it knows of; the term of its lease while it leads."""
        return self._vote.term

    @property
    def leads(self) -> bool:
        """Whether it was elected in `term` and has not heard of another; see `lease_until` for whether that holds."""
        return self._role == "leader"

    @property
    def lease_until(self) -> float:
        """Until when its lease lasts; minus infinity if it does not lead."""
        if self._role != "leader":
            return -math.inf
        # The majority-th youngest answer, its own counting as now.
        answers = sorted((self._acked.get(peer, -math.inf) for peer in self._peers), reverse=True)
        needed = self._majority - 1
        heard = answers[needed - 1] if needed else math.inf
        return heard + self._length * (1 - MARGIN)

    @property
    def next_tick(self) -> float:
        """When `tick` is to be called, if nothing else happens before."""
        if self._role == "leader":
            return min(self._next_beat, self.lease_until)
        return max(self._next_try, self._promised) if self.campaigning else math.inf

    def campaign(self, now: float, *, wanted: bool = True, above: int = 0) -> list[Action]:
        """Want to lead, in a term above `above`, or not any more (a leader gives up and says so).

        Who loses its lease does not try again until it is asked to.
        """
        actions = self._resign() if not wanted or self.term <= above else []
        self.campaigning = wanted
        if above > self.term:
            actions.append(self._store(Vote(above)))
        if wanted and self._role == "follower":
            self._next_try = min(self._next_try, now + self._pause())
        return actions

    def tick(self, now: float) -> list[Action]:
        """Do what time asks for."""
        if self._role == "leader":
            if now >= self.lease_until:
                # It may have been replaced. Its followers see it in its silence.
                self._follow(None)
            elif now >= self._next_beat:
                return self._heartbeat(now)
            return []
        if self.campaigning and now >= self._next_try and now >= self._promised:
            self._backoff = min(2 * self._backoff + self._length / 16, self._length)
            self._next_try = now + self._length / 8 + self._pause()
            self._role, self.leader = "asking", None
            return self._ask(now)
        return []

    def connected(self, now: float) -> None:
        """A peer can be reached from now on: a candidate that waits may try soon."""
        if self._role != "leader":
            self._next_try = min(self._next_try, now + self._rng.uniform(0.0, self._length / 16))

    def disconnected(self, peer: str, now: float) -> None:
        """The system of `peer` says that its process is gone: a leader that died need not be waited for."""
        if peer == self.leader:
            self.leader = None
            self._promised = min(self._promised, now)
            self._next_try = min(self._next_try, now + self._pause())

    def receive(self, sender: str, message: Mapping[str, Any], now: float) -> list[Action]:
        """Take a message in; one that makes no sense is ignored (peers are authenticated, so it is an old one)."""
        term = message.get("term")
        if sender not in self._peers or type(term) is not int or term < 1:
            return []
        kind = message.get("kind")
        if kind == "ask":
            grant = term > self.term and self._free(now)
            return [self._answer(sender, "would", term, granted=grant)]
        if kind == "would":
            if self._role == "asking" and term == self.term + 1 and message.get("granted") is True:
                return self._supported(sender, now)
            return self._learn(message.get("known"))
        if kind == "request":
            return self._on_request(sender, term, now)
        if term < self.term:
            # An old leader learns from the answer that it is one.
            return [self._answer(sender, "stale", term)] if kind == "heartbeat" else []
        if kind == "vote":
            if self._role == "candidate" and term == self.term and message.get("granted") is True:
                return self._supported(sender, now)
            return self._learn(message.get("known"))
        if kind == "heartbeat":
            return self._on_heartbeat(sender, term, message.get("beat"), now)
        if kind == "alive" and self._role == "leader" and term == self.term:
            beat = message.get("beat")
            sent = self._sent.get(beat) if type(beat) is int else None
            if sent is not None:
                self._acked[sender] = max(sent, self._acked.get(sender, -math.inf))
        elif kind == "stale":
            return self._learn(message.get("known"))
        elif kind == "resign" and term == self.term and sender == self.leader:
            self._follow(None)
            self._promised = min(self._promised, now)
            self._next_try = min(self._next_try, now + self._pause())
        return []

    # Votes

    def _free(self, now: float) -> bool:
        """Whether it has promised nobody to wait."""
        return now >= (self.lease_until if self._role == "leader" else self._promised)

    def _on_request(self, sender: str, term: int, now: float) -> list[Action]:
        if term < self.term or not self._free(now):
            return [self._answer(sender, "vote", term, granted=False)]
        actions: list[Action] = []
        if term > self.term:
            self._follow(None)
            self._vote = Vote(term)
        granted = self._vote.voted_for in ("", sender)
        if granted:
            if self._role == "asking":
                self._follow(None)  # Its question was whether it may stand now; it has just promised to wait.
            actions.append(self._store(Vote(term, sender)))
            self._promised = now + self._length
        actions.append(self._answer(sender, "vote", term, granted=granted))
        return actions

    def _ask(self, now: float) -> list[Action]:
        self._supporters, self._asked = {self.name}, now
        if len(self._supporters) >= self._majority:
            return self._stand(now)
        message = {"kind": "ask", "term": self.term + 1}
        return [Send(peer, message) for peer in self._peers]

    def _supported(self, sender: str, now: float) -> list[Action]:
        self._supporters.add(sender)
        if len(self._supporters) < self._majority:
            return []
        return self._stand(now) if self._role == "asking" else self._lead(now)

    def _stand(self, now: float) -> list[Action]:
        """Ask for votes that count, beginning with its own."""
        self._role, self._supporters, self._asked = "candidate", {self.name}, now
        actions: list[Action] = [self._store(Vote(self.term + 1, self.name))]
        self._promised = now
        if len(self._supporters) >= self._majority:
            return actions + self._lead(now)
        message = {"kind": "request", "term": self.term}
        return actions + [Send(peer, message) for peer in self._peers]

    # Leading and following

    def _lead(self, now: float) -> list[Action]:
        self._role, self.leader, self._backoff = "leader", self.name, 0.0
        self._sent.clear()
        # Who voted has promised from when it was asked on.
        self._acked = dict.fromkeys(self._supporters - {self.name}, self._asked)
        return self._heartbeat(now)

    def _heartbeat(self, now: float) -> list[Action]:
        self._next_beat = now + self._length / 5
        self._beat += 1
        self._sent[self._beat] = now
        for old in [beat for beat, sent in self._sent.items() if sent < now - 2 * self._length]:
            del self._sent[old]
        message = {"kind": "heartbeat", "term": self.term, "beat": self._beat}
        return [Send(peer, message) for peer in self._peers]

    def _on_heartbeat(self, sender: str, term: int, beat: Any, now: float) -> list[Action]:
        actions: list[Action] = []
        if term > self.term:
            self._follow(sender)
            actions.append(self._store(Vote(term)))
        elif self._role == "leader":
            # Only a voter that lost what it stored can have elected both: neither may go on.
            self._follow(None)
            return [self._store(Vote(term + 1)), self._answer(sender, "stale", term)]
        self._follow(sender)
        self._backoff = 0.0
        self._promised = now + self._length
        self._next_try = self._promised + self._pause()
        actions.append(Send(sender, {"kind": "alive", "term": term, "beat": beat}))
        return actions

    def _resign(self) -> list[Action]:
        if self._role != "leader":
            if self._role != "follower":
                self._follow(None)
            return []
        self._follow(None)
        message = {"kind": "resign", "term": self.term}
        return [Send(peer, message) for peer in self._peers]

    def _follow(self, leader: str | None) -> None:
        if self._role == "leader":
            self.campaigning = False
        self._role, self.leader = "follower", leader
        self._supporters = set()
        self._next_beat = math.inf

    def _learn(self, term: Any) -> list[Action]:
        """Take over a higher term that a peer knows of."""
        if type(term) is not int or term <= self.term:
            return []
        self._follow(None)
        return [self._store(Vote(term))]

    def _answer(self, to: str, kind: str, term: int, **details: Any) -> Send:
        return Send(to, {"kind": kind, "term": term, "known": self.term, **details})

    def _store(self, vote: Vote) -> Persist:
        assert vote.term >= self._vote.term
        self._vote = vote
        return Persist(vote)

    def _pause(self) -> float:
        """A random time that keeps candidates from asking at the same moment again and again."""
        return self._rng.uniform(0.0, self._length / 16 + self._backoff)
