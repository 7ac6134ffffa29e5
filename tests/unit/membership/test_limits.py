"""What a client may cost, and what counts as one host."""

from __future__ import annotations

import asyncio
import socket

import pytest

from elastic_runtime.errors import InputError
from elastic_runtime.membership import server as module
from elastic_runtime.membership.server import Limits, Server
from elastic_runtime.membership.sockets import listen


@pytest.mark.parametrize("name", ["handshake", "unauthenticated", "unauthenticated_a_host", "unread"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_limit_that_is_not_positive_is_named(name, value):
    with pytest.raises(InputError, match=f"limits: {name} {value} is not above 0"):
        Limits(**{name: value})


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("127.0.0.1", ""), ("127.9.9.9", ""), ("::1", ""), ("::ffff:127.0.0.1", ""), ("10.1.2.3", "10.1.2.3"), ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2::5", "20010db800010002"), ("2001:db8:1:2:ffff::6", "20010db800010002"), ("2001:db8:1:3::5", "20010db800010003"),
        ("fe80::1%eth0", "fe80000000000000"),
    ],
)  # fmt: skip
def test_what_counts_as_one_host(address, key):
    assert module._host_key(address) == key


@pytest.mark.parametrize(
    ("host", "port"), [("192.0.2.1", 0), ("127.0.0.1", 99999), ("not an address", 0), ("2001:db8::1", 0)]
)
def test_where_it_cannot_listen_is_named(host, port):
    with pytest.raises(
        InputError, match=f"address '{host}', port {port}: .*: give an address of this machine"
    ):
        listen(host, port)


def test_one_host_cannot_take_the_places_of_the_others(monkeypatch):
    """Two hosts with room for three strangers each: the greedy one only drives out its own."""

    class Nobody:
        def on_open(self, *_):
            raise AssertionError

        on_message = on_close = on_open

    hosts = iter(["modest"] * 2 + ["greedy"] * 10 + ["modest"])
    monkeypatch.setattr(module, "_host_key", lambda _: next(hosts))

    def ended(client):
        client.setblocking(False)
        try:
            while data := client.recv(4096):
                assert data.startswith((42).to_bytes(4, "big"))
        except BlockingIOError:
            return False
        return True

    async def main():
        server = Server(
            listen(), bytes(32), Nobody(), limits=Limits(unauthenticated=8, unauthenticated_a_host=3)
        )
        server.start()
        clients = []
        try:
            for number in range(1, 14):
                clients.append(socket.create_connection(server.address))
                while server.counters.get("accepted", 0) < number:
                    await asyncio.sleep(0)
            assert server.unauthenticated == 6
            assert server.counters["displaced"] == 7
            gone = [number for number, client in enumerate(clients) if ended(client)]
            assert gone == [2, 3, 4, 5, 6, 7, 8]
        finally:
            await server.stop()
            for client in clients:
                client.close()
        assert server.unauthenticated == 0

    asyncio.run(main())
