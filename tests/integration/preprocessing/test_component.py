"""The component under kfp's local runner, in a pipeline, and called as a plain function."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from kfp import compiler, dsl, local
from kfp.dsl import HTML, Dataset, Metrics

from elastic_runtime.datasets import load_split, read_manifest
from elastic_runtime.errors import DataError, InputError
from kfp_elastic.components import preprocess

# kfp warns of every image whose name lacks "python"; the runner takes this interpreter anyway.
pytestmark = pytest.mark.filterwarnings("ignore:You may be attemping to run a task:RuntimeWarning")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    local.init(
        local.SubprocessRunner(use_venv=False), pipeline_root=str(tmp_path / "runs"), raise_on_error=True
    )
    return tmp_path / "runs"


def only(root: Path, name: str) -> Path:
    found = list(root.rglob(name))
    assert len(found) == 1, found
    return found[0]


def rows() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "size": [i % 40 + i / 100 for i in range(120)],
            "age": [i * 7 % 90 for i in range(120)],
            "town": ["Bern", "Basel", "Chur"] * 40,
            "sold": [i % 2 for i in range(120)],
        }
    )


def test_pipeline_with_a_built_in_set(root: Path) -> None:
    @dsl.pipeline(name="only-preprocess")
    def pipeline() -> None:
        preprocess(source="digits", seed=7, rows_per_shard=500)

    pipeline()
    folder = only(root, "manifest.json").parent
    manifest = read_manifest(folder)
    assert folder.name == "dataset"
    assert manifest.seed == 7
    assert [shard.rows for shard in manifest.splits["train"].shards] == [500, 500, 258]
    assert len(load_split(folder, "test")) == 269
    report = only(root, "report").read_text(encoding="utf-8")
    assert report.startswith("<!")
    assert "Data report: digits" in report


def test_pipeline_with_lists_and_a_schema(root: Path, tmp_path: Path) -> None:
    """kfp turns the integers in the schema into floats: they still mean what was written."""
    data = rows()
    data.loc[5, "age"] = 300
    data.to_csv(tmp_path / "houses.csv", index=False)
    source = str(tmp_path / "houses.csv")
    schema = {
        "age": {"dtype": "integer", "min": 0, "max": 120},
        "sold": {"allowed": [0, 1]},
        "town": {"dtype": "text", "allowed": ["Bern", "Basel", "Chur"]},
    }

    @dsl.pipeline(name="houses")
    def pipeline(source: str) -> None:
        preprocess(
            source=source,
            target="sold",
            features=["age", "size"],
            extra_columns=["town"],
            schema=schema,
            on_bad_rows="quarantine",
            validation_fraction=0.0,
            test_fraction=0.3,
        )

    pipeline(source=source)
    folder = only(root, "manifest.json").parent
    manifest = read_manifest(folder)
    assert manifest.features == ("age", "size")
    assert manifest.classes == ("0", "1")
    assert (manifest.source.rows, manifest.source.rows_quarantined) == (120, 1)
    assert {name: split.rows for name, split in manifest.splits.items()} == {
        "train": 83,
        "validation": 0,
        "test": 36,
    }
    assert '"row": 6' in (folder / "quarantine.jsonl").read_text()
    assert set(load_split(folder, "test").frame["town"]) == {"Bern", "Basel", "Chur"}


def test_bad_rows_fail_the_pipeline(root: Path, tmp_path: Path) -> None:
    rows().astype({"age": object}).replace({"age": {7: "seven"}}).to_csv(tmp_path / "bad.csv", index=False)
    source = str(tmp_path / "bad.csv")

    @dsl.pipeline(name="bad")
    def pipeline(source: str) -> None:
        preprocess(source=source, target="sold", extra_columns=["town"])

    with pytest.raises(RuntimeError, match="FAILURE"):
        pipeline(source=source)
    assert list(root.rglob("manifest.json")) == []
    assert list(root.rglob("*.partial")) == []


def call(folder: Path, **parameters: Any) -> tuple[Dataset, HTML, Metrics]:
    outputs = (
        Dataset(name="dataset", uri=str(folder / "dataset")),
        HTML(name="report", uri=str(folder / "report.html")),
        Metrics(name="summary", uri=str(folder / "summary")),
    )
    dataset, report, summary = outputs
    preprocess.python_func(dataset=dataset, report=report, summary=summary, **parameters)
    return outputs


def test_called_as_a_function(tmp_path: Path) -> None:
    rows().to_parquet(tmp_path / "houses.parquet")
    dataset, report, summary = call(
        tmp_path, source=str(tmp_path / "houses.parquet"), target="size", extra_columns=["town", "sold"]
    )
    manifest = read_manifest(dataset.path)
    assert manifest.task == "regression"
    assert summary.metadata["train_rows"] == manifest.splits["train"].rows == 84
    assert summary.metadata["rows"] == 120
    assert dataset.metadata["target"] == "size"
    assert dataset.metadata["rows"] == "train 84, validation 18, test 18"
    assert "Target “size”" in Path(report.path).read_text(encoding="utf-8")


def test_schema_file(tmp_path: Path) -> None:
    rows().to_csv(tmp_path / "houses.csv", index=False)
    (tmp_path / "rules.yaml").write_text("age: {max: 50}\n")
    settings = {
        "source": str(tmp_path / "houses.csv"),
        "target": "sold",
        "extra_columns": ["town"],
        "schema_file": str(tmp_path / "rules.yaml"),
    }
    with pytest.raises(DataError, match="column 'age': above the maximum 50"):
        call(tmp_path, **settings)
    with pytest.raises(InputError, match="schema and schema_file="):
        call(tmp_path, **settings, schema={"age": {"max": 50}})
    assert not (tmp_path / "dataset").exists()
    assert not (tmp_path / "report.html").exists()


def test_every_parameter_is_described(tmp_path: Path) -> None:
    compiler.Compiler().compile(preprocess, str(tmp_path / "component.yaml"))
    spec = preprocess.component_spec
    documented = (tmp_path / "component.yaml").read_text()
    inputs, outputs = spec.inputs or {}, spec.outputs or {}
    assert len(inputs) == 16
    assert all(value.description for value in inputs.values()), inputs
    assert all(value.description for value in outputs.values()), outputs
    assert "pip install" not in documented
