"""Serve a model on this machine, ask it about real rows, and compare with the prediction made offline."""

from __future__ import annotations

import dataclasses
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_runtime.datasets import load_split, read_manifest
from elastic_runtime.errors import DataError, ElasticError, InputError, JobFailed
from elastic_runtime.models.config import ModelConfig, read_config
from elastic_runtime.serving.client import Client, output_array, request_document
from elastic_runtime.serving.names import check_name, check_port, require_kserve
from elastic_runtime.serving.process import Server, start_server

if TYPE_CHECKING:
    from elastic_runtime.datasets import Split
    from elastic_runtime.models.load import LoadedModel

__all__ = ["TOLERANCE", "ServeReport", "serve_locally"]

TOLERANCE = 1e-5
"""Largest difference between a served and an offline output that counts as equal."""

_WARM_UP = 10
_REQUESTS = 50
_SHOWN_ROWS = 1
_LARGEST_SAMPLES = 10_000


@dataclass(frozen=True, kw_only=True)
class ServeReport:
    """What was served and how it answered."""

    name: str
    """Name of the model."""

    url: str
    """Where it was served."""

    ready_seconds: float
    """Time from the start of the server's process to its first answer."""

    samples: int
    """Number of rows of the test split that were compared."""

    matches_offline: bool
    """Whether every output was within `TOLERANCE` of the offline prediction."""

    max_difference: float
    """Largest absolute difference between a served and an offline output."""

    latency_ms: dict[str, float]
    """`p50` and `p99` of `requests` requests of one row each, over one connection, after a warm-up."""

    requests: int
    """Number of requests that were timed."""

    example_request: dict[str, Any] = field(repr=False)
    """A request of one real row."""

    example_response: dict[str, Any] = field(repr=False)
    """What the server answered to it."""

    pid: int | None = None
    """Process id of the server if it was kept running, else None."""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as the document that `serving.json` holds."""
        return {"schema": 1, **{name: getattr(self, name) for name in self.__dataclass_fields__}}

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def serve_locally(
    model_folder: str | os.PathLike[str],
    dataset_folder: str | os.PathLike[str],
    *,
    name: str,
    port: int = 0,
    samples: int = 16,
    keep: bool = False,
    log_file: str | os.PathLike[str] | None = None,
) -> ServeReport:
    """Serve the model in `model_folder`, ask it about rows of the dataset's test split, and report.

    `samples` rows (at most as many as there are) go into one request, whose answer is compared with the
    offline prediction; then single rows are sent to measure the latency. The server is stopped at the end,
    also when something fails, unless `keep`: then it goes on, detached, and the report names its pid. Its log
    goes to `log_file`, which `keep` needs.

    Raises `InputError` for wrong arguments or a dataset that is not the model's, `DataError` for an empty
    test split, and `JobFailed` if the server does not start or answers something else than the model does.
    """
    check_name(name)
    check_port(port)
    if isinstance(samples, bool) or not isinstance(samples, int) or not 1 <= samples <= _LARGEST_SAMPLES:
        raise InputError(f"samples={samples!r} is not a number of rows: give 1 to {_LARGEST_SAMPLES:,}")
    if keep and log_file is None:
        raise InputError(
            "log_file=None: a server that is kept outlives this process, so name a file for its log"
        )
    config = read_config(model_folder)
    _check_dataset(config, dataset_folder)
    require_kserve()
    split = load_split(os.fspath(dataset_folder), "test")
    if len(split) == 0:
        raise DataError(
            f"the test split in {os.fspath(dataset_folder)!r} is empty: there is no row to ask about"
        )

    # Torch takes seconds to import, here as in the server: both do it at the same time. The server is started
    # from this thread, for it ends with the thread that started it.
    with ThreadPoolExecutor(1, thread_name_prefix="load-model") as pool:
        loading = pool.submit(_load, model_folder)
        try:
            server = start_server(model_folder, name=name, port=port, detached=keep, log_file=log_file)
        except ElasticError as error:
            failure = loading.exception()
            if isinstance(failure, ElasticError):
                raise failure from error  # the same reason, with its own type
            raise
    try:
        report = _asked(server, loading.result(), split, samples)
        if not report.matches_offline:
            raise JobFailed(
                f"the served model answers otherwise than the offline one: up to {report.max_difference:.3g} "
                f"apart over {report.samples} test rows, {TOLERANCE:g} is allowed; do not use this server"
            )
    except BaseException:
        server.stop()
        raise
    if not keep:
        server.stop()
        return dataclasses.replace(report, pid=None)
    server.release()
    return report


def _load(model_folder: str | os.PathLike[str]) -> LoadedModel:
    from elastic_runtime.models.load import load_model

    return load_model(model_folder)


def _check_dataset(config: ModelConfig, dataset_folder: str | os.PathLike[str]) -> None:
    manifest = read_manifest(os.fspath(dataset_folder))
    where = f"dataset {os.fspath(dataset_folder)!r}"
    fix = "give the dataset that the model was trained on"
    for field_name in ("task", "target", "classes"):
        given, expected = getattr(manifest, field_name), getattr(config, field_name)
        if given != expected:
            raise InputError(f"{where} has {field_name}={given!r:.200}, the model {expected!r:.200}: {fix}")
    if tuple(manifest.features) != config.features:
        missing = [name for name in config.features if name not in manifest.features]
        unknown = [name for name in manifest.features if name not in config.features]
        difference = "in another order"
        if missing or unknown:
            difference = f"missing {missing[:5]}, unknown to the model {unknown[:5]}"
        raise InputError(f"{where} has other features than the model's {config.width} ({difference}): {fix}")


def _asked(server: Server, offline: LoadedModel, split: Split, samples: int) -> ServeReport:
    config = offline.config
    rows = np.ascontiguousarray(split.features[:samples], dtype=np.float32)
    expected = offline.predict(rows)
    example = request_document(config, rows[:_SHOWN_ROWS])
    with Client(server.url, server.name) as client:
        served = output_array(client.infer(request_document(config, rows)), config.output.name)
        if served.shape != expected.shape:
            raise JobFailed(f"the served output has shape {served.shape}, the offline one {expected.shape}")
        difference = float(np.abs(served - expected).max())
        answer = client.infer(example)
        bodies = [json.dumps(request_document(config, rows[i : i + 1])).encode() for i in range(len(rows))]
        for i in range(_WARM_UP):
            client.infer_encoded(bodies[i % len(bodies)])
        seconds = [client.infer_encoded(bodies[i % len(bodies)])[1] for i in range(_REQUESTS)]
    p50, p99 = (float(value) * 1000 for value in np.percentile(seconds, [50, 99]))
    return ServeReport(
        name=server.name,
        url=server.url,
        ready_seconds=round(server.ready_seconds, 3),
        samples=len(rows),
        matches_offline=difference <= TOLERANCE,
        max_difference=difference,
        latency_ms={"p50": round(p50, 3), "p99": round(p99, 3)},
        requests=_REQUESTS,
        example_request=example,
        example_response=answer,
        pid=server.pid,
    )
