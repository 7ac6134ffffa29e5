"""From a model and a dataset to a report, through a real server, alone, as the step's body and through kfp."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic_runtime.errors import DataError, InputError, IntegrityError, JobFailed, MissingFileError
from elastic_runtime.models import load_model, read_config, save_model
from elastic_runtime.serving import local, package_model, serve_locally, start_server
from elastic_runtime.serving.step import run_serve_step


def test_the_step_packages_serves_and_reports(
    tmp_path: Path, model_folder: Path, dataset_folder: Path
) -> None:
    folder, page = tmp_path / "serving", tmp_path / "out" / "report.html"
    done = run_serve_step(
        model_folder, dataset_folder, serving_folder=folder, report_file=page, name="digits-1", samples=5
    )
    report = json.loads((folder / "serving.json").read_text())
    assert report["schema"] == 1
    assert report["name"] == "digits-1"
    assert report["url"].startswith("http://127.0.0.1:")
    assert report["matches_offline"] is True
    assert report["max_difference"] <= 1e-5
    assert report["samples"] == 5
    assert 0 < report["latency_ms"]["p50"] <= report["latency_ms"]["p99"] < 1000
    assert report["pid"] is None
    tensor = report["example_request"]["inputs"][0]
    assert (tensor["name"], tensor["shape"]) == ("features", [1, 64])
    logits = next(t for t in report["example_response"]["outputs"] if t["name"] == "logits")
    offline = load_model(folder).predict(np.array([tensor["data"]], np.float32))
    np.testing.assert_allclose(logits["data"], offline[0], atol=1e-5)
    metrics = done.metrics()
    assert metrics["matches_offline"] == 1.0
    assert metrics["latency_p50_ms"] == report["latency_ms"]["p50"]

    html = page.read_text()
    blocks = re.findall(r"<pre[^>]*>(.*?)</pre>", html, re.DOTALL)
    request, answer = (json.loads(unescape(block)) for block in blocks[:2])
    shown = request["inputs"][0]
    assert shown["data"] == pytest.approx(tensor["data"][:6], abs=1e-4)
    assert shown["… data"] == "58 more"
    assert {part["name"] for part in answer["outputs"]} >= {"logits", "label"}
    for text in (
        "served as predicted offline",
        "curl -s",
        "/v2/models/digits-1/infer",
        report["url"],
        "SERVING.md",
    ):
        assert text in html
    assert "<script" not in html
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", int(report["url"].rpartition(":")[2])))


def test_the_package_is_a_model_and_says_what_it_is(tmp_path: Path, model_folder: Path) -> None:
    package = package_model(model_folder, tmp_path / "package", name="digits")
    assert read_config(package.folder) == read_config(model_folder)
    load_model(package.folder)
    assert sorted(path.name for path in package.folder.iterdir()) == [
        "SERVING.md",
        "config.json",
        "model-settings.json",
        "model.pt2",
        "model.safetensors",
    ]
    for name, sha256 in package.files.items():
        assert hashlib.sha256((package.folder / name).read_bytes()).hexdigest() == sha256
    settings = json.loads((package.folder / "model-settings.json").read_text())
    assert settings["sha256"] == package.sha256 == package.files["config.json"]
    assert settings["inputs"] == [{"name": "features", "shape": [-1, 64], "datatype": "FP32"}]
    assert "Nothing has been deployed" in (package.folder / "SERVING.md").read_text()
    with pytest.raises(InputError, match="is the model's own folder"):
        package_model(model_folder, model_folder)
    with pytest.raises(MissingFileError):
        package_model(tmp_path, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"name": "Digits"}, InputError, "name='Digits' is not a DNS label"),
        ({"name": "-a"}, InputError, "name='-a'"),
        ({"name": ""}, InputError, "name=''"),
        ({"port": 65536}, InputError, "port=65536"),
        ({"samples": 0}, InputError, "samples=0 is not a number of rows: give 1 to 10,000"),
        ({"samples": True}, InputError, "samples=True"),
        ({"keep": True}, InputError, "log_file=None"),
        ({"model_folder": "nowhere"}, MissingFileError, "no model in 'nowhere'"),
        ({"dataset_folder": "nowhere"}, InputError, "nowhere"),
    ],
)
def test_wrong_arguments_are_refused_before_a_server_starts(
    model_folder: Path,
    dataset_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    def never(*_: object, **__: object) -> None:
        pytest.fail("a server was started")

    monkeypatch.setattr(local, "start_server", never)
    arguments = {"model_folder": model_folder, "dataset_folder": dataset_folder, "name": "digits", **changes}
    with pytest.raises(error, match=message):
        serve_locally(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"features": ["other", *(f"f{i}" for i in range(63))]},
            "other features than the model's 64 .missing",
        ),
        ({"target": "number"}, "has target='digit', the model 'number'"),
        ({"classes": [*"012345678", "nine"]}, "has classes="),
    ],
)
def test_a_dataset_of_another_model_is_refused(
    tmp_path: Path, dataset_folder: Path, model_folder: Path, change: dict[str, Any], message: str
) -> None:
    shutil.copytree(model_folder, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(InputError, match=message):
        serve_locally(tmp_path / "model", dataset_folder, name="digits")


def test_another_answer_than_offline_is_an_error_and_leaves_nothing(
    tmp_path: Path, model_folder: Path, dataset_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is given another model than the one that is compared with."""
    config = read_config(model_folder)
    torch.manual_seed(1)
    save_model(
        tmp_path / "other",
        torch.nn.Linear(64, 10),
        torch.zeros(2, 64),
        task="classification",
        features=config.features,
        target=config.target,
        classes=config.classes,
    )
    servers = []

    def start_other(folder: object, **options: Any) -> Any:
        servers.append(start_server(tmp_path / "other", **options))
        return servers[0]

    monkeypatch.setattr(local, "start_server", start_other)
    with pytest.raises(JobFailed, match="answers otherwise than the offline one: up to"):
        serve_locally(model_folder, dataset_folder, name="digits")
    assert not Path(f"/proc/{servers[0].pid}").exists()


def test_a_server_that_is_kept_goes_on(tmp_path: Path, model_folder: Path, dataset_folder: Path) -> None:
    report = serve_locally(model_folder, dataset_folder, name="digits", keep=True, log_file=tmp_path / "log")
    assert report.pid is not None
    pidfd = os.pidfd_open(report.pid)
    try:
        assert os.getsid(report.pid) == report.pid
        with socket.create_connection(("127.0.0.1", int(report.url.rpartition(":")[2])), timeout=10):
            pass
    finally:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


def test_a_damaged_model_is_named(tmp_path: Path, model_folder: Path, dataset_folder: Path) -> None:
    shutil.copytree(model_folder, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(IntegrityError, match=r"model\.safetensors \(1 bytes\) has sha256"):
        serve_locally(tmp_path / "model", dataset_folder, name="digits")


def test_an_empty_test_split_is_named(tmp_path: Path, model_folder: Path, dataset_folder: Path) -> None:
    shutil.copytree(dataset_folder, tmp_path / "data")
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    manifest["splits"]["test"] = {"rows": 0, "shards": []}
    (tmp_path / "data" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"the test split in .* is empty"):
        serve_locally(model_folder, tmp_path / "data", name="digits")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_an_interrupted_caller_leaves_no_server(
    sandbox: Any,
    model_folder: Path,
    dataset_folder: Path,
    wait: Callable[..., Any],
    signum: signal.Signals,
) -> None:
    script = sandbox.script(
        """
import sys
from elastic_runtime.serving import local, serve_locally
ask = local._asked
def asked(server, *rest):
    print(server.pid, flush=True)
    while True:
        ask(server, *rest)
local._asked = asked
serve_locally(sys.argv[1], sys.argv[2], name="digits")
"""
    )
    process = sandbox.start(sys.executable, script, model_folder, dataset_folder)
    pid = int(process.stdout.readline())
    process.send_signal(signum)
    _, err = process.communicate(timeout=30)
    # Python turns SIGINT into an exception, and may end with 1 after it.
    assert process.returncode == -signum or (
        signum == signal.SIGINT and err.endswith("KeyboardInterrupt\n")
    ), err
    wait(lambda: not Path(f"/proc/{pid}").exists(), timeout=5, what="the end of the server")


def test_through_kfps_local_runner(sandbox: Any, model_folder: Path, dataset_folder: Path) -> None:
    """The real component in a real kfp pipeline, its artifacts where kfp puts them."""
    script = sandbox.script(
        """
import glob, json, os, sys
from kfp import dsl, local
from kfp_elastic.components.serve.component import serve

@dsl.pipeline
def served(model: str, dataset: str) -> str:
    m = dsl.importer(artifact_uri=model, artifact_class=dsl.Model)
    d = dsl.importer(artifact_uri=dataset, artifact_class=dsl.Dataset)
    return serve(model=m.output, dataset=d.output, name="digits", samples=4).outputs["Output"]

local.init(local.SubprocessRunner(use_venv=False), pipeline_root="root")
task = served(model=sys.argv[1], dataset=sys.argv[2])
print("URL", task.output)
"""
    )
    done = sandbox.run(sys.executable, script, model_folder, dataset_folder, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    url = done.stdout.strip().splitlines()[-1].removeprefix("URL ")
    (serving,) = (sandbox.folder / "root").glob("*/serve/serving")
    (report,) = (sandbox.folder / "root").glob("*/serve/report")
    document = json.loads((serving / "serving.json").read_text())
    assert document["url"] == url
    assert document["matches_offline"] is True
    load_model(serving)
    assert "<html" in report.read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"name": "My_Model"}, "name='My_Model' is not a DNS label"), ({"samples": -1}, "samples=-1")],
)
def test_a_component_that_fails_raises(
    tmp_path: Path, model_folder: Path, dataset_folder: Path, changes: dict[str, Any], message: str
) -> None:
    from kfp import dsl

    from kfp_elastic.components.serve.component import serve

    artifacts = {
        "model": dsl.Model(uri=str(model_folder)),
        "dataset": dsl.Dataset(uri=str(dataset_folder)),
        "serving": dsl.Artifact(uri=str(tmp_path / "serving")),
        "metrics": dsl.Metrics(uri=str(tmp_path / "metrics")),
        "report": dsl.HTML(uri=str(tmp_path / "report")),
    }
    with pytest.raises(InputError, match=message):
        serve.python_func(**artifacts, **changes)
