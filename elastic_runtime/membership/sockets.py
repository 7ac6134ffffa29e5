"""TCP sockets as the membership service wants them, at either end."""

from __future__ import annotations

import contextlib
import resource
import socket

from elastic_runtime.errors import InputError

__all__ = ["listen", "prepare_socket", "raise_descriptor_limit"]


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files as far as it may, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Return a listening TCP socket for IPv4 or IPv6; `::` takes both. Raises `InputError` if it cannot be had."""
    try:
        if not 0 <= port < 65536:
            raise ValueError("is no port")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server(
            (host, port), family=family, backlog=4096, dualstack_ipv6=host == "::", reuse_port=False
        )
    except (OSError, ValueError) as error:
        raise InputError(
            f"address {host!r}, port {port!r}: {error}: give an address of this machine and a free port, or port 0"
        ) from error


def prepare_socket(connection: socket.socket) -> None:
    """Send at once, and notice within about ten seconds that a silent host is gone (Linux; elsewhere what is there)."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 10_000))
    for name, value in wanted:
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
