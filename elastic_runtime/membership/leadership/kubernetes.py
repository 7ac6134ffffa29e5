"""Leadership by a Kubernetes Lease object (coordination.k8s.io/v1).

The rules of client-go's leaderelection: a lease is free if it has no holder, or if it was not seen to change for its
duration (by our own clock: times written by other hosts are never compared with it). Each update carries the
resourceVersion that was read, so that of two who try, one gets a conflict. `leaseTransitions` is the term; unlike in
client-go it grows with every acquisition, also by the same holder, which is a new process.
"""

from __future__ import annotations

import datetime
import json
import logging
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from elastic_runtime.errors import InputError, MissingFileError
from elastic_runtime.membership.leadership.http_json import HttpUnreachable, JsonHttp
from elastic_runtime.membership.leadership.lease import MARGIN, Lease

__all__ = ["Conflict", "HttpLeaseClient", "KubernetesLease", "LeaseClient"]

log = logging.getLogger(__name__)

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_REQUEST = 5.0


class Conflict(Exception):
    """Somebody else changed, created or removed the object first. Never leaves this package."""


class LeaseClient(Protocol):
    """What is needed of a Kubernetes API. Each call is bounded in time and may raise `HttpUnreachable`."""

    def get(self, name: str) -> dict[str, Any] | None:
        """Return the Lease, or None if there is none. Raises `InputError` if it may not be read."""

    def create(self, lease: Mapping[str, Any]) -> dict[str, Any]:
        """Create it and return what was stored. Raises `Conflict` if it exists, `InputError` if it is refused."""

    def replace(self, name: str, lease: Mapping[str, Any]) -> dict[str, Any]:
        """Replace it if its resourceVersion is still that of `lease`. Raises as `create`; `Conflict` if it is not."""


class HttpLeaseClient:
    """`LeaseClient` of an API server."""

    def __init__(
        self, url: str, namespace: str, *, token_file: Path | None = None, ca: Path | None = None
    ) -> None:
        """Use the API server at `url`. The token is read anew for each request, for Kubernetes replaces it."""
        self._http = JsonHttp(url, ca=ca)
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._namespace = namespace
        self._token_file = token_file

    @classmethod
    def in_cluster(cls, environment: Mapping[str, str], account: Path = _ACCOUNT) -> HttpLeaseClient:
        """Build the client of a pod from its environment and its service account's files.

        Raises `InputError` outside of a pod.
        """
        host, port = (environment.get(f"KUBERNETES_SERVICE_{key}") for key in ("HOST", "PORT"))
        if not host or not port:
            raise InputError("KUBERNETES_SERVICE_HOST: is not set: this does not run in a pod")
        try:
            namespace = (account / "namespace").read_text(encoding="utf-8").strip()
        except OSError as error:
            raise MissingFileError(
                f"{error.filename}: {error.strerror}: mount the service account's token"
            ) from error
        url = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        return cls(url, namespace, token_file=account / "token", ca=account / "ca.crt")

    def get(self, name: str) -> dict[str, Any] | None:
        """See `LeaseClient`."""
        status, document = self._call("GET", f"/{name}", None)
        return None if status == 404 else self._checked(status, document)

    def create(self, lease: Mapping[str, Any]) -> dict[str, Any]:
        """See `LeaseClient`."""
        return self._checked(*self._call("POST", "", lease))

    def replace(self, name: str, lease: Mapping[str, Any]) -> dict[str, Any]:
        """See `LeaseClient`."""
        status, document = self._call("PUT", f"/{name}", lease)
        if status == 404:
            raise Conflict(f"lease {name!r} was removed")
        return self._checked(status, document)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, Any]:
        headers = {}
        if self._token_file is not None:
            try:
                headers["Authorization"] = f"Bearer {self._token_file.read_text(encoding='utf-8').strip()}"
            except OSError as error:
                raise MissingFileError(
                    f"token {str(self._token_file)!r}: {error.strerror}: mount the service account's token"
                ) from error
        return self._http.request(method, self._path + path, body, timeout=_REQUEST, headers=headers)

    def _checked(self, status: int, document: Any) -> dict[str, Any]:
        if status in (200, 201) and isinstance(document, dict):
            return document
        said = document.get("message", document) if isinstance(document, dict) else document
        if status == 409:
            raise Conflict(said)
        if status == 429 or status >= 500:
            raise HttpUnreachable(f"{self._http.url} answers {status}: {said}")
        raise InputError(
            f"lease in namespace {self._namespace!r}: the API server answers {status}: {said}: "
            "check the name and the rights of the service account (get, create, update on leases)"
        )


class KubernetesLease:
    """`Leadership` by a Lease object."""

    def __init__(
        self,
        client: LeaseClient,
        name: str,
        *,
        holder: str,
        duration: int = 15,
        interval: float | None = None,
    ) -> None:
        """Use the Lease `name`. `holder` must be this process's own (the pod's name and uid).

        `duration` is in seconds: a holder that is silent for so long is replaced. `interval` is how often it is
        renewed, a fifth of that if None. Raises `InputError` for what cannot be.
        """
        if type(duration) is not int or duration < 1:
            raise InputError(f"duration {duration!r}: is not a whole number of seconds from 1")
        if not holder:
            raise InputError("holder '': name this process")
        self._client, self._name, self._holder, self._duration = client, name, holder, duration
        self.interval = duration / 5 if interval is None else interval
        """Seconds between two calls of `renew`, and between two looks at another's lease (at most one second)."""
        self._lease: Lease | None = None
        self._object: dict[str, Any] = {}
        self._seen = ""
        self._seen_at = 0.0

    def acquire(self, timeout: float, *, above: int = 0) -> Lease | None:
        """Take the Lease when it is free, within `timeout` seconds; see `Leadership`.

        Raises `InputError` if the API server refuses for good.
        """
        assert self._lease is None, "the lease is held already"
        end = time.monotonic() + timeout
        while True:
            try:
                if self._try(above):
                    return self._lease
            except (Conflict, HttpUnreachable) as error:
                log.info("no leadership yet: %s", error)
            left = end - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(min(self.interval, 1.0) * random.uniform(0.5, 1.0), left))

    def renew(self) -> bool:
        """Extend the lease; see `Leadership`. While the API server does not answer, it is held until it runs out."""
        if self._lease is None:
            return False
        begun = time.monotonic()
        try:
            self._object = self._client.replace(self._name, self._changed(self._object, renewTime=_now()))
            self._lease.extend(begun + self._duration * (1 - MARGIN))
            return True
        except Conflict as error:
            # Perhaps only somebody's annotation, or our own update whose answer was lost.
            if self._still_ours():
                return True
            log.warning("lease of term %d lost: %s", self._lease.term, error)
        except (HttpUnreachable, InputError) as error:
            log.warning("lease of term %d not renewed: %s", self._lease.term, error)
            if self._lease.valid(time.monotonic()):
                return True
        self._lease.end()
        self._lease = None
        return False

    def release(self) -> None:
        """Take our name out of the Lease."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        lease.end()
        try:
            self._client.replace(self._name, self._changed(self._object, holderIdentity="", renewTime=_now()))
        except (Conflict, HttpUnreachable, InputError) as error:
            log.info("lease not given back, it runs out by itself: %s", error)

    def close(self) -> None:
        """Release."""
        self.release()

    def _try(self, above: int) -> bool:
        begun = time.monotonic()
        found = self._client.get(self._name)
        spec: Mapping[str, Any] = {}
        if found is not None:
            spec = found.get("spec") or {}
            self._observe(found)
            if spec.get("holderIdentity"):
                length = spec.get("leaseDurationSeconds") or self._duration
                if begun < self._seen_at + length:
                    return False
        term = max(spec.get("leaseTransitions") or 0, above) + 1
        now = _now()
        fields = {
            "holderIdentity": self._holder, "leaseDurationSeconds": self._duration, "leaseTransitions": term,
            "acquireTime": now, "renewTime": now,
        }  # fmt: skip
        begun = time.monotonic()
        if found is None:
            kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
            self._object = self._client.create({**kind, "metadata": {"name": self._name}, "spec": fields})
        else:
            self._object = self._client.replace(self._name, self._changed(found, **fields))
        self._lease = Lease(self, term=term, holder=self._holder, until=begun + self._duration * (1 - MARGIN))
        return True

    def _observe(self, found: Mapping[str, Any]) -> None:
        """Note when the Lease was last seen to change, by our clock."""
        seen = json.dumps([found["metadata"].get("uid"), found.get("spec")], sort_keys=True)
        if seen != self._seen:
            self._seen, self._seen_at = seen, time.monotonic()

    def _still_ours(self) -> bool:
        assert self._lease is not None
        try:
            found = self._client.get(self._name)
        except (HttpUnreachable, InputError):
            return self._lease.valid(time.monotonic())
        spec = (found or {}).get("spec") or {}
        if found is None or (spec.get("holderIdentity"), spec.get("leaseTransitions")) != (
            self._holder,
            self._lease.term,
        ):
            return False
        # The next renewal goes from what is there now.
        self._object = found
        return self._lease.valid(time.monotonic())

    @staticmethod
    def _changed(lease: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        return {**lease, "spec": {**(lease.get("spec") or {}), **fields}}


def _now() -> str:
    """The wall clock, for people to read; nobody compares it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
