"""The real pipelines, end to end, with the real steps."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest


@pytest.mark.timeout(240)
def test_digits_with_a_killed_worker(command):
    ran = command("run", "digits", "--local", "--json", "--kill-worker")
    assert ran.code == 0, ran.err[-3000:]
    document = ran.document
    assert document["status"] == "succeeded"
    assert document["metrics"]["test_accuracy"] >= 0.95
    (recovery,) = document["recoveries"]
    assert "SIGKILL" in recovery["cause"]
    assert recovery["seconds"] > 0
    assert document["served"]["matches_offline"] is True
    assert document["served"]["latency_ms"]["p50"] > 0
    run_dir = Path(document["run_dir"])
    for name in ("preprocess/dataset", "elastic-train/model", "elastic-train/report", "evaluate/report"):
        assert Path(document["artifacts"][name]) == run_dir / name
    page = (run_dir / "index.html").read_text()
    for link in set(re.findall(r'href="([^"#][^"]*)"', page)) - {"data:,"}:
        assert (run_dir / link).exists(), link
    assert not document["notes"]
    # Nothing of the kill is in what would be uploaded.
    assert "ELASTIC_FAULTS" not in (run_dir / "pipeline.yaml").read_text()


@pytest.mark.timeout(240)
def test_tabular_regression_whose_gate_says_no(command):
    # A user's repository may have folders of any name: none of them is taken for ours.
    for name in ("components", "elastic_runtime", "kfp_elastic", "pipelines"):
        (command.folder / name).mkdir()
        (command.folder / name / "__init__.py").write_text(f"raise RuntimeError('the {name}/ of the user')")
    # Started as the console script is: with `python -m` alone the current folder would come first.
    arguments = ["run", "tabular-regression", "--local", "--json", "-p", "min_r2=0.999", "-p", "epochs=2"]
    started = [sys.executable, "-P", *command.arguments(*arguments)[1:]]
    done = subprocess.run(started, cwd=command.folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 4, done.stderr[-3000:]
    document = json.loads(done.stdout)
    assert document["status"] == "gate_failed"
    assert document["served"] is None
    assert [step["name"] for step in document["steps"]] == ["preprocess", "elastic-train", "evaluate"]
    assert document["metrics"]["test_r2"] < 0.999


@pytest.mark.timeout(240)
def test_a_server_that_is_kept(command):
    ran = command("run", "tabular-regression", "--local", "--json", "--keep-serving")
    assert ran.code == 0, ran.err[-3000:]
    served = ran.document["served"]
    try:
        with urllib.request.urlopen(f"{served['url']}/v2/health/ready", timeout=30) as answer:
            assert json.loads(answer.read())["ready"] is True
        assert served["stop"] == f"kill {served['pid']}"
    finally:
        os.kill(served["pid"], signal.SIGTERM)
