"""From source to dataset folder: roles, types, rules, quarantine, determinism and the report."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from elastic_runtime.datasets import load_split, read_manifest
from elastic_runtime.errors import DataError, ElasticError, InputError, NameInUseError, UnknownNameError
from elastic_runtime.preprocessing import PreprocessConfig, PreprocessResult, preprocess, render_report

ROWS = 60


def frame(**columns: Any) -> pd.DataFrame:
    """Rows that keep every rule: two numeric features, a city, an id and two classes."""
    rng = np.random.default_rng(0)
    base = {
        "a": rng.normal(size=ROWS).round(4),
        "b": rng.permutation(ROWS) * 3 - 7,
        "city": np.array(["Bern", "NA", "Zürich"])[np.arange(ROWS) % 3],
        "id": [f"{i:04d}" for i in range(ROWS)],
        "y": np.arange(ROWS) % 2,
    }
    return pd.DataFrame({**base, **columns})


def save(folder: Path, data: pd.DataFrame, name: str = "rows.csv") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    if name.endswith(".csv"):
        data.to_csv(path, index=False)
    elif name.endswith(".jsonl"):
        data.to_json(path, orient="records", lines=True)
    else:
        data.to_parquet(path, index=False)
    return str(path)


def run(tmp_path: Path, data: pd.DataFrame | str, *, out: str = "out", **fields: Any) -> PreprocessResult:
    source = data if isinstance(data, str) else save(tmp_path, data)
    settings = {"target": "y", "extra_columns": ["city", "id"], **fields}
    return preprocess(PreprocessConfig(source=source, **settings), tmp_path / out)


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def stored(folder: Path) -> pd.DataFrame:
    return pd.concat(
        [load_split(folder, s).frame for s in ("train", "validation", "test")], ignore_index=True
    )


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.parquet"])
def test_every_format_gives_the_same_dataset(tmp_path: Path, name: str) -> None:
    data = frame()
    result = run(tmp_path, save(tmp_path, data, name), normalise="none")
    manifest = read_manifest(tmp_path / "out")
    assert manifest == result.manifest
    assert (manifest.task, manifest.classes, manifest.features) == ("classification", ("0", "1"), ("a", "b"))
    assert {n: s.rows for n, s in manifest.splits.items()} == {"train": 42, "validation": 9, "test": 9}
    assert manifest.name == manifest.source.url == name
    assert manifest.source.sha256 == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    table = stored(tmp_path / "out").sort_values("id").reset_index(drop=True)
    np.testing.assert_array_equal(table["a"], data["a"].astype(np.float32))
    np.testing.assert_array_equal(table["b"], data["b"].astype(np.float32))
    assert table["y"].tolist() == data["y"].tolist()
    assert table["city"].tolist() == data["city"].tolist()
    assert table["id"].tolist() == data["id"].tolist()


def test_normalised_by_the_training_split(tmp_path: Path) -> None:
    data = frame()
    manifest = run(tmp_path, data).manifest
    ids = load_split(tmp_path / "out", "train").frame["id"]
    train = data[data["id"].isin(ids)]
    for name in ("a", "b"):
        statistics = manifest.statistics[name]
        assert statistics.mean == pytest.approx(train[name].mean(), rel=1e-12)
        assert statistics.std == pytest.approx(train[name].std(ddof=0), rel=1e-12)
    test = load_split(tmp_path / "out", "test").frame
    raw = data.set_index("id").loc[test["id"], "b"].to_numpy()
    statistics = manifest.statistics["b"]
    np.testing.assert_array_equal(test["b"], ((raw - statistics.mean) / statistics.std).astype(np.float32))


def test_the_order_of_rows_and_files_does_not_matter(tmp_path: Path) -> None:
    data = frame()
    run(tmp_path, save(tmp_path / "one", data), out="first")
    shuffled = data.sample(frac=1, random_state=1)
    save(tmp_path / "many", shuffled.iloc[:20], "b.csv")
    save(tmp_path / "many", shuffled.iloc[20:], "a.csv")
    run(tmp_path, str(tmp_path / "many"), out="second")
    first, second = digests(tmp_path / "first"), digests(tmp_path / "second")
    assert first.pop("manifest.json") != second.pop("manifest.json")
    assert first == second
    assert len(first) == 3


def test_rows_per_shard_cuts_the_splits(tmp_path: Path) -> None:
    manifest = run(tmp_path, frame(), rows_per_shard=20).manifest
    assert [shard.rows for shard in manifest.splits["train"].shards] == [20, 20, 2]
    assert len(load_split(tmp_path / "out", "train")) == 42


@pytest.mark.parametrize(
    ("labels", "task", "expected_task", "classes"),
    [
        ([0, 1], "auto", "classification", ("0", "1")),
        ([10, 9, 2], "auto", "classification", ("2", "9", "10")),
        (["1", "2.0"], "auto", "classification", ("1", "2")),
        (["01", "02"], "auto", "classification", ("01", "02")),
        (["True", "False"], "auto", "classification", ("False", "True")),
        (["b", "Ä", "a"], "auto", "classification", ("a", "b", "Ä")),
        (["NA", "CH"], "auto", "classification", ("CH", "NA")),
        ([0.5, 1.5], "auto", "regression", None),
        (list(range(ROWS)), "auto", "regression", None),
        (list(range(21)), "auto", "regression", None),
        ([0, 1], "regression", "regression", None),
        ([0.5, 1.5], "classification", "classification", ("0.5", "1.5")),
    ],
)
def test_task_and_classes(
    tmp_path: Path, labels: list[Any], task: str, expected_task: str, classes: tuple[str, ...] | None
) -> None:
    column = [labels[i % len(labels)] for i in range(ROWS)]
    result = run(tmp_path, frame(y=column), task=task)
    assert result.manifest.task == expected_task
    assert result.manifest.classes == classes
    table = stored(tmp_path / "out").set_index("id").sort_index()
    if classes is None:
        assert table["y"].tolist() == [float(label) for label in column]
    else:
        texts = [str(label).removesuffix(".0") for label in column]
        assert [classes[i] for i in table["y"]] == texts


@pytest.mark.parametrize(
    ("change", "fields", "error", "message"),
    [
        ({}, {"target": "why"}, UnknownNameError, r"column in target 'why'"),
        ({}, {"target": ""}, InputError, r"target is empty: .* 'a', 'b', 'city', 'id', 'y'"),
        ({}, {"features": ["aa"]}, UnknownNameError, r"column in features 'aa'; did you mean 'a'"),
        ({}, {"extra_columns": ["town"]}, UnknownNameError, r"column in extra_columns 'town'"),
        (
            {},
            {"extra_columns": ["id"]},
            DataError,
            r"column 'city' holds text and cannot be a feature, which is a",
        ),
        (
            {},
            {"extra_columns": []},
            DataError,
            r"columns 'city', 'id' hold text and cannot be features, which are numbers",
        ),
        ({}, {"extra_columns": ["a", "b", "city", "id"]}, InputError, r"no column left for the features"),
        (
            {},
            {"features": ["city"], "extra_columns": []},
            DataError,
            r"column 'city': not a number in 40 rows",
        ),
        ({"a": [""] * ROWS}, {}, DataError, r"column 'a' has no value in any row"),
        ({"y": [""] * ROWS}, {}, DataError, r"column 'y', the target, has no value"),
        ({"y": 1}, {"task": "classification"}, DataError, r"column 'y': all rows have the class '1'"),
        ({"y": "x"}, {"task": "regression"}, DataError, r"column 'y': not a number in 60 rows"),
        ({"y": ["n"] * 58 + ["m"] * 2}, {}, DataError, r"class 'm' has 2, each class needs 3"),
        ({"y": [f"c{i}" for i in range(ROWS)]}, {}, DataError, r"55 more classes.*is it the right target"),
        (
            {"a": ["x", *range(59)]},
            {},
            DataError,
            r"column 'a': not a number in 1 row \(row 1, the first is 'x'",
        ),
        ({"a": [*range(59), ""]}, {}, DataError, r"column 'a': missing value in 1 row \(row 60\)"),
        ({"a": [*range(59), "nan"]}, {}, DataError, r"column 'a': missing value in 1 row \(row 60\)"),
        ({"a": ["-inf", *range(59)]}, {}, DataError, r"column 'a': infinite in 1 row \(row 1"),
        ({"a": ["1e39", *range(59)]}, {}, DataError, r"column 'a': beyond float32 in 1 row \(row 1"),
        ({"y": [0.5] * 59 + ["oops"]}, {}, DataError, r"column 'y': not a number in 1 row \(row 60"),
        ({"y": ["", *["p", "q"] * 29, "p"]}, {}, DataError, r"column 'y': missing value in 1 row \(row 1\)"),
        ({}, {"schema": {"c": "text"}}, DataError, r"column 'c' of the schema is missing"),
        ({}, {"schema": {"a": {"nullable": True}}}, InputError, r"'a' is a feature and cannot be nullable"),
        ({}, {"schema": {"city": {"min": 1}}}, InputError, r"column 'city' has min or max but holds text"),
        ({}, {"schema": {"b": {"allowed": ["x"]}}}, InputError, r"column 'b' holds integer and allows 'x'"),
        (
            {},
            {"schema": {"b": {"min": 0, "max": 160.0}}},
            DataError,
            r"'b': above the maximum 160 .*minimum 0",
        ),
        ({}, {"schema": {"a": "integer"}}, DataError, r"column 'a': not a whole number in 60 rows"),
        ({}, {"schema": {"city": {"allowed": ["Bern", "NA"]}}}, DataError, r"'city': none of .* in 20 rows"),
        ({}, {"schema": {"y": {"allowed": [0.0]}}}, DataError, r"'y': none of the allowed values 0.0 in 30"),
        ({}, {"schema": {"city": {"unique": True}}}, DataError, r"'city': repeats a value .* in 57 rows"),
        ({"city": [""] * 60}, {"schema": {"city": {"nullable": False}}}, DataError, r"'city': missing value"),
        ({}, {"train_fraction": 0.0}, InputError, r"train_fraction is 0"),
    ],
)
def test_bad_input_is_named(
    tmp_path: Path, change: dict[str, Any], fields: dict[str, Any], error: type[ElasticError], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(tmp_path, frame(**change), **fields)
    assert not (tmp_path / "out").exists()


def test_schema_that_holds_passes(tmp_path: Path) -> None:
    schema = {
        "a": {"dtype": "number", "min": -5, "max": 5},
        "b": {"dtype": "integer", "unique": True},
        "city": {"allowed": ["Bern", "NA", "Zürich"], "nullable": True},
        "id": {"dtype": "text", "unique": True, "nullable": False},
        "y": {"allowed": ["0", 1.0]},
    }
    assert run(tmp_path, frame(), schema=schema).metrics()["rows_quarantined"] == 0
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(schema))
    assert run(tmp_path, frame(), schema=path, out="other").manifest.splits["train"].rows == 42


def test_dtype_text_makes_numbers_labels(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        frame(y=np.arange(ROWS) % 30 + 0.0),
        schema={"y": "text"},
        train_fraction=1.0,
        validation_fraction=0.0,
        test_fraction=0.0,
    )
    assert result.manifest.task == "classification"
    assert result.manifest.classes is not None
    assert "29.0" in result.manifest.classes


def bad_frame() -> pd.DataFrame:
    data = frame().astype(object)
    data.loc[3, "a"] = "x"
    data.loc[5, "b"] = ""
    data.loc[5, "a"] = "inf"
    data.loc[60] = data.loc[7]
    return data


def test_quarantine_keeps_bad_rows_with_their_reasons(tmp_path: Path) -> None:
    source = save(tmp_path, bad_frame())
    with Path(source).open("a") as file:
        file.write("1,2\n")
    result = run(tmp_path, source, on_bad_rows="quarantine", max_quarantine_fraction=0.1)
    lines = [json.loads(line) for line in (tmp_path / "out/quarantine.jsonl").read_text().splitlines()]
    assert [(line["file"], line["row"]) for line in lines] == [("rows.csv", n) for n in (4, 6, 61, 62)]
    assert [[(r["column"], r["rule"]) for r in line["reasons"]] for line in lines] == [
        [("a", "not a number")],
        [("a", "infinite"), ("b", "missing value")],
        [(None, "repeats an earlier row")],
        [(None, "2 fields where the header has 5")],
    ]
    assert lines[0]["record"] == {"a": "x", "b": str(frame()["b"][3]), "city": "Bern", "id": "0003", "y": "1"}
    assert lines[3]["text"] == "1,2"
    assert result.manifest.source.rows == 62
    assert result.manifest.source.rows_quarantined == 4
    assert sorted(stored(tmp_path / "out")["id"]) == [f"{i:04d}" for i in range(60) if i not in (3, 5)]


def test_too_many_bad_rows_stop_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"3 of 61 rows \(4.9%\) are bad, more than max_quarantine_fraction = 0.04"
    ):
        run(tmp_path, bad_frame(), on_bad_rows="quarantine", max_quarantine_fraction=0.04)
    assert run(tmp_path, bad_frame(), on_bad_rows="quarantine").manifest.source.rows_quarantined == 3


def test_nothing_left_after_the_quarantine(tmp_path: Path) -> None:
    data = frame(a=["x"] * 20 + ["y"] * 20 + ["z"] * 20)
    with pytest.raises(DataError, match="no row is left"):
        run(tmp_path, data, features=["a"], on_bad_rows="quarantine", max_quarantine_fraction=1.0)


def test_duplicates(tmp_path: Path) -> None:
    twice = pd.concat([frame(), frame().iloc[[1, 2, 2]]])
    with pytest.raises(
        DataError, match=r"repeats an earlier row in 3 rows \(rows 61, 62, 63\).*duplicate_rows='keep'"
    ):
        run(tmp_path, twice)
    kept = run(tmp_path, twice, duplicate_rows="keep")
    assert sum(split.rows for split in kept.manifest.splits.values()) == 63
    # The ids differ, so no row repeats another, though the features do: they stay in one split.
    ids = pd.concat([frame(), frame(id=[f"x{i}" for i in range(ROWS)])])
    run(tmp_path, ids, out="ids")
    splits = [
        set(map(tuple, load_split(tmp_path / "ids", s).features)) for s in ("train", "validation", "test")
    ]
    assert sum(map(len, splits)) == len(set.union(*splits)) == ROWS


def test_conflicts_are_reported(tmp_path: Path) -> None:
    other = frame(y=1 - np.arange(ROWS) % 2, id=[f"x{i}" for i in range(ROWS)]).iloc[:2]
    result = run(tmp_path, pd.concat([frame(), other]))
    assert result.metrics()["conflicting_rows"] == 4
    assert result.profile.conflict_examples == ("1", "2", "61", "62")


def test_rows_of_a_folder_are_named_by_file(tmp_path: Path) -> None:
    save(tmp_path / "set", frame().iloc[:30], "a.csv")
    save(tmp_path / "set", frame(a=["x", *range(59)]).iloc[[0]], "b.csv")
    with pytest.raises(DataError, match=r"not a number in 1 row \(row 1 of b.csv"):
        run(tmp_path, str(tmp_path / "set"))


@pytest.mark.parametrize(
    ("name", "task", "features", "classes", "rows"),
    [
        ("digits", "classification", 64, 10, 1797),
        ("iris", "classification", 4, 3, 150),
        ("wine", "classification", 13, 3, 178),
        ("breast_cancer", "classification", 30, 2, 569),
        ("diabetes", "regression", 10, None, 442),
    ],
)
def test_built_in_sets(
    tmp_path: Path, name: str, task: str, features: int, classes: int | None, rows: int
) -> None:
    manifest = preprocess(PreprocessConfig(source=name), tmp_path / "out").manifest
    assert (manifest.task, len(manifest.features), manifest.source.rows) == (task, features, rows)
    assert manifest.source.url == f"builtin:{name}"
    assert (manifest.classes and len(manifest.classes)) == classes
    same = preprocess(PreprocessConfig(source=f"builtin:{name}"), tmp_path / "again").manifest
    assert same == manifest


def test_iris_labels_and_its_repeated_row(tmp_path: Path) -> None:
    result = preprocess(PreprocessConfig(source="iris"), tmp_path / "out")
    assert result.manifest.classes == ("setosa", "versicolor", "virginica")
    with pytest.raises(DataError, match=r"repeats an earlier row in 1 row \(row 143\)"):
        preprocess(PreprocessConfig(source="iris", duplicate_rows="bad"), tmp_path / "other")


def test_unknown_built_in_set(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown built-in set 'digit'; did you mean 'digits'"):
        preprocess(PreprocessConfig(source="builtin:digit"), tmp_path / "out")


def test_constant_features_are_reported(tmp_path: Path) -> None:
    result = run(tmp_path, frame(c=0.1))
    assert result.profile.constant_features == ("c",)
    assert result.manifest.statistics["c"].std == 1.0
    assert not load_split(tmp_path / "out", "test").frame["c"].any()


def test_output_folder_in_use(tmp_path: Path) -> None:
    run(tmp_path, frame())
    with pytest.raises(NameInUseError, match="out"):
        run(tmp_path, frame())


def test_header_without_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no row of data"):
        run(tmp_path, frame().iloc[:0])


# --- the report


def test_report_shows_what_was_found(tmp_path: Path) -> None:
    data = bad_frame()
    data["double"] = 2 * data["y"].astype(float) + 1
    data["row"] = range(len(data))
    data["flat"] = 1.5
    result = run(
        tmp_path,
        data,
        extra_columns=["city", "id"],
        on_bad_rows="quarantine",
        max_quarantine_fraction=0.1,
        schema={"b": {"min": -100}},
    )
    page = render_report(result)
    for text in (
        "Data report: rows.csv",
        "not a number",
        "missing value",
        "quarantine.jsonl",
        "tells the target &#39;y&#39; completely",
        "Feature &#39;row&#39; counts through the rows",
        "flat",
        "≥ -100",
        "Class balance",
        result.manifest.source.sha256,
    ):
        assert text in page, text
    assert page.count("<svg") == 2
    assert str(tmp_path) not in page


@pytest.mark.parametrize(("source", "badge"), [("wine", "no findings"), ("digits", "nothing to mend")])
def test_the_badge_of_a_report_says_what_its_findings_say(tmp_path: Path, source: str, badge: str) -> None:
    page = render_report(preprocess(PreprocessConfig(source=source), tmp_path / "out"))
    assert f'<span class="badge good">{badge}</span>' in page
    assert ("Constant over the training split" in page) == (source == "digits")


@pytest.mark.parametrize("source", ["iris", "digits"])
def test_report_of_features_says_which_line_is_which_split(tmp_path: Path, source: str) -> None:
    page = render_report(preprocess(PreprocessConfig(source=source), tmp_path / "out"))
    drawn = page[page.index(">Distributions<") : page.index(">Columns<")]
    for split in ("train", "validation", "test"):
        assert len(re.findall(rf"<text[^>]*>{split}</text>", drawn)) == 1
    assert "nothing found" not in page


def test_report_of_a_wide_set_stays_small(tmp_path: Path) -> None:
    result = preprocess(PreprocessConfig(source="digits"), tmp_path / "out")
    page = render_report(result)
    assert len(page.encode()) < 200_000
    assert "Of 64 features, the 12 most associated" in page
    assert len(result.profile.histograms) == 12
    assert "pixel_0_0, pixel_4_0" in page


def test_report_escapes_what_comes_from_the_data(tmp_path: Path) -> None:
    nasty = "<script>alert(1)</script> $x^2$"
    data = frame(**{nasty: np.arange(ROWS) * 0.5}, y=[("<b>", "$y$")[i % 2] for i in range(ROWS)])
    page = render_report(run(tmp_path, data))
    assert "<script" not in page
    assert "<b>" not in page
    assert "&lt;script&gt;" in page


def test_report_draws_labels_in_any_script(tmp_path: Path) -> None:
    data = frame(y=[("猫", "\x01dog")[i % 2] for i in range(ROWS)], **{"x\t$\\": np.arange(ROWS) / 7})
    page = render_report(run(tmp_path, data))
    charts = "".join(re.findall("<svg.*?</svg>", page, re.DOTALL))
    assert "猫" in charts
    assert "dog" in charts
    assert not set(charts) & {"\x01", "\t"}


def test_report_has_no_resource_from_elsewhere(tmp_path: Path) -> None:
    page = render_report(preprocess(PreprocessConfig(source="diabetes"), tmp_path / "out"))
    assert set(re.findall(r'(?:src|href)="(?!#)([^"]*)"', page)) <= {"data:,"}
    assert "url(http" not in page


@pytest.mark.parametrize("source", ["digits", "diabetes", "wine"])
def test_report_is_the_same_every_time(tmp_path: Path, source: str) -> None:
    pages = [
        render_report(preprocess(PreprocessConfig(source=source), tmp_path / name)) for name in ("one", "two")
    ]
    assert pages[0] == pages[1]
