"""Leadership by a Kubernetes Lease, against an HTTP server that keeps Leases as the recorded API server does."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from pathlib import Path

import pytest

from elastic_runtime.errors import InputError, MissingFileError
from elastic_runtime.membership.leadership import Keeper
from elastic_runtime.membership.leadership.http_json import HttpUnreachable
from elastic_runtime.membership.leadership.kubernetes import Conflict, HttpLeaseClient, KubernetesLease

_spec = importlib.util.spec_from_file_location("lease_api", Path(__file__).with_name("lease_api.py"))
lease_api = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(lease_api)

RECORDED = Path(__file__).parents[4] / "shared" / "kubernetes" / "recorded" / "lease.jsonl"


@pytest.fixture
def api():
    server = lease_api.LeaseApi()
    yield server
    server.close()


def leadership(api, holder="me", duration=1, **options):
    return KubernetesLease(
        HttpLeaseClient(api.url, "ns"), "leader", holder=holder, duration=duration, **options
    )


@pytest.mark.skipif(not RECORDED.exists(), reason="the recorded Kubernetes exchanges are not here")
def test_our_server_answers_as_the_recorded_one(api):
    compared = 0
    for line in RECORDED.read_text().splitlines():
        exchange = json.loads(line)
        if "method" not in exchange:
            continue
        recorded = exchange["response"]
        code, answer = api.handle(exchange["method"], exchange["path"], exchange["request"])
        answer = json.loads(json.dumps(answer))
        for document in (answer, recorded):
            for key in ("uid", "creationTimestamp"):
                assert document["metadata"].pop(key, None) is not None or document["kind"] == "Status"
        assert (code, answer) == (exchange["code"], recorded)
        compared += 1
    assert compared == 4


def test_what_is_stored_is_a_lease_as_the_api_has_it(api):
    lease = leadership(api, "pod-0").acquire(10)
    stored = api.leases["leader"]
    assert lease.term == stored["spec"]["leaseTransitions"] == 1
    assert stored["spec"]["holderIdentity"] == "pod-0"
    assert stored["spec"]["leaseDurationSeconds"] == 1
    assert stored["spec"]["acquireTime"] == stored["spec"]["renewTime"]
    assert lease.renew()
    assert api.leases["leader"]["spec"]["renewTime"] > stored["spec"]["acquireTime"]
    lease.release()
    assert api.leases["leader"]["spec"]["holderIdentity"] == ""
    assert not lease.valid(time.monotonic())


def test_one_at_a_time_holds_it_in_terms_that_grow_also_the_same_holder(api):
    first, second = leadership(api, "one", duration=60), leadership(api, "two", duration=60, interval=0.05)
    for term in (1, 3):
        lease = first.acquire(10)
        assert lease.term == term
        assert second.acquire(0.3) is None
        lease.release()
        again = leadership(api, "one", duration=60).acquire(10)
        assert again.term == term + 1
        again.release()
    assert second.acquire(10, above=40).term == 41


def test_a_silent_holder_is_replaced_by_our_own_clock_whatever_times_it_wrote(api):
    lease = leadership(api, "one").acquire(10)
    # Its clock is a hundred years ahead.
    api.edit("leader", lambda found: found["spec"].update(renewTime="2126-01-01T00:00:00.000000Z"))
    begun = time.monotonic()
    taken = leadership(api, "two", interval=0.05).acquire(60)
    assert taken.term == 2
    assert time.monotonic() - begun >= 1.0
    assert not lease.valid(time.monotonic())
    assert not lease.renew()
    assert taken.renew()


def test_a_holder_that_renews_is_not_replaced(api):
    lease, lost = leadership(api, "one", duration=2).acquire(10), []
    keeper = Keeper(lease, lost.append)
    assert leadership(api, "two", interval=0.05).acquire(4.5) is None
    keeper.stop()
    assert lost == []


def test_of_many_that_try_at_once_one_has_it(api):
    got, start = [], threading.Barrier(8)

    def attempt(number):
        start.wait(30)
        if (lease := leadership(api, f"h{number}", duration=60, interval=0.01).acquire(1.0)) is not None:
            got.append((number, lease.term))

    def race():
        got.clear()
        threads = [threading.Thread(target=attempt, args=[number]) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    race()
    assert [term for _, term in got] == [1]
    assert api.leases["leader"]["spec"]["holderIdentity"] == f"h{got[0][0]}"
    api.edit("leader", lambda found: found["spec"].update(holderIdentity=""))
    race()
    assert [term for _, term in got] == [2]


def test_somebodys_annotation_does_not_cost_the_lease_and_a_new_holder_does(api):
    lease = leadership(api, duration=60).acquire(10)
    api.edit("leader", lambda found: found["metadata"].update(annotations={"a": "b"}))
    assert lease.renew()
    assert lease.renew()
    assert api.leases["leader"]["metadata"]["annotations"] == {"a": "b"}
    api.edit("leader", lambda found: found["spec"].update(holderIdentity="other", leaseTransitions=2))
    assert not lease.renew()
    assert not lease.valid(time.monotonic())
    assert api.leases["leader"]["spec"]["holderIdentity"] == "other"


def test_a_lease_that_was_removed_is_lost_and_the_next_term_is_above_what_the_job_knows(api):
    source = leadership(api, duration=60)
    lease = source.acquire(10, above=7)
    assert lease.term == 8
    api.handle("DELETE", "/apis/coordination.k8s.io/v1/namespaces/ns/leases/leader", None)
    assert not lease.renew()
    assert source.acquire(10, above=lease.term).term == 9


def test_trouble_of_the_server_is_waited_out(api):
    api.trouble = [503, 500, 429]
    lease = leadership(api, duration=60, interval=0.02).acquire(10)
    assert lease.term == 1
    api.trouble = [503, 429]
    assert lease.renew()
    assert lease.renew()
    assert lease.valid(time.monotonic())


def test_an_update_whose_answer_was_lost_is_recognised(api):
    lease = leadership(api, duration=60).acquire(10)
    api.trouble = [1200]
    assert lease.renew()
    assert lease.renew()  # a conflict with its own update
    assert lease.renew()
    assert [method for method, _ in api.requests[-4:]] == ["PUT", "PUT", "GET", "PUT"]


def test_while_the_server_is_away_the_lease_is_held_until_it_runs_out(api, wait):
    lease = leadership(api).acquire(10)
    api.close()
    assert lease.renew()
    wait(lambda: not lease.renew(), what="it runs out")
    assert not lease.valid(time.monotonic())
    assert leadership(api).acquire(0.2) is None


def test_a_token_is_sent_and_read_anew_and_a_refusal_is_named(tmp_path):
    api = lease_api.LeaseApi(token="good")
    try:
        token = tmp_path / "token"
        client = HttpLeaseClient(api.url, "ns", token_file=token)
        with pytest.raises(MissingFileError, match="mount the service account's token"):
            KubernetesLease(client, "leader", holder="me").acquire(1)
        token.write_text("bad\n")
        with pytest.raises(
            InputError, match="answers 401: Unauthorized: check the name and the rights of the service"
        ):
            KubernetesLease(client, "leader", holder="me").acquire(1)
        token.write_text("good\n")
        assert KubernetesLease(client, "leader", holder="me").acquire(10).term == 1
    finally:
        api.close()


def test_the_client_tells_conflicts_from_trouble(api):
    client = HttpLeaseClient(api.url, "ns")
    assert client.get("leader") is None
    lease = {"metadata": {"name": "leader"}, "spec": {}}
    stored = client.create(lease)
    with pytest.raises(Conflict, match="already exists"):
        client.create(lease)
    client.replace("leader", stored)
    with pytest.raises(Conflict, match="the object has been modified"):
        client.replace("leader", stored)
    api.trouble = [500]
    with pytest.raises(HttpUnreachable):
        client.get("leader")
    with pytest.raises(InputError, match="answers 400"):
        client.create({"metadata": {"name": "bad"}, "spec": {"renewTime": "yesterday"}})


def test_in_a_pod_everything_is_found(tmp_path):
    environment = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(InputError, match="this does not run in a pod"):
        HttpLeaseClient.in_cluster({})
    with pytest.raises(MissingFileError, match="mount the service account's token"):
        HttpLeaseClient.in_cluster(environment, tmp_path)
    (tmp_path / "namespace").write_text("ns")
    with pytest.raises(MissingFileError, match="certificate file does not exist"):
        HttpLeaseClient.in_cluster(environment, tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"duration": 0}, "duration 0"), ({"duration": 1.5}, "duration 1.5"), ({"holder": ""}, "holder ''")],
)
def test_what_cannot_be_used_is_named(api, options, said):
    with pytest.raises(InputError, match=said):
        leadership(api, **options)
