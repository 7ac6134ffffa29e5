"""The wrappers around kfp's local runner: the functions they replace are there, and are put back."""

import inspect
import io
import os

import pytest
from kfp.local import executor_input_utils, subprocess_task_handler, task_dispatcher

from kfp_elastic.pipelines.local_child import LocalRun, whole_numbers
from kfp_elastic.pipelines.step_output import StepOutput

REPLACED = [
    (executor_input_utils, "executor_input_to_dict", ["executor_input", "component_spec"]),
    (executor_input_utils, "get_local_pipeline_resource_name", ["pipeline_name"]),
    (subprocess_task_handler, "run_local_subprocess", ["full_command", "env_vars"]),
    (task_dispatcher, "run_single_task_implementation", ["pipeline_resource_name", "component_name"]),
]


@pytest.fixture
def run(tmp_path):
    """A run in a folder of its own, and what it says."""
    said = io.StringIO()
    made = LocalRun(tmp_path, tmp_path / "state.json", StepOutput(said), {"train": {"ONLY_TRAIN": "1"}})
    return made, said


@pytest.mark.parametrize(("owner", "name", "parameters"), REPLACED)
def test_kfp_still_has_what_is_wrapped_and_gets_it_back(run, owner, name, parameters):
    original = getattr(owner, name)
    assert list(inspect.signature(original).parameters)[: len(parameters)] == parameters
    with run[0].wrapped():
        assert getattr(owner, name) is not original
    assert getattr(owner, name) is original


def test_the_run_has_the_folder_that_we_chose(run, tmp_path):
    with run[0].wrapped():
        assert executor_input_utils.get_local_pipeline_resource_name("digits") == tmp_path.name


@pytest.mark.parametrize("name", ["ONLY_TRAIN", "HOME"])
def test_a_variable_is_set_for_its_step_only(run, name):
    before = os.environ.get(name)
    run[0]._environments = {"train": {name: "1"}}
    with run[0]._environment("preprocess"):
        assert os.environ.get(name) == before
    with run[0]._environment("train"):
        assert os.environ[name] == "1"
    assert os.environ.get(name) == before


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (5.0, 5),
        ({"a": [1.0, 0.5, {"b": -2.0}]}, {"a": [1, 0.5, {"b": -2}]}),
        ([True, None, "1.0"], [True, None, "1.0"]),
        (1e300, 1e300),
    ],
)
def test_whole_numbers(given, wanted):
    assert repr(whole_numbers(given)) == repr(wanted)
