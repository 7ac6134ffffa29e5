"""Leadership by vote among three processes, with their leader killed, paused, stopped; and what one alone is refused."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest

from elastic_runtime.errors import InputError, IntegrityError
from elastic_runtime.membership.leadership.candidates import CandidateList, read_vote, write_vote
from elastic_runtime.membership.leadership.election import Vote
from elastic_runtime.membership.secret import create_secret

HERE = Path(__file__).parent
NAMES = ["a", "b", "c"]


class Candidates:
    """Candidate processes, and everything that they said, in the order in which it was heard."""

    def __init__(self, sandbox, folder, wait, lease):
        self.sandbox, self.folder, self.wait, self.lease = sandbox, folder, wait, lease
        create_secret(folder / "secret")
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in NAMES]
        self.addresses = {name: sock.getsockname() for name, sock in zip(NAMES, sockets, strict=True)}
        for sock in sockets:
            sock.close()
        self.processes, self.said, self.readers, self.ended = {}, [], [], []

    def start(self, name):
        process = self.sandbox.start(
            sys.executable,
            HERE / "candidate.py",
            name,
            self.folder,
            json.dumps(self.addresses),
            str(self.lease),
        )
        self.processes[name] = process
        reader = threading.Thread(target=self._read, args=[process])
        reader.start()
        self.readers.append(reader)

    def _read(self, process):
        for line in process.stdout:
            self.said.append(json.loads(line))

    def leads(self, *, not_in=(), above=0):
        """Wait for a leader of a term above `above`; return (name, term)."""

        def found():
            return [
                each for each in list(self.said)
                if each["what"] == "leads" and each["term"] > above and each["name"] not in not_in
            ]  # fmt: skip

        first = self.wait(found, timeout=60, what="a leader")[-1]
        return first["name"], first["term"]

    def forget(self, name):
        """Drop a process that has ended."""
        process = self.processes.pop(name)
        process.stderr.close()
        self.ended.append(process)

    def check(self):
        """No term had two leaders."""
        led = [each["term"] for each in self.said if each["what"] == "leads"]
        assert len(set(led)) == len(led), self.said

    def stop(self):
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        errors = []
        for name, process in self.processes.items():
            process.wait(30)
            errors.append((name, process.returncode, process.stderr.read()))
            process.stderr.close()
        for reader in self.readers:
            reader.join(30)
        for process in [*self.processes.values(), *self.ended]:
            process.stdout.close()
        return errors


@pytest.fixture
def start(sandbox, tmp_path, wait):
    """Give a function that starts three candidates; all of them are ended, without an error."""
    made = []

    def begin(lease=1.0):
        candidates = Candidates(sandbox, tmp_path, wait, lease)
        made.append(candidates)
        for name in NAMES:
            candidates.start(name)
        return candidates

    yield begin
    for candidates in made:
        errors = candidates.stop()
        candidates.check()
        for name, code, text in errors:
            assert code in (0, -signal.SIGKILL, -signal.SIGTERM), (name, code, text)
            assert "Traceback" not in text, (name, text)


def test_a_killed_leader_is_replaced_in_a_later_term_and_may_come_back(start):
    candidates = start()
    leader, term = candidates.leads()
    for _ in range(4):
        killed = candidates.processes[leader]
        killed.kill()
        killed.wait(30)
        candidates.forget(leader)
        before = leader
        leader, new = candidates.leads(above=term)
        assert new > term
        assert leader != before
        term = new
        candidates.start(before)
    assert not any(each["what"] == "lost" for each in candidates.said)


def test_a_paused_leader_is_replaced_and_has_lost_its_lease_when_it_wakes(start, wait):
    candidates = start(lease=0.5)
    leader, term = candidates.leads()
    candidates.processes[leader].send_signal(signal.SIGSTOP)
    _, new = candidates.leads(not_in=[leader], above=term)
    assert new > term
    candidates.processes[leader].send_signal(signal.SIGCONT)
    lost = wait(
        lambda: [each for each in list(candidates.said) if each["what"] == "lost" and each["name"] == leader],
        what="the paused leader notices",
    )
    assert lost[0]["term"] == term


def test_one_of_three_leads_nobody(start, wait):
    candidates = start(lease=0.5)
    leader, term = candidates.leads()
    others = [name for name in NAMES if name != leader]
    for name in others:
        candidates.processes[name].send_signal(signal.SIGSTOP)
    wait(lambda: any(each["what"] == "lost" for each in list(candidates.said)), what="it steps down")
    heard = len(candidates.said)
    candidates.processes[others[0]].send_signal(signal.SIGCONT)
    # With a majority again there is a leader again, and none of the terms between was anybody's.
    _, new = candidates.leads(above=term)
    assert new > term
    assert [each["what"] for each in candidates.said[heard - 1 : heard + 1]] == ["lost", "leads"]


def test_a_leader_that_ends_politely_hands_over(start):
    candidates = start(lease=30.0)  # longer than this test: nobody waits for it
    leader, term = candidates.leads()
    candidates.processes[leader].terminate()
    _, new = candidates.leads(not_in=[leader], above=term)
    assert new > term


@pytest.fixture
def alone(tmp_path):
    """A candidate in this process, the only one of its list."""
    listener = socket.create_server(("127.0.0.1", 0))
    made = CandidateList(
        "x",
        {"x": listener.getsockname()},
        secret=bytes(32),
        vote_file=tmp_path / "vote",
        listener=listener,
        lease=0.5,
    )
    yield made
    made.close()


def test_one_candidate_leads_itself_in_terms_that_grow(alone, tmp_path):
    first = alone.acquire(10)
    assert first is not None
    assert alone.acquire(10) is first
    assert first.renew()
    first.release()
    assert not first.valid(0.0)
    assert not first.renew()
    second = alone.acquire(10, above=first.term + 7)
    assert second.term == first.term + 8
    third = alone.acquire(10, above=second.term)
    assert third.term == second.term + 1
    assert not second.valid(0.0)
    assert alone.leader == "x"
    assert read_vote(tmp_path / "vote") == Vote(third.term, "x")


def test_without_peers_nobody_is_elected_within_the_time(tmp_path):
    listener, ghost = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    addresses = {"x": listener.getsockname(), "y": ghost.getsockname(), "z": ghost.getsockname()}
    one = CandidateList(
        "x", addresses, secret=bytes(32), vote_file=tmp_path / "v", listener=listener, lease=0.1
    )
    try:
        assert one.acquire(1.0) is None
        assert one.term == 0
    finally:
        one.close()
        ghost.close()


def test_peers_with_another_list_are_turned_away(tmp_path, caplog, wait):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(5)]
    at = {name: sock.getsockname() for name, sock in zip("abcde", sockets, strict=True)}
    three, five = {name: at[name] for name in "abc"}, at
    made = [
        CandidateList(name, known, secret=bytes(32), vote_file=tmp_path / name, listener=sock, lease=0.2)
        for name, known, sock in zip("abc", [three, five, five], sockets, strict=False)
    ]
    try:
        assert made[0].acquire(1.0) is None
        wait(lambda: "give all the same list" in caplog.text)
    finally:
        for each in made:
            each.close()
        for sock in sockets:
            sock.close()


def test_a_vote_that_cannot_be_stored_is_not_given(alone, tmp_path):
    (tmp_path / "vote").mkdir()  # in the place of the file
    with pytest.raises(InputError, match=r"candidate 'x' can take part no longer; give a file on a disk"):
        alone.acquire(10)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"schema": 2, "term": 1, "voted_for": ""}',
        '{"schema": 1, "term": "1", "voted_for": ""}',
    ],
)
def test_a_damaged_vote_is_refused(tmp_path, content):
    path = tmp_path / "vote"
    path.write_text(content)
    with pytest.raises(IntegrityError, match="vote "):
        read_vote(path)


def test_a_stored_vote_is_read_back(tmp_path):
    path = tmp_path / "vote"
    assert read_vote(path) == Vote()
    for vote in (Vote(1, "a"), Vote(2), Vote(2, "b")):
        write_vote(path, vote)
        assert read_vote(path) == vote
    assert [entry.name for entry in tmp_path.iterdir()] == ["vote"]


def test_two_candidates_cannot_share_a_memory(alone, tmp_path):
    with pytest.raises(InputError, match="another candidate has it: give each a file of its own"):
        CandidateList("x", {"x": ("127.0.0.1", 1)}, secret=bytes(32), vote_file=tmp_path / "vote")
    assert alone.acquire(10) is not None
    with pytest.raises(InputError, match="give a folder that can be written"):
        CandidateList("x", {"x": ("127.0.0.1", 1)}, secret=bytes(32), vote_file=tmp_path / "none" / "vote")
