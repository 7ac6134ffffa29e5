"""Submit a pipeline to a Kubeflow Pipelines API server with kfp's own client."""

from __future__ import annotations

import http.client
import json
import os
import queue
import threading
import urllib.error
import urllib.parse
import urllib.request
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from elastic_runtime.errors import ElasticError, InputError, MissingFileError
from kfp_elastic.pipelines import lookup
from kfp_elastic.pipelines.compiling import check_image, compiled_text, load_pipeline
from kfp_elastic.pipelines.limits import check_limits
from kfp_elastic.pipelines.parameters import check_nested_text, checked_parameters

__all__ = ["TOKEN_VARIABLE", "SubmittedRun", "submit"]

TOKEN_VARIABLE = "KFP_ELASTIC_TOKEN"
"""Environment variable with the bearer token, if no file is given."""

_T = TypeVar("_T")
_HEALTH = "/apis/v2beta1/healthz"
_TIMEOUT_S = 10.0
_PROBE_S = 15.0
"""Seconds for the whole answer, which may come in drops."""
_SUBMIT_S = 90.0
"""Seconds for handing over the run; kfp's client itself would wait for ever."""


@dataclass(frozen=True, kw_only=True)
class SubmittedRun:
    """A run that the server accepted."""

    pipeline: str
    run_id: str
    url: str
    """Page of the run."""

    def document(self) -> dict[str, Any]:
        """Return the JSON document of `pipeline run --host --json`, without `schema`."""
        return {"pipeline": self.pipeline, "status": "submitted", "run_id": self.run_id, "url": self.url}


def submit(
    name: str,
    parameters: Mapping[str, Any] | None = None,
    *,
    host: str,
    namespace: str | None = None,
    experiment: str | None = None,
    token_file: str | None = None,
    image: str | None = None,
) -> SubmittedRun:
    """Compile the pipeline `name`, hand it to the API server at `host`, and do not wait for its end.

    Raises `InputError` for a wrong name, parameter, image, host or token file before anything is sent, and
    `ElasticError` when the server cannot be reached, is none of Kubeflow Pipelines, or refuses the run.
    """
    entry = lookup(name)
    host = _checked_host(host)
    token = _token(token_file)
    pipeline = load_pipeline(entry)
    values = checked_parameters(parameters or {}, pipeline.component_spec.inputs, pipeline=entry.name)
    check_limits(values, entry)
    text = compiled_text(pipeline, image=None if image is None else check_image(image))
    check_nested_text(values, text, pipeline=entry.name)
    _bounded(lambda: _probe(host, token), _PROBE_S, host=host, doubt="is it the API server?")
    with TemporaryDirectory() as folder:
        package = Path(folder, f"{entry.name}.yaml")
        package.write_text(text, encoding="utf-8")
        return _create_run(entry.name, package, values, host, token, namespace, experiment)


def _create_run(
    name: str,
    package: Path,
    values: dict[str, Any],
    host: str,
    token: str | None,
    namespace: str | None,
    experiment: str | None,
) -> SubmittedRun:
    import kfp_server_api  # type: ignore[import-untyped]
    import urllib3
    from kfp import client

    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), warnings.catch_warnings():
        # Of use to no one here: that this client needs Kubeflow Pipelines 2, and addresses printed as text.
        warnings.simplefilter("ignore", FutureWarning)
        try:
            # With a namespace the client does not ask the server for one, five times over.
            def create() -> Any:
                api = client.Client(host=host, existing_token=token, namespace=namespace or "")
                return api.create_run_from_pipeline_package(
                    str(package), arguments=values, experiment_name=experiment, namespace=namespace
                )

            run = _bounded(
                create, _SUBMIT_S, host=host, doubt="the run may be there: look before trying again"
            )
        except kfp_server_api.ApiException as error:
            raise ElasticError(f"--host {host} refused the run: {_refusal(error)}") from error
        except urllib3.exceptions.HTTPError as error:
            raise ElasticError(f"--host {host} cannot be reached: {error}") from error
    return SubmittedRun(pipeline=name, run_id=run.run_id, url=f"{host}/#/runs/details/{run.run_id}")


def _bounded(call: Callable[[], _T], seconds: float, *, host: str, doubt: str) -> _T:
    """Return what `call` returns, or raise `ElasticError` when that takes longer than `seconds`."""
    done: queue.SimpleQueue[Future[_T]] = queue.SimpleQueue()

    def run() -> None:
        future: Future[_T] = Future()
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            future.set_exception(error)
        done.put(future)

    # A daemon: what never answers must not keep this process either.
    threading.Thread(target=run, name="kubeflow-api", daemon=True).start()
    try:
        return done.get(timeout=seconds).result()
    except queue.Empty:
        raise ElasticError(f"--host {host} did not answer within {seconds:g} s; {doubt}") from None


def _checked_host(host: str) -> str:
    try:
        parts = urllib.parse.urlsplit(host)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError:
        usable = False
    if not usable or any(c.isspace() for c in host):
        raise InputError(f"--host {host!r} is no address: write http[s]://HOST[:PORT][/PATH]")
    if parts.username or parts.password:
        raise InputError("--host has a password in it: give a token with --token-file instead")
    if parts.query or parts.fragment:
        raise InputError(f"--host {host!r}: leave out what follows '{'?' if parts.query else '#'}'")
    return host.rstrip("/")


def _token(token_file: str | None) -> str | None:
    if token_file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        token = Path(token_file).read_text(encoding="utf-8").strip()
    except FileNotFoundError as error:
        raise MissingFileError(f"--token-file {token_file!r} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--token-file {token_file!r} cannot be read: {error}") from error
    if not token or any(c.isspace() for c in token):
        raise InputError(f"--token-file {token_file!r} must hold one token and nothing else")
    return token


def _probe(host: str, token: str | None) -> None:
    """Ask for the server's health once; kfp's client would retry for half a minute and print tracebacks."""
    request = urllib.request.Request(host + _HEALTH)
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            json.loads(answer.read(2**20))
    except urllib.error.HTTPError as error:
        if error.code in {401, 403}:
            why = "wants a login: give a token with --token-file"
        elif error.code == 404:
            why = f"is no Kubeflow Pipelines API (404 for {_HEALTH}): check the address and its path"
        else:
            why = f"answers {error.code} {error.reason}: is the API server healthy?"
        raise ElasticError(f"--host {host} {why}") from error
    except (urllib.error.URLError, TimeoutError, http.client.HTTPException, OSError) as error:
        reason = getattr(error, "reason", None) or error
        text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise ElasticError(
            f"--host {host} cannot be reached: {text}; is the server up, and the port forwarded?"
        ) from error
    except ValueError as error:
        raise ElasticError(
            f"--host {host} is no Kubeflow Pipelines API (no JSON from {_HEALTH}): check the address"
        ) from error


def _refusal(error: Any) -> str:
    try:
        body = json.loads(error.body)
        return f"{error.status} {body.get('error') or body.get('message') or error.reason}"
    except (TypeError, ValueError, AttributeError):
        return f"{error.status} {error.reason}"
