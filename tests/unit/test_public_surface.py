"""What users may rely on is written down here: a name that goes, or comes, is a decision and not an accident."""

from __future__ import annotations

import argparse
import importlib
import pkgutil

import pytest

import elastic_runtime
from elastic_runtime.cli.run import RunCommand

EXPORTED = {
    "elastic_runtime": ["Job", "RoundChanged", "__version__", "run"],
    "elastic_runtime.training": ["ElasticDataParallel", "Job", "RoundChanged", "Step", "run"],
    "elastic_runtime.worker": ["Batch", "Context", "batches", "checkpoint", "context", "log"],
    "elastic_runtime.testing.faults": ["VARIABLE", "Fault", "check", "exit_with", "kill", "parse", "plan", "stop"],
    "elastic_runtime.models": [
        "LoadedModel", "ModelConfig", "TensorSpec", "load_model", "load_weights", "read_config", "save_model",
    ],
    "kfp_elastic.components": ["elastic_train", "evaluate", "preprocess", "serve"],
}  # fmt: skip


@pytest.mark.parametrize("module", EXPORTED)
def test_exported_names(module: str) -> None:
    assert sorted(importlib.import_module(module).__all__) == sorted(EXPORTED[module])


def test_every_exported_name_exists() -> None:
    for found in pkgutil.walk_packages(elastic_runtime.__path__, "elastic_runtime."):
        if found.name.endswith("__main__") or "torchx_components" in found.name:
            continue
        module = importlib.import_module(found.name)
        for name in getattr(module, "__all__", []):
            assert hasattr(module, name), f"{found.name}.{name}"


def test_options_of_run() -> None:
    parser = argparse.ArgumentParser()
    RunCommand().add_arguments(parser)
    options = sorted(
        word for action in parser._actions for word in action.option_strings if word.startswith("--")
    )
    assert options == [
        "--detach", "--env", "--grace", "--heartbeat", "--help", "--json", "--max-restarts", "--module", "--name", "--nodes",
        "--nproc-per-node", "--output-dir", "--preload", "--scheduler", "--scheduler-arg", "--state-dir", "--wait-limit",
    ]  # fmt: skip
