"""JSON over HTTP for the back ends that a cluster provides: one short request, bounded in time and size."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from elastic_runtime.errors import InputError, MissingFileError

__all__ = ["HttpUnreachable", "JsonHttp"]

_LONGEST_ANSWER = 4 * 1024 * 1024


class HttpUnreachable(Exception):
    """No usable answer: nobody there, too late, too long, or no JSON. Never leaves this package."""


class JsonHttp:
    """One server. Each request has a connection of its own: they are few, and nothing has to be kept alive."""

    def __init__(
        self, url: str, *, ca: Path | None = None, certificate: Path | None = None, key: Path | None = None
    ) -> None:
        """Use the server at `url`, such as `https://host:2379`; the files are in PEM, `ca` None means the system's.

        Raises `InputError` for an address or a file that cannot be used.
        """
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query:
            raise InputError(f"url {url!r}: give http://HOST:PORT or https://HOST:PORT")
        self.url = url
        self._host, self._port, self._prefix = parts.hostname, port, parts.path.rstrip("/")
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            try:
                self._tls = ssl.create_default_context(cafile=None if ca is None else str(ca))
                if certificate is not None:
                    self._tls.load_cert_chain(str(certificate), None if key is None else str(key))
            except FileNotFoundError as error:
                raise MissingFileError(
                    f"url {url!r}: a certificate file does not exist: {error.filename}"
                ) from error
            except (OSError, ValueError) as error:
                raise InputError(f"url {url!r}: certificate files: {error}: give files in PEM") from error

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Return status and document. Raises `HttpUnreachable` if there is none within `timeout` seconds."""
        end = time.monotonic() + timeout
        connection = (
            http.client.HTTPConnection(self._host, self._port, timeout=timeout)
            if self._tls is None
            else http.client.HTTPSConnection(self._host, self._port, timeout=timeout, context=self._tls)
        )
        try:
            connection.request(
                method,
                self._prefix + path,
                body=None if body is None else json.dumps(body).encode(),
                headers={"Content-Type": "application/json", "Accept": "application/json", **(headers or {})},
            )
            response = connection.getresponse()
            parts, size = [], 0
            while True:
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no whole answer in {timeout:g} s")
                if connection.sock is not None:
                    connection.sock.settimeout(left)
                part = response.read1(64 * 1024)
                if not part:
                    break
                parts.append(part)
                size += len(part)
                if size > _LONGEST_ANSWER:
                    raise ValueError(f"an answer of more than {_LONGEST_ANSWER:,} bytes")
            return response.status, json.loads(b"".join(parts) or b"null")
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise HttpUnreachable(f"{self.url}: {error or type(error).__name__}") from error
        finally:
            connection.close()
