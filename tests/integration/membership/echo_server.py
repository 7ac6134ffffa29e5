"""A real server process for the tests: echoes, and tells about itself. `echo_server.py SECRET_FILE JSON_OPTIONS`."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sys
from pathlib import Path

from elastic_runtime.membership.secret import read_secret
from elastic_runtime.membership.server import Limits, Server
from elastic_runtime.membership.sockets import listen


class Echo:
    """Answers `echo`, `stats`, `flood`; fails on `fail`; keeps what happened."""

    server: Server

    def __init__(self) -> None:
        self.ends: list[str] = []

    def on_open(self, connection, peer):
        self.server.send(connection, {"kind": "hello", "role": peer.role, "info": dict(peer.info)})

    def on_message(self, connection, message):
        kind = message["kind"]
        if kind == "echo":
            self.server.send(connection, message)
        elif kind == "stats":
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.server.send(connection, {
                "kind": "stats", "rss": pages * resource.getpagesize(), "descriptors": len(list(Path("/proc/self/fd").iterdir())),
                "counters": dict(self.server.counters), "open": self.server.connections,
                "unauthenticated": self.server.unauthenticated, "ends": self.ends, "heard": self.server.last_heard(connection),
            })  # fmt: skip
        elif kind == "flood":
            for number in range(message["count"]):
                if not self.server.send(
                    connection, {"kind": "part", "number": number, "text": "x" * message["size"]}
                ):
                    break
        elif kind == "flood and close":
            for number in range(message["count"]):
                self.server.send(
                    connection, {"kind": "part", "number": number, "text": "x" * message["size"]}
                )
            self.server.close(connection)
            assert not self.server.send(connection, {"kind": "too late"})
        elif kind == "fail":
            raise RuntimeError("asked to fail")

    def on_close(self, connection, why):
        self.ends.append(why)


async def main() -> None:
    secret, options = read_secret(Path(sys.argv[1])), json.loads(sys.argv[2])
    if "descriptors" in options:
        resource.setrlimit(resource.RLIMIT_NOFILE, (16, options["descriptors"]))
    handler = Echo()
    server = Server(
        listen(options.get("host", "127.0.0.1")), secret, handler, limits=Limits(**options.get("limits", {}))
    )
    handler.server = server
    server.start()
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    print(json.dumps(server.address), flush=True)
    await told.wait()
    await server.stop()
    print(json.dumps({"ends": handler.ends}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
