"""Values of parameters that no run of the pipelines of this package could use."""

import pytest

from elastic_runtime.errors import InputError
from kfp_elastic.pipelines import REGISTRY, lookup
from kfp_elastic.pipelines.compiling import compile_pipeline, load_pipeline
from kfp_elastic.pipelines.limits import LIMITS, check_limits
from kfp_elastic.pipelines.parameters import checked_parameters

DIGITS = REGISTRY["digits"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("epochs", 0, "parameter epochs=0 is below 1"),
        ("epochs", -1, "parameter epochs=-1 is below 1"),
        ("batch_size", 0, "parameter batch_size=0 is below 1"),
        ("max_restarts", -1, "parameter max_restarts=-1 is below 0"),
        ("seed", -1, "parameter seed=-1 is below 0"),
        ("lr", -1.0, "parameter lr=-1.0 is not above 0"),
        ("lr", 0.0, "parameter lr=0.0 is not above 0"),
        (
            "min_accuracy",
            95.0,
            "parameter min_accuracy=95.0 is outside 0 to 1, the range of its metric (accuracy); for 95 percent write 0.95",
        ),
        ("min_accuracy", -0.1, "parameter min_accuracy=-0.1 is outside 0 to 1"),
        ("min_r2", 7.0, "parameter min_r2=7.0 is above 1, the largest value of its metric (R²)"),
        ("nodes", "3:2", "parameter nodes='3:2': the minimum 3 is above the maximum 2"),
        ("nodes", "", "parameter nodes='': nodes takes MIN:MAX, one number, or allowed sizes such as 1,2,4"),
        ("nodes", "0", "parameter nodes='0': a job needs at least one node"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused(name, value, said):
    with pytest.raises(InputError) as caught:
        check_limits({name: value}, DIGITS)
    assert str(caught.value).startswith(said)
    assert "--nodes" not in str(caught.value)
    assert ("percent" in str(caught.value)) == (value == 95.0)


@pytest.mark.parametrize(
    "values",
    [
        {"epochs": 1, "batch_size": 1, "lr": 1e-9, "max_restarts": 0, "seed": 0},
        {"min_accuracy": 0.0, "min_r2": -100.0, "nodes": "1,2,4"},
        {"min_accuracy": 1.0, "min_r2": 1.0, "nodes": " 2 "},
    ],
)
def test_values_at_the_limits_are_taken(values):
    check_limits(values, DIGITS)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_parameter_has_a_limit_or_is_known_to_have_none(name):
    inputs = load_pipeline(REGISTRY[name]).component_spec.inputs
    assert set(inputs) - set(LIMITS) <= {"source", "target"}
    defaults = {key: declared.default for key, declared in inputs.items()}
    check_limits(checked_parameters(defaults, inputs, pipeline=name), REGISTRY[name])


def test_a_pipeline_of_the_user_may_use_the_names_for_something_else(tmp_path):
    file = compile_pipeline("digits", tmp_path / "mine.yaml")
    check_limits({"epochs": -1}, lookup(str(file)))
    with pytest.raises(InputError, match="epochs=-1"):
        check_limits({"epochs": -1}, lookup("digits"))
