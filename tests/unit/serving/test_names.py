"""Names, ports, and the parts that are imported only when they are needed."""

from __future__ import annotations

import socket

import pytest

import elastic_runtime.serving
from elastic_runtime.errors import InputError
from elastic_runtime.serving.names import check_name, check_port
from elastic_runtime.serving.server import bind


@pytest.mark.parametrize("name", ["a", "0", "digits", "digits-2", "a" * 63, "9-a"])
def test_names_that_are_dns_labels(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "-", "-a", "a-", "A", "a_b", "a.b", "a b", "a/b", "ä", "a" * 64, "a\n", None, 3, b"a"]
)
def test_names_that_are_not(name: object) -> None:
    with pytest.raises(InputError, match=r"name=.* is not a DNS label"):
        check_name(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("port", [-1, 65536, 10**9, True, "80", 8080.0, None])
def test_ports_that_are_not(port: object) -> None:
    with pytest.raises(InputError, match=r"port=.* is not a port"):
        check_port(port)  # type: ignore[arg-type]


def test_binding_takes_a_free_port_and_refuses_a_taken_one() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            pass
        with pytest.raises(InputError, match=f"port={port} is in use on 127.0.0.1"):
            bind("127.0.0.1", port)
    with bind("127.0.0.1", port):
        pass
    with pytest.raises(InputError, match="host='no such host' is not an address"):
        bind("no such host", 0)


def test_every_public_name_is_there() -> None:
    for name in elastic_runtime.serving.__all__:
        assert getattr(elastic_runtime.serving, name).__name__ == name
    assert elastic_runtime.serving.__all__ == sorted(elastic_runtime.serving.__all__)
    with pytest.raises(AttributeError):
        _ = elastic_runtime.serving.nothing
