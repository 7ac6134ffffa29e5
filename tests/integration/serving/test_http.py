"""The real server over real connections: what the protocol promises, and nothing that brings it down."""

from __future__ import annotations

import http.client
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from elastic_runtime.datasets import load_split
from elastic_runtime.models import load_model
from elastic_runtime.serving import Server
from elastic_runtime.serving.client import Client, output_array, request_document

INFER = "/v2/models/digits/infer"
TENSOR: dict[str, Any] = {"name": "features", "shape": [1, 64], "datatype": "FP32", "data": [0.0] * 64}
RIGHT = json.dumps({"inputs": [TENSOR]}).encode()


def call(
    server: Server, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    try:
        connection.request(method, path, body=body, headers=headers or {})
        response = connection.getresponse()
        content = response.read()
        assert response.headers["content-type"].startswith("application/json")
        return response.status, json.loads(content)
    finally:
        connection.close()


def memory(server: Server) -> int:
    for line in Path(f"/proc/{server.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def test_metadata_health_and_readiness(server: Server) -> None:
    assert call(server, "GET", "/v2/health/live") == (200, {"live": True})
    assert call(server, "GET", "/v2/health/ready") == (200, {"ready": True})
    assert call(server, "GET", "/v2/models/digits/ready") == (200, {"name": "digits", "ready": True})
    status, metadata = call(server, "GET", "/v2/models/digits")
    assert status == 200
    assert metadata["inputs"] == [{"name": "features", "datatype": "FP32", "shape": [-1, 64]}]
    assert metadata["outputs"] == [
        {"name": "logits", "datatype": "FP32", "shape": [-1, 10]},
        {"name": "label", "datatype": "BYTES", "shape": [-1]},
        {"name": "probability", "datatype": "FP32", "shape": [-1, 10]},
    ]


def test_answers_equal_the_offline_ones(server: Server, model_folder: Path, dataset_folder: Path) -> None:
    split = load_split(dataset_folder, "test")
    model = load_model(model_folder)
    with Client(server.url, server.name) as client:
        answer = client.infer(request_document(model.config, split.features))
    expected = model.predict(split.features)
    np.testing.assert_allclose(output_array(answer, "logits"), expected, atol=1e-5)
    labels = next(tensor["data"] for tensor in answer["outputs"] if tensor["name"] == "label")
    assert np.mean(np.array(labels, dtype=int) == split.target) > 0.9
    np.testing.assert_allclose(output_array(answer, "probability").sum(axis=1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shape": [3], "data": [1]}, "features.shape: expected [n, 64], given [3]"),
        ({"shape": [2, 64]}, "features.data: shape [2, 64] expects 128 values, given 64"),
        ({"shape": [1, 63], "data": [0.0] * 63}, "features.shape: expected [n, 64], given [1, 63]"),
        ({"datatype": "INT64"}, "features.datatype: expected 'FP32', given 'INT64'"),
        ({"datatype": "BYTES", "data": ["x"] * 64}, "features.datatype: expected 'FP32', given 'BYTES'"),
        ({"data": ["x"] * 64}, "features.data[0]: expected a number, given text ('x')"),
        ({"data": [float("nan")] * 64}, "the body holds NaN"),
        ({"data": [1e300] * 64}, "features.data[0]: expected a finite FP32 number, given 1e+300"),
        ({"shape": [2, 64], "data": [[0.0] * 64, [0.0] * 63]}, "nested data expects lists of 64"),
        ({"shape": [0, 64], "data": []}, "features.shape: expected at least one row"),
        ({"name": "x"}, "inputs[0].name: expected 'features', given 'x'"),
    ],
)
def test_wrong_requests_get_400_and_the_reason(server: Server, changes: dict[str, Any], reason: str) -> None:
    status, document = call(server, "POST", INFER, json.dumps({"inputs": [{**TENSOR, **changes}]}).encode())
    assert status == 400
    assert reason in document["error"]


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "reason"),
    [
        ("POST", INFER, b"", {}, 400, "the body is empty"),
        ("POST", INFER, b"{", {}, 400, "the body is not JSON"),
        ("POST", INFER, b"{}", {}, 400, "inputs: is missing"),
        (
            "POST",
            INFER,
            RIGHT,
            {"Inference-Header-Content-Length": "abc"},
            400,
            "Inference-Header-Content-Length",
        ),
        (
            "POST",
            INFER,
            RIGHT + b"raw",
            {"Inference-Header-Content-Length": str(len(RIGHT))},
            400,
            "3 raw bytes",
        ),
        ("POST", "/v2/models/other/infer", RIGHT, {}, 404, "model 'other' is not served here"),
        ("GET", "/v2/models/other", None, {}, 404, "other"),
        ("GET", "/v2/models/other/ready", None, {}, 404, "other"),
        ("POST", "/v2/models/digits/versions/2/infer", RIGHT, {}, 404, "has no versions (given '2')"),
        ("GET", "/v2/models/digits/versions/2", None, {}, 404, "has no versions"),
        ("GET", "/v2/models/digits/versions/2/ready", None, {}, 404, "has no versions"),
        ("POST", "/v2/repository/models/digits/unload", b"", {}, 403, "serves 'digits' and nothing else"),
        ("POST", "/v2/repository/models/other/load", b"", {}, 403, "nothing else"),
        ("POST", "/v1/models/digits:predict", b'{"instances": [[1]]}', {}, 404, "Open Inference Protocol v2"),
        ("GET", "/v1/models/digits", None, {}, 404, "Open Inference Protocol v2"),
        ("GET", "/nowhere", None, {}, 404, "Not Found"),
        ("GET", INFER, None, {}, 405, "Method Not Allowed"),
    ],
)
def test_what_is_not_there_gets_4xx(
    server: Server,
    method: str,
    path: str,
    body: bytes | None,
    headers: dict[str, str],
    status: int,
    reason: str,
) -> None:
    found, document = call(server, method, path, body, headers)
    assert found == status
    assert reason in json.dumps(document, ensure_ascii=False)
    assert call(server, "POST", INFER, RIGHT)[0] == 200


def test_a_gigabyte_is_refused_without_being_held(server: Server) -> None:
    before = memory(server)
    host, port = urlsplit(server.url).netloc.split(":")
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 30}\r\n\r\n".encode()
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head + b" " * 1000)
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
    # Without a length the server has to count what comes.
    chunk = b"%x\r\n" % (1 << 20) + b" " * (1 << 20) + b"\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f"POST {INFER} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        sent = 0
        try:
            while sent < 1 << 10:
                connection.sendall(chunk)
                sent += 1
        except (ConnectionError, TimeoutError):
            pass
        assert sent < 1 << 10, "all of it was taken"
    assert memory(server) - before < 200 * 1024 * 1024
    assert call(server, "POST", INFER, RIGHT)[0] == 200


def test_half_a_request_and_garbage_do_no_harm(server: Server) -> None:
    host, port = urlsplit(server.url).netloc.split(":")
    half = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(RIGHT)}\r\n\r\n".encode() + RIGHT[:20]
    for content in (half, b"\x00\xff garbage\r\n\r\n", b"GET"):
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(content)
    assert call(server, "POST", INFER, RIGHT)[0] == 200
    assert server.alive


def test_many_callers_at_once_get_their_own_answers(
    server: Server, model_folder: Path, dataset_folder: Path
) -> None:
    rows = load_split(dataset_folder, "test").features
    model = load_model(model_folder)

    def ask(index: int) -> bool:
        part = np.ascontiguousarray(rows[index : index + 1 + index % 5])
        with Client(server.url, server.name) as client:
            served = output_array(client.infer(request_document(model.config, part)), "logits")
        return bool(np.allclose(served, model.predict(part), atol=1e-5))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(120)))


def test_the_log_is_quiet(server: Server) -> None:
    assert call(server, "POST", INFER, b"{")[0] == 400
    assert call(server, "GET", "/v2/models/other")[0] == 404
    lines = server.log_tail().splitlines()
    assert lines[0] == f"serving digits at {server.url}"
    # What is not HTTP at all may be worth a line; everything else that a caller gets wrong is not.
    assert set(lines[1:]) <= {"WARNING uvicorn.error: Invalid HTTP request received."}


def test_kserves_own_client_understands_the_answers(
    server: Server, model_folder: Path, dataset_folder: Path
) -> None:
    """In another process, because importing kserve makes warnings that are errors here."""
    import subprocess
    import sys

    code = """
import asyncio, json, sys
url, rows = sys.argv[1], json.loads(sys.argv[2])
sys.argv = sys.argv[:1]
import numpy as np
from kserve import InferInput, InferRequest, InferenceRESTClient, RESTConfig

async def main():
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    answers = []
    for binary in (True, False):
        values = np.array(rows, dtype=np.float32)
        tensor = InferInput("features", list(values.shape), "FP32")
        tensor.set_data_from_numpy(values, binary_data=binary)
        answer = await client.infer(url, InferRequest("digits", [tensor]), model_name="digits")
        answers.append([out.as_numpy().tolist() for out in answer.outputs if out.name == "logits"][0])
    await client.close()
    print(json.dumps(answers))

asyncio.run(main())
"""
    rows = load_split(dataset_folder, "test").features[:2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, server.url, json.dumps(rows.tolist())],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    binary, plain = json.loads(done.stdout.splitlines()[-1])
    expected = load_model(model_folder).predict(rows)
    np.testing.assert_allclose(binary, expected, atol=1e-5)
    np.testing.assert_allclose(plain, expected, atol=1e-5)
