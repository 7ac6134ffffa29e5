"""Leases as a Kubernetes API server keeps them: resourceVersions, conflicts, and its own words (see the recordings)."""

from __future__ import annotations

import datetime
import json
import re
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PATH = re.compile(
    r"/apis/coordination\.k8s\.io/v1/namespaces/(?P<namespace>[^/]+)/leases(?:/(?P<name>[^/]+))?"
)


class LeaseApi:
    """The server; `url` is where it is. `trouble` is a list of codes with which it answers next, instead."""

    def __init__(self, token="", version=334):
        self.lock, self.leases, self.version = threading.Lock(), {}, version
        self.token, self.trouble, self.requests = token, [], []
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                api.answer(self, None)

            do_POST = do_PUT = do_DELETE = do_GET

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=[0.01])
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(30)

    def answer(self, request, _):
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        document = json.loads(body) if body else None
        with self.lock:
            self.requests.append((request.command, request.path))
            if self.trouble:
                code, said = (
                    self.trouble.pop(0),
                    status(503, "etcdserver: request timed out", "ServiceUnavailable"),
                )
                after = code > 1000  # carried out, but the answer is lost
                if after:
                    self.handle(request.command, request.path, document)
                    request.close_connection = True
                    return
            elif self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
                code, said = 401, status(401, "Unauthorized", "Unauthorized")
            else:
                code, said = self.handle(request.command, request.path, document)
        data = json.dumps(said).encode()
        request.send_response(code)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def handle(self, method, path, document):
        """Return (code, document) of one request."""
        match = PATH.fullmatch(path)
        if match is None:
            return 404, status(404, "the server could not find the requested resource", "NotFound", {})
        namespace, name = match["namespace"], match["name"]
        if document is not None and (wrong := wrong_time(document)) is not None:
            return 400, status(400, wrong, "BadRequest")
        if method == "POST":
            name = document["metadata"]["name"]
            if name in self.leases:
                return 409, status(
                    409, f'leases.coordination.k8s.io "{name}" already exists', "AlreadyExists", detail(name)
                )
            created = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            return 201, self.store(
                name,
                document,
                {
                    "name": name,
                    "namespace": namespace,
                    "uid": str(uuid.uuid4()),
                    "creationTimestamp": created,
                },
            )
        found = self.leases.get(name)
        if found is None:
            return 404, status(
                404, f'leases.coordination.k8s.io "{name}" not found', "NotFound", detail(name)
            )
        if method == "GET":
            return 200, found
        if method == "DELETE":
            del self.leases[name]
            return 200, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        given = document["metadata"].get("resourceVersion")
        if given and given != found["metadata"]["resourceVersion"]:
            return 409, status(
                409, f'Operation cannot be fulfilled on leases.coordination.k8s.io "{name}": the object has been modified; '
                "please apply your changes to the latest version and try again", "Conflict", detail(name),
            )  # fmt: skip
        return 200, self.store(
            name,
            document,
            {
                **found["metadata"],
                **{key: value for key, value in document["metadata"].items() if key == "annotations"},
            },
        )

    def store(self, name, document, metadata):
        self.version += 1
        metadata = {**metadata, "resourceVersion": str(self.version)}
        self.leases[name] = {
            "kind": "Lease",
            "apiVersion": "coordination.k8s.io/v1",
            "metadata": metadata,
            "spec": document["spec"],
        }
        return self.leases[name]

    def edit(self, name, change):
        """Somebody else changes the object."""
        with self.lock:
            document = json.loads(json.dumps(self.leases[name]))
            change(document)
            self.store(name, document, document["metadata"])


def detail(name):
    return {"name": name, "group": "coordination.k8s.io", "kind": "leases"}


def status(code, message, reason, details=None):
    document = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }
    return document if details is None else {**document, "details": details}


def wrong_time(document):
    """The server's complaint about a time in the spec that is none."""
    layout = "2006-01-02T15:04:05.000000Z07:00"
    for key in ("acquireTime", "renewTime"):
        given = document["spec"].get(key)
        if given is not None and not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", given):
            return f'Lease in version "v1" cannot be handled as a Lease: parsing time "{given}" as "{layout}": cannot parse "{given}" as "2006"'
    return None
