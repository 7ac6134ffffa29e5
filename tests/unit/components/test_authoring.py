"""Arguments of components: what is refused before a task exists, and what arrives in the step's process."""

import hashlib
import importlib
import json
import math
import subprocess
import sys

import pytest
import yaml
from kfp import dsl

from elastic_runtime.errors import InputError, UnknownNameError
from kfp_elastic.components import elastic_train, evaluate, preprocess, run_time
from kfp_elastic.components.authoring import (
    DEFAULT_IMAGE,
    MAX_PARAMETER_BYTES,
    component,
    json_bytes,
    parameter_kind,
)
from kfp_elastic.pipelines.compiling import compiled_text


@component
def measure(rate: float, widths: list = [], options: dict = {}, label: str = "", count: int = 1) -> str:  # noqa: B006
    return "done"


def inputs_of(**arguments):
    """Return the constants that a compiled pipeline hands to `measure(**arguments)`."""

    @dsl.pipeline(name="probe")
    def probe():
        measure(**arguments)

    spec = yaml.safe_load(compiled_text(probe))
    parameters = spec["root"]["dag"]["tasks"]["measure"]["inputs"]["parameters"]
    return {name: value["runtimeValue"]["constant"] for name, value in parameters.items()}


def test_optional_none_is_the_same_as_leaving_it_out():
    assert inputs_of(rate=0.5, label=None, widths=None) == inputs_of(rate=0.5)


def test_empty_values_are_passed_as_they_are():
    assert inputs_of(rate=0.5, label="", widths=[], options={}) == {
        "rate": 0.5,
        "label": "",
        "widths": [],
        "options": {},
    }


@pytest.mark.parametrize(("given", "arrives"), [(1, 1.0), (0, 0.0), (2e-05, 2e-05), (-3, -3.0)])
def test_a_float_takes_whole_numbers(given, arrives):
    assert inputs_of(rate=given)["rate"] == arrives


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"rate": math.inf}, InputError, "measure(): rate=inf is not a finite number"),
        ({"rate": math.nan}, InputError, "measure(): rate=nan is not a finite number"),
        ({"rate": None}, InputError, "measure(): rate=None, but rate is required"),
        ({"rate": 1, "lable": "x"}, UnknownNameError, "'lable'; did you mean 'label'?"),
        ({"rate": 1, "options": {"a": math.nan}}, InputError, "options={'a': nan} cannot be written as JSON"),
        (
            {"rate": 1, "options": {"a": {1, 2}}},
            InputError,
            "options={'a': {1, 2}} cannot be written as JSON",
        ),
        (
            {"rate": 1, "label": "x" * 200_000},
            InputError,
            "is 200,002 bytes long; a parameter may have 100,000",
        ),
        ({"rate": 1, "widths": list(range(50_000))}, InputError, "put it into a file"),
        ({"rate": 1, "label": "é" * 17_000}, InputError, "is 102,002 bytes long"),
        (
            {"rate": 1, "label": "x" * 60_000, "options": {"y": "y" * 60_000}},
            InputError,
            "the parameters rate, label, options are",
        ),
    ],
)
def test_what_cannot_be_passed_is_refused_by_name(arguments, error, said):
    with pytest.raises(error) as caught:
        inputs_of(**arguments)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 500


def test_the_longest_accepted_parameter_fits_into_one_process_argument():
    text = "x" * (MAX_PARAMETER_BYTES - json_bytes("") - json_bytes(1.0))
    assert inputs_of(rate=1.0, label=text)["label"] == text
    subprocess.run(["true", json.dumps({"inputs": text})], check=True)


def test_pipeline_parameters_in_lists_and_dicts_keep_their_type():
    @dsl.pipeline(name="nested")
    def nested(epochs: int = 3, lr: float = 1.0, tag: str = "a", flag: bool = True):
        measure(rate=lr, options={"epochs": epochs, "lr": lr, "tag": tag, "flag": flag}, widths=[[epochs]])

    task = yaml.safe_load(compiled_text(nested))["root"]["dag"]["tasks"]["measure"]
    options = task["inputs"]["parameters"]["options"]["runtimeValue"]["constant"]
    # What kfp replaces at run time, here and on a cluster, is the text between the braces.
    resolved = {
        name: text.replace(f"{{{{$.inputs.parameters['pipelinechannel--{name}']}}}}", value)
        for (name, text), value in zip(sorted(options.items()), ["5", "true", "0.00002", "it's"], strict=True)
    }
    restored = run_time.restored(resolved)
    assert restored == {"epochs": 5, "lr": 2e-05, "tag": "it's", "flag": True}
    assert [type(restored[key]) for key in ("epochs", "lr", "flag")] == [int, float, bool]


def test_a_list_parameter_inside_a_dict_is_refused():
    with pytest.raises(InputError, match="kfp cannot put names inside a list or dict"):

        @dsl.pipeline(name="nested")
        def nested(names: list = ["a"]):  # noqa: B006
            measure(rate=1.0, options={"names": names})


@pytest.mark.parametrize(
    ("arrives", "meant"),
    [
        ([1.0, 2.0], [1, 2]),
        ({"widths": [64.0, 32.0]}, {"widths": [64, 32]}),
        ([0.5, 1e300], [0.5, 1e300]),
        ({"a": [run_time.NONE]}, {"a": [None]}),
        (f"{run_time.MARKS['NUMBER_INTEGER']}5.0", 5),
        (f"{run_time.MARKS['NUMBER_DOUBLE']}1", 1.0),
        (f"{run_time.MARKS['BOOLEAN']}True", True),
        (f"{run_time.MARKS['BOOLEAN']}false", False),
        ("None", "None"),
        ("5", "5"),
        (True, True),
    ],
)
def test_restored_values(arrives, meant):
    restored = run_time.restored(arrives)
    assert repr(restored) == repr(meant)


def test_restored_arguments_follow_annotations():
    def body(rate: float, count: int, flag: bool, label: str, widths: list, baseline=None):
        return rate, count, flag, label, widths, baseline

    wrapped = run_time.with_restored_arguments(body)
    got = wrapped(rate=1, count=3.0, flag=True, label="1", widths=[1.0], baseline=None)
    assert repr(got) == "(1.0, 3, True, '1', [1], None)"


def test_the_body_can_be_called_without_kfp():
    assert measure.python_func(rate=1.0) == "done"


def test_positional_arguments_are_refused():
    with pytest.raises(TypeError, match="keyword arguments"):

        @dsl.pipeline(name="probe")
        def probe():
            measure(0.5)


@pytest.mark.parametrize(
    ("declared", "kind"),
    [("Float", "NUMBER_DOUBLE"), ("Integer", "NUMBER_INTEGER"), ("system.Model@0.0.1", "")],
)
def test_parameter_kinds(declared, kind):
    assert parameter_kind(declared) == kind


def test_the_image_is_that_of_the_environment():
    code = "from kfp_elastic.components import authoring; print(authoring.IMAGE, authoring.DEFAULT_IMAGE)"
    said = subprocess.run(
        [sys.executable, "-c", code],
        env={"KFP_ELASTIC_IMAGE": "example/ours:1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split() == ["example/ours:1", DEFAULT_IMAGE]


@pytest.mark.parametrize("first", ["kfp_elastic.components", "kfp_elastic.components.evaluate.component"])
def test_a_components_name_is_the_component_whatever_was_imported_first(first):
    importlib.import_module(first)
    code = (
        f"import importlib; importlib.import_module({first!r})\n"
        "from kfp_elastic.components import evaluate\n"
        "from kfp_elastic.components import evaluate as again\n"
        "print(type(evaluate).__name__, again is evaluate)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["ElasticComponent", "True"]


def training_arguments(**arguments):
    """Return the constants that a compiled pipeline hands to `elastic_train`."""

    @dsl.pipeline(name="probe")
    def probe():
        elastic_train(dataset=preprocess(source="iris").outputs["dataset"], **arguments)

    spec = yaml.safe_load(compiled_text(probe))
    parameters = spec["root"]["dag"]["tasks"]["elastic-train"]["inputs"].get("parameters", {})
    return {name: value["runtimeValue"]["constant"] for name, value in parameters.items()}


def test_an_edited_script_changes_what_is_compiled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train it.py").write_text("a = 1")
    first = training_arguments(script="train it.py")["script_sha256"]
    assert first == hashlib.sha256(b"a = 1").hexdigest()
    (tmp_path / "train it.py").write_text("a = 2")
    assert training_arguments(script="train it.py")["script_sha256"] == hashlib.sha256(b"a = 2").hexdigest()


def test_a_checksum_is_neither_replaced_nor_made_up(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("a = 1")
    assert training_arguments(script="train.py", script_sha256="ab")["script_sha256"] == "ab"
    for arguments in ({"script": "/only/in/the/image.py"}, {"script": str(tmp_path)}, {}):
        assert not training_arguments(**arguments).get("script_sha256")
    assert not training_arguments(module="only_in.the_image").get("script_sha256")
    assert len(training_arguments(module="kfp_elastic.examples.digits")["script_sha256"]) == 64


def test_a_dict_arrives_in_the_same_order_every_time():
    assert list(run_time.restored({"b": 1.0, "a": {"d": 2.0, "c": 3.0}})) == ["a", "b"]


def test_what_lies_in_the_current_folder_is_found_after_what_is_installed(tmp_path):
    for name in ("elastic_runtime", "user_package"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("users = True")
    code = (
        "from kfp_elastic.components import run_time\n"
        "run_time.with_restored_arguments(lambda: None)\n"
        "import elastic_runtime, user_package\n"
        "print(hasattr(elastic_runtime, 'users'), user_package.users)"
    )
    said = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == ["False", "True"]


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"nodes": "3:2"}, InputError, "elastic_train(): nodes='3:2': the minimum 3 is above the maximum 2"),
        ({"nodes": ""}, InputError, "elastic_train(): nodes='': nodes takes MIN:MAX, one number"),
        ({"nodes": 2}, InputError, "elastic_train(): nodes=2 is not text"),
        ({"nproc_per_node": 0}, InputError, "elastic_train(): nproc_per_node=0"),
        ({"max_restarts": -1}, InputError, "elastic_train(): max_restarts=-1 is below 0"),
    ],
)
def test_a_constant_that_training_would_refuse_is_refused_at_once(arguments, error, said):
    with pytest.raises(error) as caught:
        training_arguments(module="kfp_elastic.examples.digits", **arguments)
    assert str(caught.value).startswith(said)


def judged(**arguments):
    """Compile a pipeline whose evaluation gets `arguments`; a pipeline parameter stands for a text `{limit}`."""

    @dsl.pipeline(name="probe")
    def probe(limit: float = 0.9, count: int = 2):
        data = preprocess(source="iris").outputs["dataset"]
        trained = elastic_train(dataset=data, module="kfp_elastic.examples.digits", nodes=f"1:{count}")
        given = {
            name: {key: limit if value == "{limit}" else value for key, value in value.items()}
            for name, value in arguments.items()
        }
        evaluate(model=trained.outputs["model"], dataset=data, **given)

    return compiled_text(probe)


@pytest.mark.parametrize(
    ("gates", "error", "said"),
    [
        (
            {"min_acuracy": 0.9},
            UnknownNameError,
            "evaluate(): unknown gate 'min_acuracy'; did you mean 'min_accuracy'?",
        ),
        ({"min_acuracy": "{limit}"}, UnknownNameError, "evaluate(): unknown gate 'min_acuracy'"),
        (
            {"min_accuracy": 95, "min_f1": "{limit}"},
            InputError,
            "evaluate(): gates: min_accuracy=95 is outside 0 to 1",
        ),
        (
            {"min_accuracy": "high"},
            InputError,
            "evaluate(): gates: min_accuracy='high' is not a finite number",
        ),
    ],
)
def test_a_constant_gate_that_no_evaluation_takes_is_refused_at_once(gates, error, said):
    with pytest.raises(error) as caught:
        judged(gates=gates)
    assert str(caught.value).startswith(said)


def test_gates_and_nodes_of_pipeline_parameters_are_left_to_the_run():
    assert "min_accuracy" in judged(gates={"min_accuracy": "{limit}", "min_f1": 0.5})
    assert "evaluate" in judged(gates={})
