"""kserve's ModelServer with our model in it, and our own check of what comes in.

kserve 0.21 checks only the form of a request: it answers 200 to shape [3] with one value, 500 to text in an
FP32 tensor, and 501 to a version. So the routes for inference and for versions are ours and come first; the
rest (health, metadata, metrics) is kserve's. Loading and unloading over the network is refused: the process
serves the one model that it was started with.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import kserve
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from kserve import model_server
from kserve.errors import InvalidInput, ModelNotFound
from kserve.protocol.rest.server import RESTServer
from starlette.requests import ClientDisconnect

from elastic_runtime.errors import InputError
from elastic_runtime.models.load import LoadedModel
from elastic_runtime.serving.protocol import (
    Answer,
    InferenceRequest,
    encode_answer,
    input_tensors,
    output_tensors,
    parse_request,
)

__all__ = ["MAX_BODY_BYTES", "build_server"]

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Largest request body that is read; a larger one gets status 413 and is not held in memory."""

_BODY_SECONDS = 30.0
_JSON_LENGTH = "inference-header-content-length"
_WORKERS = 2


class _TooLarge(InputError):
    pass


class _ServedModel(kserve.Model):  # type: ignore[misc]  # kserve is not typed for us
    """The model as kserve knows it; kserve measures and counts what goes through `__call__`."""

    def __init__(self, name: str, model: LoadedModel) -> None:
        super().__init__(name)
        self.model = model
        self._pool = ThreadPoolExecutor(max_workers=_WORKERS, thread_name_prefix="predict")
        self.ready = True

    def get_input_types(self) -> list[dict[str, Any]]:
        return input_tensors(self.model.config)

    def get_output_types(self) -> list[dict[str, Any]]:
        return output_tensors(self.model.config)

    async def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> Answer:
        assert isinstance(payload, InferenceRequest)
        # In a thread, so that health checks are answered while a large batch is computed.
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._answer, payload)

    def _answer(self, request: InferenceRequest) -> Answer:
        output = self.model.predict(request.rows)
        return encode_answer(request, output, self.model.config, model=self.name, identity=uuid.uuid4().hex)


def build_server(model: LoadedModel, *, name: str, port: int, grace: int) -> RESTServer:
    """Return kserve's REST server for `model`; its `run(sockets=…)` serves until SIGTERM.

    `grace` is how many seconds requests in progress have to finish then. Call it once in a process, for
    kserve keeps its application and its metrics in module variables.
    """
    for noisy in ("kserve", "kserve.trace", "uvicorn.access"):
        # A handler of its own stops kserve from configuring logging, which would write to standard output.
        logging.getLogger(noisy).addHandler(logging.NullHandler())
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("kserve").addFilter(_is_our_fault)
    served = _ServedModel(name, model)
    server = model_server.ModelServer(
        http_port=port, workers=1, enable_grpc=False, enable_latency_logging=False
    )
    server.register_model(served)
    model_server.app.include_router(_routes(served))
    return RESTServer(
        "kserve.model_server:app",
        server.dataplane,
        server.model_repository_extension,
        port,
        grace_period=grace,
    )


def _routes(served: _ServedModel) -> APIRouter:
    router = APIRouter()

    @router.post("/v2/models/{model_name}/infer")
    async def infer(model_name: str, request: Request) -> Response:
        if model_name != served.name:
            return _unknown_model(model_name, served.name)
        try:
            body = await _body(request)
            parsed = parse_request(body, served.model.config, json_length=request.headers.get(_JSON_LENGTH))
            answer, _ = await served(parsed, headers=dict(request.headers))
        except _TooLarge as error:
            return _error(413, str(error), close=True)
        except InputError as error:
            return _error(400, str(error))
        except TimeoutError:
            return _error(408, f"the body did not arrive within {_BODY_SECONDS:g} s", close=True)
        except ClientDisconnect:
            return _error(400, "the body ended early")  # nobody is there to read it
        if answer.json_length is None:
            return Response(answer.body, media_type="application/json")
        length = {_JSON_LENGTH: str(answer.json_length)}
        return Response(answer.body, media_type="application/octet-stream", headers=length)

    @router.api_route("/v2/models/{model_name}/versions/{version}{rest:path}", methods=["GET", "POST"])
    async def version(model_name: str, version: str, rest: str) -> Response:
        if model_name != served.name:
            return _unknown_model(model_name, served.name)
        return _error(
            404, f"model {served.name!r} has no versions (given {version[:80]!r}): leave /versions out"
        )

    @router.api_route("/v2/repository/{rest:path}", methods=["GET", "POST"])
    async def repository(rest: str) -> Response:
        return _error(
            403, f"this server serves {served.name!r} and nothing else: start another for another model"
        )

    @router.api_route("/v1/{rest:path}", methods=["GET", "POST"])
    async def v1(rest: str) -> Response:
        return _error(
            404, f"this server speaks the Open Inference Protocol v2: POST /v2/models/{served.name}/infer"
        )

    return router


async def _body(request: Request) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared[:20]) > MAX_BODY_BYTES:
        raise _too_large(f"{int(declared[:20]):,}")
    async with asyncio.timeout(_BODY_SECONDS):
        parts = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise _too_large(f"more than {MAX_BODY_BYTES:,}")
            parts.append(part)
    return b"".join(parts)


def _too_large(given: str) -> _TooLarge:
    return _TooLarge(f"the body has {given} bytes, {MAX_BODY_BYTES:,} are allowed: send fewer rows at a time")


def _unknown_model(given: str, known: str) -> Response:
    return _error(404, f"model {given[:80]!r} is not served here: the model is {known!r}")


def _error(status: int, reason: str, *, close: bool = False) -> Response:
    # Closing says that the rest of the body is not read; otherwise it is, only to be thrown away.
    return JSONResponse(
        {"error": reason}, status_code=status, headers={"Connection": "close"} if close else None
    )


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Say whether to log: kserve writes a traceback for a name that a caller got wrong."""
    return not (record.exc_info and isinstance(record.exc_info[1], InvalidInput | ModelNotFound))
