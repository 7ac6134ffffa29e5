"""The server process: takes its port and its parent first, then loads kserve, torch and the model.

Prints `serving NAME at URL` on standard output once a real request has been answered; everything else goes to
standard error. Exit codes are those of `elastic_runtime.errors`; SIGTERM finishes the requests in progress
and exits 0.
"""

from __future__ import annotations

import argparse
import errno
import http.client
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

from elastic_runtime.errors import EXIT_INPUT, EXIT_INTERRUPTED, EXIT_OK, ElasticError, InputError
from elastic_runtime.models.config import ModelConfig, read_config
from elastic_runtime.processes.tree import die_with_parent
from elastic_runtime.serving.names import check_name, check_port, require_kserve

__all__ = ["bind", "main"]

GRACE_SECONDS = 5
_LOG = logging.getLogger("elastic_runtime.serving")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_INPUT, f"error: {message}\n(see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the model that `argv` names and return the exit code."""
    options = _options(argv)
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    signal.signal(signal.SIGTERM, _stop)
    try:
        if options.parent:
            die_with_parent(options.parent)
        _tell(options, {"pid": os.getpid()})
        return _serve(options)
    except ElasticError as error:
        sys.stderr.write(f"error: {error}\n")
        _tell(options, {"error": str(error), "code": error.exit_code})
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket on `host`; `port` 0 takes a free one. Raises `InputError` naming both."""
    check_port(port)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InputError(f"host={host!r} is not an address of this machine: {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"port={port} is in use on {host}: give another, or 0 for a free one") from error
        raise InputError(f"port={port} cannot be opened on {host!r}: {error.strerror}") from error
    return listener


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m elastic_runtime.serving",
        description="Serve a model folder over the Open Inference Protocol v2 (REST).",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="folder that training wrote")
    parser.add_argument("--name", default="model", help="name of the model in the URL (default: model)")
    parser.add_argument(
        "--port", type=int, default=0, help="port to listen on; 0 (the default) takes a free one"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)  # die when this process does
    parser.add_argument(
        "--ready-fd", type=int, default=-1, help=argparse.SUPPRESS
    )  # says here when it answers
    parser.add_argument("--detach", action="store_true", help=argparse.SUPPRESS)  # outlive who started it
    options = parser.parse_args(argv)
    if options.detach:
        # Forked before anything has threads; who started us need not wait for the server's end.
        if os.fork():
            os._exit(EXIT_OK)
        os.setsid()
    return options


def _stop(signum: int, frame: FrameType | None) -> None:
    """Leave at once: uvicorn has its own handler while it serves, and calls this one when it has finished."""
    sys.stderr.flush()
    os._exit(EXIT_OK)


def _serve(options: argparse.Namespace) -> int:
    check_name(options.name)
    config = read_config(options.model)
    require_kserve()
    listener = bind(options.host, options.port)
    port = listener.getsockname()[1]
    # kserve reads sys.argv when it is imported, and would take --model for its own --model_name.
    sys.argv = sys.argv[:1]
    # What kserve does that FastAPI would have it do otherwise is nothing that a user can change.
    warnings.filterwarnings("ignore", module=r"(kserve|fastapi|starlette)(\..*)?")
    from elastic_runtime.models.load import load_model
    from elastic_runtime.serving.application import build_server

    server = build_server(load_model(options.model), name=options.name, port=port, grace=GRACE_SECONDS)
    threading.Thread(target=_announce, args=(options, config, port), name="announce", daemon=True).start()
    server.run(sockets=[listener])
    return EXIT_OK


def _announce(options: argparse.Namespace, config: ModelConfig, port: int) -> None:
    """Ask the server a real question, and say that it serves when it has answered, or end the process."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    while True:
        try:
            _ask(host, port, options.name, config)
            break
        except ConnectionError:
            time.sleep(0.01)  # the socket listens already, but uvicorn may be closing what came early
        except Exception:  # noqa: BLE001 - a server that cannot answer has to end, whatever the reason
            _LOG.exception("the server does not answer its own question")
            os._exit(1)
    sys.stdout.write(f"serving {options.name} at {url}\n")
    sys.stdout.flush()
    try:
        _tell(options, {"url": url})
    except OSError:
        os._exit(1)  # who started us is gone and has told nobody where we are


def _tell(options: argparse.Namespace, message: dict[str, Any]) -> None:
    if options.ready_fd >= 0:
        os.write(options.ready_fd, json.dumps(message).encode() + b"\n")


def _ask(host: str, port: int, name: str, config: ModelConfig) -> None:
    shape = [1, *config.input.row]
    tensor: dict[str, Any] = {**config.input.to_dict(), "shape": shape, "data": [0.0] * config.width}
    connection = http.client.HTTPConnection(host, port, timeout=60)
    try:
        connection.request("POST", f"/v2/models/{name}/infer", body=json.dumps({"inputs": [tensor]}).encode())
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {response.read(500)!r}")
        response.read()
    finally:
        connection.close()
