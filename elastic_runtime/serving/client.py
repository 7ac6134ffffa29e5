"""A small client of the protocol: one connection that is kept, timed requests, answers as arrays."""

from __future__ import annotations

import http.client
import json
import time
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from elastic_runtime.errors import JobFailed
from elastic_runtime.models.config import ModelConfig

__all__ = ["Client", "output_array", "request_document"]

_SECONDS = 60.0


def request_document(config: ModelConfig, rows: npt.NDArray[np.float32]) -> dict[str, Any]:
    """Return the request that asks for the outputs of `rows`, shape (n, d)."""
    shape = [len(rows), *config.input.row]
    tensor = {**config.input.to_dict(), "shape": shape, "data": rows.ravel().tolist()}
    return {"inputs": [tensor]}


class Client:
    """Talks to the server of one model. Use it as a context manager, in one thread."""

    def __init__(self, url: str, name: str) -> None:
        """Talk to the model `name` of the server at `url`."""
        self.name = name
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_SECONDS)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def infer(self, document: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to `document`. Raises `JobFailed` with what the server said otherwise."""
        return self.infer_encoded(json.dumps(document).encode())[0]

    def infer_encoded(self, body: bytes) -> tuple[dict[str, Any], float]:
        """Return the answer to the request `body` and how many seconds it took, decoding included.

        Raises `JobFailed` if the server does not answer, or not with status 200.
        """
        path = f"/v2/models/{self.name}/infer"
        begin = time.perf_counter()
        try:
            self._connection.request("POST", path, body=body, headers={"Content-Type": "application/json"})
            response = self._connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise JobFailed(f"the server did not answer POST {path}: {error!r}") from error
        if response.status != 200:
            raise JobFailed(f"the server answered POST {path} with {response.status}: {content[:500]!r}")
        answer: dict[str, Any] = json.loads(content)
        return answer, time.perf_counter() - begin


def output_array(answer: dict[str, Any], name: str) -> npt.NDArray[np.float32]:
    """Return the output `name` of `answer` as an array of its shape. Raises `JobFailed` if it has none."""
    for tensor in answer.get("outputs", []):
        if tensor["name"] == name:
            return np.array(tensor["data"], dtype=np.float32).reshape(tensor["shape"])
    raise JobFailed(f"the server's answer has no output {name!r}: {answer!r:.300}")
