"""Evaluating real models on real data: results, reports, and one clear error for what cannot work."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as reference

from elastic_runtime.datasets import load_split
from elastic_runtime.errors import (
    DataError,
    ElasticError,
    InputError,
    IntegrityError,
    MissingFileError,
    UnknownNameError,
)
from elastic_runtime.evaluation import EvaluateConfig, Evaluation, evaluate, write_outputs
from elastic_runtime.models import load_model


def run(made: Any, *, baseline: bool = False, **fields: Any) -> Evaluation:
    return evaluate(
        made.model,
        made.dataset,
        EvaluateConfig(**{"bootstrap": 200, **fields}),
        baseline_folder=made.baseline if baseline else None,
    )


def written(evaluation: Evaluation, folder: Path) -> tuple[str, str, dict[str, Any]]:
    paths = [folder / "out" / name for name in ("report.html", "summary.md", "evaluation.json")]
    write_outputs(evaluation, report=paths[0], summary=paths[1], document=paths[2])
    assert sorted(path.name for path in (folder / "out").iterdir()) == sorted(path.name for path in paths)
    page, summary, document = (path.read_text(encoding="utf-8") for path in paths)
    return page, summary, json.loads(document, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


class Balance(HTMLParser):
    """Fails on a tag that is not closed, a script, or a resource from elsewhere."""

    VOID = frozenset({"meta", "link", "br", "hr", "img", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "script"
        for name, value in attrs:
            if name in {"src", "href", "xlink:href"}:
                assert (value or "").startswith(("#", "data:")), (tag, name, value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_page(page: str) -> None:
    parser = Balance()
    parser.feed(page)
    parser.close()
    assert parser.open == []


def test_the_metrics_are_those_of_scikit_learn_on_the_same_predictions(digits_made: Any) -> None:
    found = run(digits_made).metrics
    split = load_split(digits_made.dataset, "test")
    logits = load_model(digits_made.model).predict(split.features).astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    predicted = logits.argmax(axis=1)
    assert found["test_rows"] == len(split.target) == 599
    assert found["test_accuracy"] == reference.accuracy_score(split.target, predicted)
    assert found["test_accuracy"] > 0.93
    expected = {
        "test_f1_macro": reference.f1_score(split.target, predicted, average="macro"),
        "test_auc": reference.roc_auc_score(split.target, probabilities, multi_class="ovr"),
        "test_log_loss": reference.log_loss(split.target, probabilities),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value)
        assert found[f"{name}_low"] < found[name] < found[f"{name}_high"]


def test_regression_metrics_are_those_of_scikit_learn(diabetes_made: Any) -> None:
    found = run(diabetes_made).metrics
    split = load_split(diabetes_made.dataset, "test")
    predicted = load_model(diabetes_made.model).predict(split.features)[:, 0]
    assert found["test_r2"] == pytest.approx(reference.r2_score(split.target, predicted))
    assert found["test_rmse"] == pytest.approx(reference.root_mean_squared_error(split.target, predicted))
    assert found["test_mae"] == pytest.approx(reference.mean_absolute_error(split.target, predicted))
    assert 0.3 < found["test_r2"] < 0.7


def test_the_same_request_gives_the_same_files(digits_made: Any, tmp_path: Path) -> None:
    texts = []
    for name in ("first", "second"):
        evaluation = run(digits_made, slice_by="pen", seed=5)
        texts.append(written(evaluation, tmp_path / name))
    assert texts[0] == texts[1]
    assert run(digits_made, seed=6).metrics != run(digits_made, seed=5).metrics


def test_slices_and_a_baseline_do_not_change_the_intervals(digits_made: Any) -> None:
    alone = run(digits_made).metrics
    more = run(digits_made, baseline=True, slice_by="pen").metrics
    assert {name: more[name] for name in alone} == alone


@pytest.mark.parametrize(
    ("which", "gates", "verdicts"),
    [
        (
            "digits",
            {"min_accuracy": 0.9, "min_f1": 0.9, "min_auc": 0.95, "max_calibration_error": 0.2},
            {True},
        ),
        ("digits", {"min_accuracy": 0.999}, {False}),
        ("digits", {"max_calibration_error": 1e-6}, {False}),
        ("digits", {"max_regression": 0.0}, {True}),
        ("digits", {"max_regression": -0.9}, {False}),
        ("digits", {"min_slice_accuracy": 0.8}, {True}),
        ("digits", {"min_slice_accuracy": 1.0, "min_accuracy": 0.5}, {True, False}),
        ("diabetes", {"min_r2": 0.2, "max_rmse": 70, "max_mae": 60, "max_regression": 0.0}, {True}),
        ("diabetes", {"max_rmse": 1}, {False}),
        ("cancer", {"min_auc": 0.9}, {True}),
        ("cancer", {"min_auc": 1.0}, {False}),
    ],
)
def test_gates_on_real_models(
    which: str, gates: dict[str, float], verdicts: set[bool], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    made = request.getfixturevalue(f"{which}_made")
    slice_by = {"digits": "pen", "diabetes": "bmi", "cancer": "label"}[which]
    found = run(made, baseline=True, gates=gates, slice_by=slice_by)
    assert {rule.passed for rule in found.gate.rules} == verdicts
    assert [rule.name for rule in found.gate.rules] == list(gates)
    assert found.gate.passed is (verdicts == {True})
    page, summary, document = written(found, tmp_path)
    assert document["gate"]["verdict"] == found.gate.verdict
    assert f"gate {found.gate.verdict}" in page
    assert summary.startswith(f"# Evaluation {found.gate.verdict}\n")
    for name in gates:
        assert name in page
        assert name in summary


@pytest.mark.parametrize("which", ["digits", "diabetes", "cancer"])
def test_the_outputs_are_complete(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    made = request.getfixturevalue(f"{which}_made")
    column = {"digits": "pen", "diabetes": "bmi", "cancer": "mean radius"}[which]
    found = run(made, baseline=True, slice_by=column)
    page, summary, document = written(found, tmp_path)
    check_page(page)
    assert document["schema"] == 1
    assert document["metrics"] == found.metrics
    assert sum(row["rows"] for row in document["slices"]["rows"]) == found.rows
    assert document["baseline"]["metrics"][0]["verdict"] == "better"
    assert document["baseline"]["drop"] < 0
    charts = {"digits": 4, "diabetes": 3, "cancer": 4}[which]
    assert page.count("<svg ") == charts
    for heading in ("Gate", "Against the baseline", f"Slices by {column}", "Worst examples", "All metrics"):
        assert f"<h2>{heading}</h2>" in page
    assert f"## Slices by {column}" in summary
    # Every table of the summary has rows of one width: nothing from the data breaks a cell.
    for block in re.findall(r"(?:^\|.*\n)+", summary, flags=re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
    if which != "diabetes":
        matrix = np.array(document["classification"]["confusion_matrix"])
        assert matrix.sum() == found.rows
        assert matrix.trace() / matrix.sum() == found.metrics["test_accuracy"]


def test_slices_are_the_metrics_of_their_rows(digits_made: Any) -> None:
    found = run(digits_made, slice_by="pen")
    assert found.slices is not None
    split = load_split(digits_made.dataset, "test")
    right = load_model(digits_made.model).predict(split.features).argmax(axis=1) == split.target
    pens = split.frame["pen"].fillna("(missing)").to_numpy()
    for row in found.slices.rows:
        assert row.metrics["accuracy"].value == right[pens == row.label].mean()
    worst = min(found.slices.rows, key=lambda row: row.metrics["accuracy"].value)
    assert found.slices.worst == worst.label
    assert found.metrics["test_worst_slice_accuracy"] == worst.metrics["accuracy"].value


def test_small_slices_are_flagged_and_not_gated(digits_made: Any) -> None:
    with pytest.raises(DataError, match=r"no slice of 'pen' has 5000 rows"):
        run(digits_made, slice_by="pen", min_slice_rows=5000, gates={"min_slice_accuracy": 0.1})
    found = run(digits_made, slice_by="pen", min_slice_rows=5000)
    assert found.slices is not None
    assert found.slices.worst is None
    assert all(row.small for row in found.slices.rows)
    assert any("flagged as small" in remark for remark in found.remarks)


def test_the_worst_examples_are_the_confident_mistakes(digits_made: Any) -> None:
    found = run(digits_made, worst_examples=5)
    split = load_split(digits_made.dataset, "test")
    assert len(found.worst) == 5
    chances = [example.prediction["probability of the true class"] for example in found.worst]
    assert chances == sorted(chances)
    for example in found.worst:
        assert example.prediction["true"] == str(split.target[example.row])
        assert example.prediction["predicted"] != example.prediction["true"]
        assert example.columns["number"] == split.frame["number"].iloc[example.row]


class Logarithm(torch.nn.Module):
    """Finite for the example that is saved with it, not finite for inputs below zero."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, outputs)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.log(rows))


@pytest.mark.parametrize("gates", [{}, {"min_accuracy": 0.1}])
def test_predictions_that_are_not_finite_fail_the_gate(
    gates: dict[str, float], digits_made: Any, writers: dict[str, Callable[..., Any]], tmp_path: Path
) -> None:
    writers["save"](tmp_path / "model", Logarithm(64, 10), digits_made.manifest)
    found = evaluate(tmp_path / "model", digits_made.dataset, EvaluateConfig(gates=gates, slice_by="pen"))
    assert found.gate.verdict == "failed"
    assert re.search(r"predictions are not finite .* in [\d,]+ of 599 rows", found.gate.reason)
    assert found.metrics == {"test_rows": 599.0}
    page, summary, document = written(found, tmp_path)
    check_page(page)
    assert "gate failed" in page
    assert "finite_predictions" in summary
    assert document["gate"]["rules"][0]["name"] == "finite_predictions"
    with pytest.raises(DataError, match="baseline 'model': its predictions are not finite"):
        evaluate(digits_made.model, digits_made.dataset, EvaluateConfig(), baseline_folder=tmp_path / "model")


def made_rows(writers: dict[str, Callable[..., Any]], **fields: Any) -> Any:
    rng = np.random.default_rng(0)
    defaults = {
        "name": "made",
        "features": rng.normal(size=(90, 3)),
        "target": rng.integers(2, size=90),
        "classes": ("no", "yes"),
        "names": ("a", "b", "c"),
        "extra": {},
    }
    return writers["Rows"](**{**defaults, **fields})


def test_one_class_only_in_the_split(writers: dict[str, Callable[..., Any]], tmp_path: Path) -> None:
    rows = made_rows(writers)
    manifest = writers["write_rows"](tmp_path / "data", rows, test=np.flatnonzero(rows.target == 1))
    writers["save"](tmp_path / "model", torch.nn.Linear(3, 2), manifest)
    found = evaluate(tmp_path / "model", tmp_path / "data", EvaluateConfig(bootstrap=100))
    assert "test_auc" not in found.metrics
    assert "every row has the class 'yes'" in found.undefined["auc"]
    page, summary, document = written(found, tmp_path)
    assert "auc is undefined" in page
    assert "auc is undefined" in summary
    assert document["undefined"]["auc"]
    assert found.roc_view() is None
    with pytest.raises(DataError, match=r"min_auc cannot be judged: every row .* has the class 'yes'"):
        evaluate(tmp_path / "model", tmp_path / "data", EvaluateConfig(gates={"min_auc": 0.5}))


def test_a_constant_target(writers: dict[str, Callable[..., Any]], tmp_path: Path) -> None:
    rows = made_rows(writers, target=np.full(90, 4.5), classes=None)
    manifest = writers["write_rows"](tmp_path / "data", rows)
    writers["save"](tmp_path / "model", torch.nn.Linear(3, 1), manifest)
    found = evaluate(tmp_path / "model", tmp_path / "data", EvaluateConfig(bootstrap=100))
    assert "test_r2" not in found.metrics
    assert "4.5 in every row" in found.undefined["r2"]
    check_page(written(found, tmp_path)[0])
    with pytest.raises(DataError, match=r"min_r2 cannot be judged: the target 'label' is 4\.5"):
        evaluate(tmp_path / "model", tmp_path / "data", EvaluateConfig(gates={"min_r2": 0.5}))


def test_a_single_row(writers: dict[str, Callable[..., Any]], tmp_path: Path) -> None:
    manifest = writers["write_rows"](tmp_path / "data", made_rows(writers), test=np.array([3]))
    writers["save"](tmp_path / "model", torch.nn.Linear(3, 2), manifest)
    found = evaluate(tmp_path / "model", tmp_path / "data", EvaluateConfig(slice_by="a"))
    assert found.metrics["test_rows"] == 1
    check_page(written(found, tmp_path)[0])


def test_strange_names_reach_the_outputs_as_text(
    writers: dict[str, Callable[..., Any]], tmp_path: Path
) -> None:
    classes = ("<b>no</b>", "a|b $x_1$ and a label that does not end")
    rows = made_rows(writers, classes=classes, extra={"東京 $y$": ["<script>|" * 20] * 89 + [None]})
    manifest = writers["write_rows"](tmp_path / "data", rows, target_name="$<i>")
    writers["save"](tmp_path / "model", torch.nn.Linear(3, 2), manifest)
    found = evaluate(
        tmp_path / "model", tmp_path / "data", EvaluateConfig(bootstrap=100, slice_by="東京 $y$")
    )
    page, summary, document = written(found, tmp_path)
    check_page(page)
    assert "<b>no" not in page
    assert "&lt;b&gt;no&lt;/b&gt;" in page
    assert "<script>" not in summary.replace("\\<script\\>", "")
    assert document["classification"]["classes"] == list(classes)


def test_many_classes(writers: dict[str, Callable[..., Any]], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = made_rows(
        writers,
        features=rng.normal(size=(900, 3)),
        target=rng.integers(150, size=900),
        classes=tuple(f"c{i}" for i in range(150)),
    )
    manifest = writers["write_rows"](tmp_path / "data", rows)
    writers["save"](tmp_path / "model", torch.nn.Linear(3, 150), manifest)
    found = evaluate(tmp_path / "model", tmp_path / "data", EvaluateConfig(bootstrap=100))
    page = written(found, tmp_path)[0]
    assert "150 classes are too many to draw" in page
    assert "The 100 classes with the lowest F1." in page
    assert found.confusion_view() is None
    assert found.roc_view() is not None


@pytest.mark.parametrize(
    ("fields", "baseline", "error", "parts"),
    [
        ({"split": "tset"}, False, UnknownNameError, ["unknown split 'tset'", "did you mean 'test'"]),
        ({"split": "validation"}, False, DataError, ["'validation'", "is empty", "'train' or 'test'"]),
        ({"slice_by": "pem"}, False, UnknownNameError, ["slice_by column 'pem'", "did you mean 'pen'"]),
        ({"gates": {"min_r2": 0.5}}, False, InputError, ["min_r2", "task is classification"]),
        ({"gates": {"max_regression": 0.1}}, False, InputError, ["max_regression", "baseline"]),
    ],
)
def test_a_request_that_cannot_work(
    fields: dict[str, Any], baseline: bool, error: type[Exception], parts: list[str], digits_made: Any
) -> None:
    with pytest.raises(error) as caught:
        run(digits_made, baseline=baseline, **fields)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            {"names": ("a", "b", "d")},
            ["'model'", "'made'", "only the dataset has 'd'", "only the model has 'c'"],
        ),
        ({"names": ("a", "c", "b")}, ["the order differs: number 2 is 'b' in the model and 'c'"]),
        ({"classes": ("no", "yes", "maybe")}, ["2 classes", "has 3", "only the dataset has 'maybe'"]),
        ({"classes": ("yes", "no")}, ["the order differs: number 1 is 'no'"]),
        ({"classes": None}, ["task 'classification'", "task 'regression'"]),
    ],
)
@pytest.mark.parametrize("role", ["model", "baseline"])
def test_a_model_of_another_dataset_is_refused_and_both_are_named(
    change: dict[str, Any],
    parts: list[str],
    role: str,
    writers: dict[str, Callable[..., Any]],
    tmp_path: Path,
) -> None:
    mine = writers["write_rows"](tmp_path / "mine", made_rows(writers))
    other = writers["write_rows"](tmp_path / "other", made_rows(writers, **change))
    fitting = (other.classes and len(other.classes)) or 1
    writers["save"](tmp_path / "model", torch.nn.Linear(3, 2), mine)
    writers["save"](tmp_path / "fits", torch.nn.Linear(3, fitting), other)
    tested = tmp_path / ("model" if role == "model" else "fits")
    baseline = None if role == "model" else tmp_path / "model"
    with pytest.raises(InputError) as caught:
        evaluate(tested, tmp_path / "other", EvaluateConfig(), baseline_folder=baseline)
    assert str(caught.value).startswith(f"{role} 'model'")
    for part in parts:
        assert part in str(caught.value)


def test_another_target_is_refused(writers: dict[str, Callable[..., Any]], tmp_path: Path) -> None:
    mine = writers["write_rows"](tmp_path / "mine", made_rows(writers))
    writers["write_rows"](tmp_path / "other", made_rows(writers), target_name="answer")
    writers["save"](tmp_path / "model", torch.nn.Linear(3, 2), mine)
    with pytest.raises(InputError, match="target 'label', but dataset 'made' has target 'answer'"):
        evaluate(tmp_path / "model", tmp_path / "other", EvaluateConfig())


def test_targets_that_cannot_be(writers: dict[str, Callable[..., Any]], tmp_path: Path) -> None:
    wrong_class = made_rows(writers, target=np.array([0, 1] * 44 + [0, 2]))
    not_finite = made_rows(writers, target=np.array([0.5] * 89 + [np.nan]), classes=None)
    for name, rows, outputs in (("classes", wrong_class, 2), ("values", not_finite, 1)):
        manifest = writers["write_rows"](tmp_path / name, rows, test=np.arange(80, 90))
        writers["save"](tmp_path / f"{name}_model", torch.nn.Linear(3, outputs), manifest)
    with pytest.raises(IntegrityError, match="'label' has a class index outside 0 … 1"):
        evaluate(tmp_path / "classes_model", tmp_path / "classes", EvaluateConfig())
    with pytest.raises(
        DataError, match=r"'label' is not a finite number in 1 rows \(first: row 9, value nan"
    ):
        evaluate(tmp_path / "values_model", tmp_path / "values", EvaluateConfig())


def test_features_that_are_not_finite_are_the_datas_fault(
    writers: dict[str, Callable[..., Any]], tmp_path: Path
) -> None:
    rows = made_rows(writers)
    rows.features[3, 1] = np.nan
    manifest = writers["write_rows"](tmp_path / "data", rows, test=np.array([1, 3, 5]))
    writers["save"](tmp_path / "model", torch.nn.Linear(3, 2), manifest)
    with pytest.raises(DataError, match=r"column 'b' is not finite in 1 rows \(first: row 1\)"):
        evaluate(tmp_path / "model", tmp_path / "data", EvaluateConfig())


def test_missing_and_damaged_folders(digits_made: Any, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        evaluate(tmp_path / "none", digits_made.dataset, EvaluateConfig())
    with pytest.raises(MissingFileError):
        evaluate(digits_made.model, tmp_path / "none", EvaluateConfig())
    with pytest.raises(MissingFileError):
        evaluate(digits_made.model, digits_made.dataset, EvaluateConfig(), baseline_folder=tmp_path / "none")
    damaged = tmp_path / "model"
    damaged.mkdir()
    for file in digits_made.model.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(IntegrityError):
        evaluate(damaged, digits_made.dataset, EvaluateConfig())


class Certain(torch.nn.Module):
    """Ends with a softmax, against the contract."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, outputs)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.linear(rows), dim=1)


def test_probabilities_in_place_of_logits_are_noticed(
    digits_made: Any, writers: dict[str, Callable[..., Any]], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    writers["save"](tmp_path / "model", Certain(64, 10), digits_made.manifest)
    found = evaluate(tmp_path / "model", digits_made.dataset, EvaluateConfig(bootstrap=0))
    assert any("probabilities, not logits" in remark for remark in found.remarks)
    split = load_split(digits_made.dataset, "test")
    probabilities = load_model(tmp_path / "model").predict(split.features)
    assert found.metrics["test_log_loss"] == pytest.approx(
        reference.log_loss(split.target, probabilities), rel=1e-4
    )
    assert "test_accuracy_low" not in found.metrics


def test_an_output_that_cannot_be_written_is_an_error(digits_made: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises((OSError, ElasticError)):
        write_outputs(
            run(digits_made),
            report=tmp_path / "file" / "report",
            summary=tmp_path / "summary",
            document=tmp_path / "document",
        )
    same = tmp_path / "same"
    with pytest.raises(ElasticError, match="give it its own path"):
        write_outputs(run(digits_made), report=same, summary=tmp_path / "x" / ".." / "same", document=same)
