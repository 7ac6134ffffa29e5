"""Compiled YAML: up to date, loadable, the same everywhere, with the image that was asked for."""

import re
import socket
from pathlib import Path

import pytest
import yaml
from kfp import components as kfp_components

import kfp_elastic.components
from elastic_runtime.errors import InputError
from kfp_elastic.components.authoring import DEFAULT_IMAGE
from kfp_elastic.pipelines import REGISTRY, lookup
from kfp_elastic.pipelines.compiling import (
    check_image,
    compile_pipeline,
    load_pipeline,
    main,
    repository_files,
)

NAMES = sorted(REGISTRY)


def images(text):
    executors = yaml.safe_load(text)["deploymentSpec"]["executors"].values()
    return {executor["container"]["image"] for executor in executors}


def test_the_files_in_the_repository_are_up_to_date():
    stale = [
        str(path)
        for path, text in repository_files().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    assert not stale, "run: python -m kfp_elastic.pipelines.compiling"
    assert main(["--check"]) == 0


@pytest.mark.parametrize(
    "relative",
    [f"components/{name}/component.yaml" for name in kfp_elastic.components.__all__]
    + [f"pipelines/{name}.yaml" for name in NAMES],
)
def test_a_file_of_the_repository_loads_and_names_no_machine(relative):
    path = Path(kfp_elastic.components.__path__[0]).resolve().parent / relative
    text = path.read_text(encoding="utf-8")
    loaded = kfp_components.load_component_from_file(str(path))
    assert loaded.component_spec.inputs
    assert images(text) == {DEFAULT_IMAGE}
    root = Path(__file__).resolve().parents[3]
    assert str(root) not in text
    assert str(Path.home()) + "/" not in text
    assert socket.gethostname() not in text
    assert "kill" not in text.lower().replace("killed", "")
    assert "ELASTIC_FAULTS" not in text


@pytest.mark.parametrize("name", NAMES)
def test_compiling_twice_gives_the_same_bytes(name, tmp_path):
    first = compile_pipeline(name, tmp_path / "a.yaml").read_bytes()
    assert compile_pipeline(name, tmp_path / "b.yaml").read_bytes() == first
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.yaml", "b.yaml"]


@pytest.mark.parametrize("name", NAMES)
def test_image_is_that_of_every_step(name, tmp_path):
    plain = compile_pipeline(name, tmp_path / "plain.yaml").read_text()
    image = "registry.example:5000/team/elastic:1.2@sha256:" + "a" * 64
    other = compile_pipeline(name, tmp_path / "other.yaml", image=image).read_text()
    assert images(other) == {image}
    assert other.replace(image, images(plain).pop()) == plain
    assert kfp_components.load_component_from_file(str(tmp_path / "other.yaml")).pipeline_spec.root.dag.tasks


@pytest.mark.parametrize("name", NAMES)
def test_documented_parameters_have_types_and_defaults(name):
    spec = load_pipeline(lookup(name)).pipeline_spec
    parameters = spec.root.input_definitions.parameters
    assert {"epochs", "lr", "batch_size", "nodes", "seed"} <= set(parameters)
    for parameter in parameters.values():
        assert parameter.description
        assert parameter.is_optional


@pytest.mark.parametrize("name", NAMES)
def test_training_carries_the_checksum_of_its_program(name):
    tasks = load_pipeline(lookup(name)).pipeline_spec.root.dag.tasks
    constant = tasks["elastic-train"].inputs.parameters["script_sha256"].runtime_value.constant
    assert re.fullmatch(r"[0-9a-f]{64}", constant.string_value)


@pytest.mark.parametrize("name", NAMES)
def test_serving_waits_for_the_gate(name):
    spec = load_pipeline(lookup(name)).pipeline_spec
    (branch,) = [task for task in spec.root.dag.tasks.values() if task.trigger_policy.condition]
    assert "== 'passed'" in branch.trigger_policy.condition
    assert list(spec.components[branch.component_ref.name].dag.tasks) == ["serve"]


@pytest.mark.parametrize(
    ("name", "output", "said"),
    [
        ("digits", "out.json", "must end in .yaml"),
        ("digits", "nowhere/out.yaml", "does not exist: create it first"),
        ("digit", "out.yaml", "did you mean 'digits'?"),
        ("digits", "folder.yaml", "cannot write"),
        ("digits", "a" * 300 + ".yaml", "File name too long"),
        ("digits", "a" * 300 + "/out.yaml", "File name too long"),
    ],
)
def test_wrong_output(name, output, said, tmp_path):
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(InputError) as caught:
        compile_pipeline(name, tmp_path / output)
    assert said in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["folder.yaml"]


@pytest.mark.parametrize("image", ["", " ", "a b", "UPPER/case:1", "name:", "a//b", "name@sha256:12", "-x"])
def test_wrong_images(image):
    with pytest.raises(InputError, match="is no container image"):
        check_image(image)


@pytest.mark.parametrize("image", ["name", "name:1.0", "host:5000/team/name:v1", "a/b@sha256:" + "0" * 64])
def test_right_images(image):
    assert check_image(image) == image


@pytest.mark.parametrize(
    "content", ["", "just text", "a: 1", "{", "components: {}\nroot: {}\n", "pipelineInfo: {name: x}"]
)
def test_a_file_that_is_no_pipeline(content, tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text(content)
    with pytest.raises(InputError, match=r"p\.yaml"):
        load_pipeline(lookup(str(file)))


@pytest.mark.parametrize(
    ("content", "said"), [("a: 1", "'pipelineInfo' is missing"), ("- 1", "no YAML object")]
)
def test_why_a_file_is_no_pipeline(content, said, tmp_path):
    (tmp_path / "p.yaml").write_text(content)
    with pytest.raises(InputError) as caught:
        load_pipeline(lookup(str(tmp_path / "p.yaml")))
    assert said in str(caught.value)


def test_check_reports_a_stale_file(tmp_path, monkeypatch, capsys):
    file = tmp_path / "digits.yaml"
    monkeypatch.setattr("kfp_elastic.pipelines.compiling.repository_files", lambda: {file: "a: 1\n"})
    assert main(["--check"]) == 1
    assert "is out of date" in capsys.readouterr().out
    assert not file.exists()
    assert main([]) == 0
    assert file.read_text() == "a: 1\n"
    assert main(["--check"]) == 0
