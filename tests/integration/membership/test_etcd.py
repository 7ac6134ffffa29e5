"""Leadership by etcd, against a real etcd of the test's own."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from shutil import which

import pytest

from elastic_runtime.errors import InputError
from elastic_runtime.membership.leadership import Keeper
from elastic_runtime.membership.leadership.etcd import EtcdLeadership
from elastic_runtime.membership.leadership.http_json import HttpUnreachable, JsonHttp

pytestmark = pytest.mark.skipif(which("etcd") is None, reason="needs etcd (Debian: etcd-server)")

HOLD = """
import sys, time
from elastic_runtime.membership.leadership.etcd import EtcdLeadership
from elastic_runtime.membership.leadership import Keeper
lost = []
lease = EtcdLeadership([sys.argv[1]], "/job/leader", holder=sys.argv[2], ttl=2).acquire(60)
Keeper(lease, lambda lease: lost.append(1))
print(lease.term, flush=True)
while not lost:
    time.sleep(0.01)
print("lost", lease.valid(time.monotonic()), flush=True)
"""


class Etcd:
    """An etcd server with a folder and ports of its own."""

    def __init__(self, sandbox, folder):
        self.sandbox, self.folder = sandbox, folder
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
            self.url, self.peer = (f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in (one, two))
        self.process = None

    def start(self):
        self.process = self.sandbox.start(
            "etcd", "--name", "test", "--data-dir", self.folder / "etcd", "--listen-client-urls", self.url,
            "--advertise-client-urls", self.url, "--listen-peer-urls", self.peer, "--initial-advertise-peer-urls", self.peer,
            "--initial-cluster", f"test={self.peer}", "--heartbeat-interval", "50", "--election-timeout", "500", "--log-level", "error",
        )  # fmt: skip
        return self

    def ready(self):
        try:
            return JsonHttp(self.url).request("GET", "/health", timeout=1)[1]["health"] == "true"
        except HttpUnreachable:
            return False

    def stop(self):
        self.process.kill()
        self.process.communicate(timeout=30)

    def count(self):
        answer = JsonHttp(self.url).request("POST", "/v3/kv/range", {"key": "L2pvYi9sZWFkZXI="}, timeout=5)[1]
        return int(answer.get("count", 0))


@pytest.fixture
def etcd(sandbox, tmp_path, wait):
    server = Etcd(sandbox, tmp_path).start()
    try:
        wait(server.ready, what="etcd answers")
        yield server
    finally:
        server.stop()


def leadership(etcd, holder="me", ttl=2, **options):
    return EtcdLeadership([etcd.url], "/job/leader", holder=holder, ttl=ttl, **options)


def test_one_at_a_time_holds_the_key_in_terms_that_grow(etcd):
    first, second = leadership(etcd, "one"), leadership(etcd, "two")
    terms = []
    for _ in range(4):
        lease = first.acquire(30)
        assert lease.valid(time.monotonic())
        assert second.acquire(0.3) is None
        assert lease.renew()
        terms.append(lease.term)
        lease.release()
        assert not lease.valid(time.monotonic())
        assert etcd.count() == 0
        first, second = second, first
    assert sorted(set(terms)) == terms


def test_a_lease_outlives_its_ttl_only_while_it_is_renewed(etcd, wait):
    lease = leadership(etcd, "one").acquire(30)
    lost = []
    keeper = Keeper(lease, lost.append)
    other = leadership(etcd, "two")
    assert other.acquire(5.0) is None  # more than twice the ttl
    assert lost == []
    keeper.stop()
    taken = other.acquire(60)
    assert taken.term > lease.term
    assert not lease.valid(time.monotonic())
    assert not lease.renew()
    assert other.renew()


def test_a_killed_holder_is_replaced_and_a_paused_one_has_lost_it_when_it_wakes(etcd, sandbox):
    killed = sandbox.start(sys.executable, "-c", HOLD, etcd.url, "killed")
    first = int(killed.stdout.readline())
    paused = sandbox.start(sys.executable, "-c", HOLD, etcd.url, "paused")
    killed.kill()
    killed.communicate(timeout=30)
    second = int(paused.stdout.readline())
    paused.send_signal(signal.SIGSTOP)
    lease = leadership(etcd).acquire(60)
    assert first < second < lease.term
    paused.send_signal(signal.SIGCONT)
    out, errors = paused.communicate(timeout=60)
    assert (paused.returncode, out) == (0, "lost False\n"), errors


def test_who_waits_gets_it_soon_after_it_is_released(etcd):
    lease = leadership(etcd, "one", ttl=60).acquire(30)
    got = []
    waiter = threading.Thread(target=lambda: got.append(leadership(etcd, "two", ttl=60).acquire(30)))
    waiter.start()
    lease.release()
    waiter.join(60)
    assert got[0].term > lease.term


def test_a_key_that_somebody_removed_is_lost(etcd):
    lease = leadership(etcd).acquire(30)
    JsonHttp(etcd.url).request("POST", "/v3/kv/deleterange", {"key": "L2pvYi9sZWFkZXI="}, timeout=5)
    assert not lease.renew()
    assert not lease.valid(time.monotonic())


def test_while_etcd_is_away_a_lease_is_held_until_it_runs_out(etcd, wait):
    source = leadership(etcd)
    lease = source.acquire(30)
    etcd.stop()
    assert lease.renew()
    wait(lambda: not lease.renew(), timeout=60, what="it runs out")
    assert not lease.valid(time.monotonic())
    assert leadership(etcd).acquire(0.3) is None
    etcd.start()
    again = leadership(etcd, "later").acquire(60)
    assert again.term > lease.term


def test_an_answer_that_was_lost_does_not_lose_the_key(etcd, monkeypatch):
    """The key is ours by the transaction before, whose answer did not come: it is recognised by our lease."""
    source = leadership(etcd, ttl=30)
    real, lost = source._call, []

    def call(path, body, end):
        answer = real(path, body, end)
        if path == "/v3/kv/txn" and not lost:
            lost.append(answer)
            raise HttpUnreachable("the answer is lost")
        return answer

    monkeypatch.setattr(source, "_call", call)
    lease = source.acquire(30)
    assert lost
    assert lease.term == int(lost[0]["responses"][1]["response_range"]["kvs"][0]["create_revision"])
    assert lease.renew()


def test_the_next_endpoint_is_asked_when_one_is_not_there(etcd):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{unused.getsockname()[1]}"
        lease = EtcdLeadership([away, etcd.url], "/job/leader", holder="me", ttl=2).acquire(30)
        assert lease.renew()
        assert EtcdLeadership([away], "/job/leader", holder="me", ttl=2).acquire(0.3) is None


def test_an_etcd_that_the_job_did_not_have_before_is_refused(etcd):
    with pytest.raises(InputError, match=r"revision \d+ is not above term 1000, which the job has had"):
        leadership(etcd).acquire(30, above=1000)
    assert etcd.count() == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"endpoints": []}, "endpoints"), ({"endpoints": "http://a:1"}, "give a list"), ({"endpoints": ["etcd:2379"]}, "give http://HOST:PORT"),
        ({"endpoints": ["http://a:99999"]}, "give http://HOST:PORT"), ({"ttl": 0}, "ttl 0"), ({"ttl": 1.5}, "ttl 1.5"), ({"key": ""}, "key ''"),
        ({"endpoints": ["https://a:1"], "ca": "/no/such/file"}, "does not exist"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(options, said):
    given = {"endpoints": ["http://a:1"], "key": "k", "holder": "me", **options}
    with pytest.raises(InputError, match=said):
        EtcdLeadership(**given)
