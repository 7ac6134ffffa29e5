"""Leadership by an etcd key: whoever created it leads, for as long as its etcd lease lives.

Speaks etcd's JSON gateway (v3, etcd 3.4 and later). The key is created in a transaction that only succeeds if it does
not exist; the term is its create revision, which etcd never gives twice. A key of an earlier holder goes with its
lease, when that is revoked or was not renewed in time.
"""

from __future__ import annotations

import base64
import logging
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_runtime.errors import InputError
from elastic_runtime.membership.leadership.http_json import HttpUnreachable, JsonHttp
from elastic_runtime.membership.leadership.lease import MARGIN, Lease

__all__ = ["EtcdLeadership"]

log = logging.getLogger(__name__)

_POLL = 0.1
_REQUEST = 2.0


class _Refused(Exception):
    """etcd answered with an error."""


def _text(value: str) -> str:
    return base64.b64encode(value.encode()).decode()


class EtcdLeadership:
    """`Leadership` by a key in etcd."""

    def __init__(
        self,
        endpoints: Sequence[str],
        key: str,
        *,
        holder: str,
        ttl: int = 5,
        ca: Path | None = None,
        certificate: Path | None = None,
        private_key: Path | None = None,
    ) -> None:
        """Use `key` in the etcd at `endpoints` (`http://HOST:PORT`, tried in turn).

        `ttl` is in seconds, and etcd may make it longer (2 at least): a holder that is silent for so long is replaced.
        Raises `InputError` for what cannot be used.
        """
        if not endpoints or isinstance(endpoints, str):
            raise InputError(f"endpoints {endpoints!r}: give a list of at least one http://HOST:PORT")
        if type(ttl) is not int or ttl < 1:
            raise InputError(f"ttl {ttl!r}: is not a whole number of seconds from 1")
        if not key:
            raise InputError("key '': give the name of the job's key")
        self._servers = [
            JsonHttp(each, ca=ca, certificate=certificate, key=private_key) for each in endpoints
        ]
        self._key, self._holder, self._ttl = key, holder, ttl
        self.interval = ttl / 4
        """Seconds between two calls of `renew`."""
        self._id: str | None = None
        self._lease: Lease | None = None

    def acquire(self, timeout: float, *, above: int = 0) -> Lease | None:
        """Create the key within `timeout` seconds; see `Leadership`.

        Raises `InputError` if etcd refuses (its message says why), or if its revisions are not above `above`: then it
        is not the etcd that the job had before.
        """
        assert self._lease is None, "the lease is held already"
        end = time.monotonic() + timeout
        try:
            while True:
                try:
                    if self._try(end) and self._lease is not None:
                        if self._lease.term <= above:
                            raise InputError(
                                f"etcd {self._servers[0].url}: revision {self._lease.term} is not above term {above}, "
                                "which the job has had: give the etcd that it had before, or start it anew"
                            )
                        return self._lease
                except HttpUnreachable as error:
                    log.info("no leadership yet: %s", error)
                except _Refused as error:
                    raise InputError(
                        f"etcd key {self._key!r}: {error}: check endpoint and permissions"
                    ) from error
                left = end - time.monotonic()
                if left <= 0:
                    return None
                time.sleep(min(_POLL * random.uniform(0.5, 1.0), left))
        finally:
            if self._lease is None or self._lease.term <= above:
                self.release()

    def renew(self) -> bool:
        """Extend the lease; see `Leadership`. While etcd does not answer, it is held until it runs out."""
        if self._lease is None:
            return False
        begun = time.monotonic()
        try:
            answer = self._call("/v3/lease/keepalive", {"ID": self._id}, self._lease.until)
            ttl = int(answer.get("result", {}).get("TTL", 0))
            held = self._call("/v3/kv/range", {"key": _text(self._key)}, self._lease.until).get("kvs", [])
            if ttl > 0 and held and int(held[0]["create_revision"]) == self._lease.term:
                self._lease.extend(begun + ttl * (1 - MARGIN))
                return True
        except (HttpUnreachable, _Refused) as error:
            log.warning("lease of term %d not renewed: %s", self._lease.term, error)
            if self._lease.valid(time.monotonic()):
                return True
        self.release()
        return False

    def release(self) -> None:
        """Revoke the lease, which removes the key."""
        lease, self._lease = self._lease, None
        identity, self._id = self._id, None
        if lease is not None:
            lease.end()
        if identity is not None:
            try:
                self._call("/v3/lease/revoke", {"ID": identity}, time.monotonic() + _REQUEST)
            except (HttpUnreachable, _Refused) as error:
                log.info("lease not revoked, it runs out by itself: %s", error)

    def close(self) -> None:
        """Release."""
        self.release()

    def _try(self, end: float) -> bool:
        """Create the key if nobody has it; return whether it is ours."""
        begun = time.monotonic()
        key = _text(self._key)
        if self._id is None:
            if self._call("/v3/kv/range", {"key": key, "count_only": True}, end).get("count", "0") != "0":
                return False
            granted = self._call("/v3/lease/grant", {"TTL": str(self._ttl)}, end)
            self._id = str(granted["ID"])
        else:
            # Granted in an earlier try: it may have run out since.
            kept = self._call("/v3/lease/keepalive", {"ID": self._id}, end)
            if int(kept.get("result", {}).get("TTL", 0)) <= 0:
                self._id = None
                return False
        answer = self._call(
            "/v3/kv/txn",
            {
                "compare": [{"target": "CREATE", "result": "EQUAL", "key": key, "create_revision": "0"}],
                "success": [
                    {"request_put": {"key": key, "value": _text(self._holder), "lease": self._id}},
                    {"request_range": {"key": key}},
                ],
                "failure": [{"request_range": {"key": key}}],
            },
            end,
        )
        found = answer["responses"][-1]["response_range"].get("kvs", [])
        # Whether it was this transaction or one before it whose answer was lost: our lease says that it is ours.
        if not found or found[0].get("lease") != self._id:
            return False
        self._lease = Lease(
            self,
            term=int(found[0]["create_revision"]),
            holder=self._holder,
            until=begun + self._ttl * (1 - MARGIN),
        )
        return True

    def _call(self, path: str, body: Mapping[str, Any], end: float) -> dict[str, Any]:
        """Ask the first server that answers. Raises `_Refused` for an error and `HttpUnreachable` for none."""
        failed = HttpUnreachable("no time left")
        for server in list(self._servers):
            # Also without time left, a try that may still succeed.
            timeout = min(_REQUEST, max(0.1, end - time.monotonic()))
            try:
                status, document = server.request("POST", path, body, timeout=timeout)
            except HttpUnreachable as error:
                failed = error
            else:
                if status == 200 and isinstance(document, dict):
                    return document
                said = document.get("error", document) if isinstance(document, dict) else document
                # 503: this member has no leader; another one may.
                if status not in (500, 502, 503, 504):
                    raise _Refused(f"{server.url} answers {status}: {said}")
                failed = HttpUnreachable(f"{server.url} answers {status}: {said}")
            self._servers.append(self._servers.pop(0))
        raise failed
