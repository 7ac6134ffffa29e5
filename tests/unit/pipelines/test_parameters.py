"""Pipeline parameters: text and values, types, sizes, near matches."""

import math

import pytest
from kfp import dsl
from kfp.dsl.structures import InputSpec

from elastic_runtime.errors import InputError, UnknownNameError
from kfp_elastic.components.authoring import component
from kfp_elastic.pipelines.compiling import compiled_text
from kfp_elastic.pipelines.parameters import check_nested_text, checked_parameters, split_assignments

INPUTS = {
    "epochs": InputSpec("Integer", default=3, optional=True),
    "lr": InputSpec("Float", default=0.1, optional=True),
    "nodes": InputSpec("String", default="1:2", optional=True),
    "verbose": InputSpec("Boolean", default=False, optional=True),
    "widths": InputSpec("List", default=[], optional=True),
    "gates": InputSpec("Dict", default={}, optional=True),
}


def check(**given):
    return checked_parameters(given, INPUTS, pipeline="digits")


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("epochs", "5", 5),
        ("epochs", " +5 ", 5),
        ("epochs", "-1", -1),
        ("epochs", 7, 7),
        ("lr", "1", 1.0),
        ("lr", "2e-05", 2e-05),
        ("lr", ".5", 0.5),
        ("lr", "1.", 1.0),
        ("lr", 1, 1.0),
        ("nodes", "1:3", "1:3"),
        ("nodes", "", ""),
        ("nodes", "a=b=c", "a=b=c"),
        ("nodes", "ünïcode 名", "ünïcode 名"),
        ("verbose", "true", True),
        ("verbose", "False", False),
        ("verbose", True, True),
        ("widths", "[64, 32]", [64, 32]),
        ("widths", "[]", []),
        ("widths", [1, None], [1, None]),
        ("gates", '{"min_accuracy": 0.9}', {"min_accuracy": 0.9}),
    ],
)
def test_values(name, given, value):
    assert repr(check(**{name: given})) == repr({name: value})


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("epochs", "abc", "parameter epochs='abc' is not a whole number"),
        ("epochs", "1.5", "parameter epochs='1.5' is not a whole number"),
        ("epochs", "", "is not a whole number"),
        ("epochs", "1_000", "is not a whole number"),
        ("epochs", "٣", "is not a whole number"),
        ("epochs", "9" * 5000, "is not a whole number"),
        ("epochs", str(2**53 + 1), "up to 2**53"),
        ("epochs", True, "is not a whole number"),
        ("epochs", 3.0, "is not a whole number"),
        ("lr", "abc", "parameter lr='abc' is not a number"),
        ("lr", "inf", "lr='inf' is not a number: it must be finite"),
        ("lr", "-Infinity", "must be finite"),
        ("lr", "nan", "must be finite"),
        ("lr", "1e999", "must be finite"),
        ("lr", math.inf, "must be finite"),
        ("lr", False, "is not a number"),
        ("lr", "0x10", "is not a number"),
        ("nodes", 2, "parameter nodes=2 is not text"),
        ("verbose", "yes", "is not true or false"),
        ("verbose", 1, "is not true or false"),
        ("widths", "64,32", "is not a JSON list, such as '[64, 32]'"),
        ("widths", '{"a": 1}', "is not a JSON list"),
        ("widths", "[" * 100_000, "is not a JSON list"),
        ("widths", [math.nan], "can be written as JSON"),
        ("gates", "[1]", "is not a JSON object"),
        ("gates", "{min: 1}", "is not a JSON object"),
        ("nodes", "x" * 200_000, "is 200,002 bytes long; a parameter may have 100,000"),
    ],
)
def test_wrong_values_name_the_parameter_the_value_and_what_is_wanted(name, given, said):
    with pytest.raises(InputError) as caught:
        check(**{name: given})
    assert said in str(caught.value)
    assert name in str(caught.value)
    assert len(str(caught.value)) < 300


def test_none_is_the_default():
    assert check(lr=None, epochs=2) == {"epochs": 2}


def test_unknown_name_offers_the_near_match():
    with pytest.raises(UnknownNameError, match=r"'epoch'; did you mean 'epochs'\?"):
        check(epoch=3)


def test_a_required_parameter_that_is_missing():
    with pytest.raises(InputError, match="pipeline p needs source: add -p source=VALUE"):
        checked_parameters({}, {"source": InputSpec("String")}, pipeline="p")


def test_an_artifact_cannot_be_given():
    inputs = {"model": InputSpec("system.Model@0.0.1", optional=True)}
    with pytest.raises(InputError, match="is an artifact"):
        checked_parameters({"model": "x"}, inputs, pipeline="p")


def test_all_parameters_together_have_a_limit():
    with pytest.raises(InputError, match="the parameters are 120,004 bytes long together"):
        checked_parameters(
            {"a": "x" * 60_000, "b": "y" * 60_000},
            {"a": InputSpec("String"), "b": InputSpec("String")},
            pipeline="p",
        )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["epochs"], "-p 'epochs': write -p NAME=VALUE"),
        (["=3"], "write -p NAME=VALUE"),
        ([""], "write -p NAME=VALUE"),
        (["lr=1", "lr=2"], "-p lr is given twice"),
    ],
)
def test_wrong_assignments(given, said):
    with pytest.raises(InputError) as caught:
        split_assignments(given)
    assert said in str(caught.value)


def test_assignments_split_at_the_first_equals_sign():
    assert split_assignments(["a=b=c", "d="]) == {"a": "b=c", "d": ""}


@component
def show(options: dict = {}, label: str = "") -> str:  # noqa: B006
    return "done"


@dsl.pipeline(name="nested")
def nested(tag: str = "a", count: int = 1, plain: str = 'say "hi"'):
    with dsl.If(count == 1):
        show(options={"tags": [f"pre {tag}"], "count": count}, label=f"{plain}")


@pytest.mark.parametrize("value", ['say "hi"', "C:\\new", "a\nb", '{"a": 1}', "{{$.inputs}}"])
def test_text_that_kfp_would_break_inside_a_dict_is_refused(value):
    text = compiled_text(nested)
    with pytest.raises(InputError) as caught:
        check_nested_text({"tag": value}, text, pipeline="nested")
    assert f"parameter tag={value!r}" in str(caught.value)
    assert "inside a list or dict" in str(caught.value)
    check_nested_text({"plain": value}, text, pipeline="nested")


def test_a_default_that_kfp_would_break_is_refused_unless_another_value_is_given():
    @dsl.pipeline(name="nested")
    def quoted(tag: str = 'say "hi"'):
        show(options={"tag": tag})

    with pytest.raises(InputError, match="parameter tag='say"):
        check_nested_text({}, compiled_text(quoted), pipeline="nested")
    check_nested_text({"tag": "it's ünï {x} $HOME"}, compiled_text(quoted), pipeline="nested")
