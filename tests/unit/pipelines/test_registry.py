"""Names of pipelines."""

import pytest

from elastic_runtime.errors import MissingFileError, UnknownNameError
from elastic_runtime.preprocessing import PreprocessConfig, preprocess
from kfp_elastic.pipelines import REGISTRY, lookup
from kfp_elastic.pipelines.sources import module_sha256


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("digits", "digits"),
        ("tabular_regression", "tabular_regression"),
        ("tabular-regression", "tabular_regression"),
    ],
)
def test_both_spellings(given, name):
    assert lookup(given) is REGISTRY[name]


@pytest.mark.parametrize(
    ("given", "hint"), [("digit", "did you mean 'digits'?"), ("tabular-regresion", "'tabular_regression'?")]
)
def test_unknown_names_offer_the_near_match(given, hint):
    with pytest.raises(UnknownNameError) as caught:
        lookup(given)
    assert repr(given) in str(caught.value)
    assert hint in str(caught.value)


def test_a_compiled_file_is_a_pipeline(tmp_path):
    file = tmp_path / "my pipeline!.yaml"
    with pytest.raises(MissingFileError, match="does not exist"):
        lookup(str(file))
    file.write_text("x")
    found = lookup(str(file))
    assert found.is_file
    assert found.name == "my_pipeline_"
    assert found.target == str(file)


def test_module_checksum_needs_no_import(tmp_path, monkeypatch):
    (tmp_path / "trap_for_import.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    first = module_sha256("trap_for_import")
    (tmp_path / "trap_for_import.py").write_text("raise SystemExit('imported again')\n")
    assert len(first) == 64
    assert module_sha256("trap_for_import") != first


@pytest.mark.parametrize("module", ["no_such_module_at_all", "no_such.module", "sys"])
def test_module_without_a_file(module):
    with pytest.raises(MissingFileError, match="has no source file"):
        module_sha256(module)


def test_a_name_that_no_file_can_have():
    with pytest.raises(MissingFileError, match="does not exist"):
        lookup("a" * 300 + ".yaml")


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_the_rows_of_the_training_split_are_those_of_the_step(name, tmp_path):
    sources = {"digits": ("digits", ""), "tabular_regression": ("diabetes", "")}
    source, target = sources[name]
    result = preprocess(PreprocessConfig(source=source, target=target), tmp_path / "data")
    assert result.metrics()["train_rows"] == REGISTRY[name].train_rows


def test_an_unknown_name_says_that_a_compiled_file_is_taken_and_how_to_make_one():
    with pytest.raises(UnknownNameError) as caught:
        lookup("my code/mine.py")
    assert "'my code/mine.py'" in str(caught.value)
    assert "a compiled .yaml file is taken too" in str(caught.value)
    assert "kfp dsl compile --py 'my code/mine.py' --output 'my code/mine.yaml'" in str(caught.value)
    with pytest.raises(
        UnknownNameError, match=r"a compiled \.yaml file is taken too: kfp dsl compile --py FILE\.py"
    ):
        lookup("digit")
