"""The component in real pipelines, run by kfp's own local runner, and what Kubeflow's UI will find.

No `from __future__ import annotations` here: kfp reads the annotations themselves.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import compiler, dsl, local

from elastic_runtime.errors import InputError
from kfp_elastic.components.evaluate.component import evaluate

# kfp's local runner says this of every image without "python" in its name; here it runs in this environment.
pytestmark = pytest.mark.filterwarnings("ignore:You may be attemping to run a task:RuntimeWarning")


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def give_model(path: str, model: dsl.Output[dsl.Model]) -> None:
    import shutil

    shutil.copytree(path, model.path)


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def give_dataset(path: str, dataset: dsl.Output[dsl.Dataset]) -> None:
    import shutil

    shutil.copytree(path, dataset.path)


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def note(text: str) -> str:
    return text


@dsl.pipeline(name="gated")
def gated(model: str, dataset: str, gates: dict[str, float], slice_by: str = "") -> None:
    model_task = give_model(path=model)
    dataset_task = give_dataset(path=dataset)
    judged = evaluate(
        model=model_task.outputs["model"],
        dataset=dataset_task.outputs["dataset"],
        gates=gates,
        slice_by=slice_by,
        bootstrap=200,
    )
    with dsl.If(judged.outputs["Output"] == "passed"):
        note(text="served")
    with dsl.Else():
        note(text="refused")


@dsl.pipeline(name="compared")
def compared(model: str, baseline: str, dataset: str) -> None:
    model_task = give_model(path=model)
    baseline_task = give_model(path=baseline)
    dataset_task = give_dataset(path=dataset)
    evaluate(
        model=model_task.outputs["model"],
        dataset=dataset_task.outputs["dataset"],
        baseline=baseline_task.outputs["model"],
        gates={"max_regression": 0.05},
        bootstrap=200,
    )


@pytest.fixture
def outputs(tmp_path: Path) -> Iterator[Path]:
    local.init(
        runner=local.SubprocessRunner(use_venv=False),
        pipeline_root=str(tmp_path / "root"),
        raise_on_error=True,
    )
    yield tmp_path / "root"
    local.config.LocalExecutionConfig.instance = None


def step(root: Path, name: str) -> Path:
    """Return the folder of the one step whose task is called `name`."""
    (folder,) = [path for path in root.rglob(name) if path.is_dir() and path.parent.parent == root]
    return folder


def executor_output(folder: Path) -> dict[str, Any]:
    (file,) = folder.rglob("executor_output.json")
    document: dict[str, Any] = json.loads(
        file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in the metadata")
    )
    return document


def artifacts(folder: Path) -> dict[str, dict[str, Any]]:
    found = executor_output(folder)["artifacts"]
    return {name: entry["artifacts"][0] for name, entry in found.items()}


def texts(root: Path) -> set[str]:
    """Return the texts of the `note` steps that ran."""
    found = set()
    for file in root.rglob("executor_output.json"):
        value = json.loads(file.read_text()).get("parameterValues", {}).get("Output")
        found.add(value)
    return found & {"served", "refused"}


def check_classification_view(metadata: dict[str, Any], classes: list[str], rows: int) -> None:
    matrix = metadata["confusionMatrix"]
    assert [spec["displayName"] for spec in matrix["annotationSpecs"]] == classes
    assert [len(row["row"]) for row in matrix["rows"]] == [len(classes)] * len(classes)
    assert sum(sum(row["row"]) for row in matrix["rows"]) == rows
    points = metadata["confidenceMetrics"]
    assert all(set(point) == {"confidenceThreshold", "recall", "falsePositiveRate"} for point in points)
    first, last = points[0], points[-1]
    assert (first["recall"], first["falsePositiveRate"]) == (0, 0)
    assert (last["recall"], last["falsePositiveRate"]) == (1, 1)


@pytest.mark.parametrize(
    ("gates", "verdict", "branch"),
    [
        ({"min_accuracy": 0.9, "min_slice_accuracy": 0.5}, "passed", "served"),
        ({"min_accuracy": 1}, "failed", "refused"),
        ({}, "passed", "served"),
    ],
)
def test_a_pipeline_branches_on_the_gate(
    gates: dict[str, float], verdict: str, branch: str, digits_made: Any, outputs: Path
) -> None:
    gated(model=str(digits_made.model), dataset=str(digits_made.dataset), gates=gates, slice_by="pen")
    assert texts(outputs) == {branch}
    folder = step(outputs, "evaluate")
    assert executor_output(folder)["parameterValues"]["Output"] == verdict
    found = artifacts(folder)
    metrics = found["metrics"]["metadata"]
    assert all(isinstance(value, int | float) for value in metrics.values())
    assert metrics["test_accuracy"] > 0.93
    assert metrics["test_accuracy_low"] < metrics["test_accuracy"] < metrics["test_accuracy_high"]
    check_classification_view(
        found["classification"]["metadata"], [str(digit) for digit in range(10)], int(metrics["test_rows"])
    )
    assert found["classification"]["metadata"]["rocCurve"] == "micro-average"
    assert found["evaluation"]["metadata"]["verdict"] == verdict
    documents = {name: Path(artifact["uri"]).read_text() for name, artifact in found.items()}
    assert documents["report"].startswith("<!DOCTYPE html>")
    assert documents["summary"].startswith(f"# Evaluation {verdict}")
    assert json.loads(documents["evaluation"])["metrics"] == metrics
    assert json.loads(documents["metrics"]) == metrics


def test_two_classes_give_the_curve_of_the_second(cancer_made: Any, outputs: Path) -> None:
    gated(model=str(cancer_made.model), dataset=str(cancer_made.dataset), gates={"min_auc": 0.9})
    found = artifacts(step(outputs, "evaluate"))
    check_classification_view(found["classification"]["metadata"], ["malignant", "benign"], 190)
    assert found["classification"]["metadata"]["rocCurve"] == "benign"


def test_a_regression_model_with_a_baseline(diabetes_made: Any, outputs: Path) -> None:
    compared(
        model=str(diabetes_made.model),
        baseline=str(diabetes_made.baseline),
        dataset=str(diabetes_made.dataset),
    )
    folder = step(outputs, "evaluate")
    assert executor_output(folder)["parameterValues"]["Output"] == "passed"
    found = artifacts(folder)
    assert found["metrics"]["metadata"]["test_baseline_difference"] > 0
    assert set(found["classification"]["metadata"]) == set()
    assert Path(found["classification"]["uri"]).read_text() == "{}\n"
    assert "Against the baseline" in Path(found["report"]["uri"]).read_text()


def test_a_worse_model_than_the_baseline_fails(digits_made: Any, outputs: Path) -> None:
    compared(
        model=str(digits_made.baseline), baseline=str(digits_made.model), dataset=str(digits_made.dataset)
    )
    folder = step(outputs, "evaluate")
    assert executor_output(folder)["parameterValues"]["Output"] == "failed"
    assert "worse than the baseline's" in artifacts(folder)["evaluation"]["metadata"]["reason"]


def test_a_wrong_request_fails_the_step(
    digits_made: Any, outputs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError):
        gated(model=str(digits_made.model), dataset=str(digits_made.dataset), gates={"min_acuracy": 0.9})
    shown = capfd.readouterr()
    assert "unknown gate 'min_acuracy'; did you mean 'min_accuracy'?" in shown.out + shown.err
    assert texts(outputs) == set()


@pytest.mark.parametrize("pipeline", [gated, compared])
def test_the_pipelines_compile_and_load(pipeline: Any, tmp_path: Path) -> None:
    compiler.Compiler().compile(pipeline, str(tmp_path / "pipeline.yaml"))
    document = yaml.safe_load((tmp_path / "pipeline.yaml").read_text())
    made = document["components"]["comp-evaluate"]["outputDefinitions"]["artifacts"]
    assert {name: entry["artifactType"]["schemaTitle"] for name, entry in made.items()} == {
        "metrics": "system.Metrics",
        "classification": "system.ClassificationMetrics",
        "report": "system.HTML",
        "summary": "system.Markdown",
        "evaluation": "system.Artifact",
    }
    inputs = document["components"]["comp-evaluate"]["inputDefinitions"]
    assert inputs["artifacts"]["baseline"]["isOptional"] is True
    assert inputs["parameters"]["gates"]["defaultValue"] == {}
    assert all(entry["description"] for entry in inputs["parameters"].values())
    task = document["root"]["dag"]["tasks"]["evaluate"]["inputs"]["artifacts"]
    assert ("baseline" in task) is (pipeline is compared)
    compiler.Compiler().compile(evaluate, str(tmp_path / "component.yaml"))
    from kfp.components import load_component_from_file

    loaded = load_component_from_file(str(tmp_path / "component.yaml"))
    assert loaded.component_spec.inputs["baseline"].optional
    assert loaded.component_spec.outputs["Output"].type == "String"


def test_arguments_are_checked_when_the_pipeline_is_built() -> None:
    with pytest.raises(InputError, match=r"not a finite number|cannot be written as JSON"):

        @dsl.pipeline
        def wrong(model: dsl.Input[dsl.Model], dataset: dsl.Input[dsl.Dataset]) -> None:
            evaluate(model=model, dataset=dataset, gates={"max_rmse": float("inf")})
