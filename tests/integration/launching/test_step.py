"""The training step of a pipeline, as a library call: real jobs, with scripts that do and do not do their duty."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

GOOD = """
import os, sys, torch
from elastic_runtime import worker
from elastic_runtime.models import save_model
print("argv", sys.argv[1:], os.environ.get("ELASTIC_DATASET_DIR"), os.environ["N"])
context = worker.context()
worker.log(step=1, loss=0.5, samples=8)
if context.rank == 0:
    save_model(context.output_dir, torch.nn.Linear(3, 2), torch.zeros(2, 3), task="classification",
               features=["a", "b", "c"], target="y", classes=["n", "p"])
"""
CALL = """
import json, sys
from pathlib import Path
from elastic_runtime.errors import ElasticError
from elastic_runtime.launching.step import TrainOutputs, TrainRequest, train
root = Path("out")
outputs = TrainOutputs(model=root / "model", report=root / "report.html", job_record=root / "job.json", work_dir=root / "job")
try:
    print("FIGURES", json.dumps(train(TrainRequest(**json.loads(sys.argv[1])), outputs, dataset="/data/set")))
except ElasticError as error:
    print(f"ERROR {type(error).__name__}: {error}")
    sys.exit(error.exit_code)
"""


def call(sandbox: Any, **request: Any) -> Any:
    return sandbox.run(sys.executable, "-c", CALL, json.dumps(request))


def test_the_step_writes_model_report_and_record(sandbox: Any) -> None:
    script = str(sandbox.script(GOOD))
    done = call(sandbox, script=script, nodes="1:2", arguments=["--data", "{dataset}"], env={"N": 5.0},
                hyperparameters={"widths": [64.0, 32.0], "lr": 2e-05, "off": None})  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    argv = "argv ['--data', '/data/set', '--widths=[64, 32]', '--lr=2e-05'] /data/set 5"
    assert f"[rank0] {argv}" in done.stdout
    figures = json.loads(done.stdout.split("FIGURES ")[1])
    assert (figures["steps"], figures["world_size"], figures["train_loss"]) == (1, 2, 0.5)
    out = sandbox.folder / "out"
    assert json.loads((out / "model" / "config.json").read_text())["features"] == ["a", "b", "c"]
    assert json.loads((out / "job.json").read_text())["state"] == "succeeded"
    assert "succeeded" in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("print('done')", "the script wrote no model to"),
        (
            "import os, pathlib\npathlib.Path(os.environ['ELASTIC_OUTPUT_DIR'], 'x.bin').touch()",
            "the script wrote no valid model",
        ),
    ],
)
def test_a_script_that_writes_no_model_fails_the_step(sandbox: Any, script: str, message: str) -> None:
    done = call(sandbox, script=str(sandbox.script(script)))
    assert done.returncode == 1
    assert f"ERROR JobFailed: {message}" in done.stdout
    assert (sandbox.folder / "out" / "report.html").is_file()


def test_a_failed_job_still_leaves_report_and_record(sandbox: Any) -> None:
    done = call(sandbox, script=str(sandbox.script("raise KeyError('column')")))
    assert done.returncode == 1
    assert "KeyError: 'column'" in done.stdout.splitlines()[-1]
    assert json.loads((sandbox.folder / "out" / "job.json").read_text())["state"] == "failed"
    assert "KeyError" in (sandbox.folder / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"script_sha256": "0" * 64}, "compiled into the pipeline"),
        ({"nodes": "3:2"}, "--nodes '3:2'"),
        ({"max_restarts": -1}, "--max-restarts -1"),
        ({"env": {"A B": 1}}, "'A B'"),
        ({"hyperparameters": {"a b": 1}}, "'a b'"),
        ({"scheduler": "local_cw"}, "did you mean 'local_cwd'"),
        ({"scheduler_args": {"log_di": "x"}}, "did you mean 'log_dir'"),
        ({"module": "json.tool"}, "exactly one program"),
        ({"script": "none.py"}, "'none.py' not found"),
    ],
)
def test_wrong_parameters_are_one_error_before_a_worker_starts(
    sandbox: Any, request_: dict[str, Any], message: str
) -> None:
    done = call(sandbox, **{"script": str(sandbox.script("print('started')")), **request_})
    assert done.returncode == 2
    assert message in done.stdout
    assert "started" not in done.stdout


def test_a_program_with_the_compiled_checksum_runs(sandbox: Any) -> None:
    import hashlib

    script = sandbox.script(GOOD)
    digest = hashlib.sha256(Path(script).read_bytes()).hexdigest()
    done = call(sandbox, script=str(script), script_sha256=digest, env={"N": "x"})
    assert done.returncode == 0, done.stdout
