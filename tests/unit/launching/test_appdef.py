from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
from torchx import specs
from torchx.runner import get_runner

from elastic_runtime.errors import InputError
from elastic_runtime.jobs.nodes import parse_nodes
from elastic_runtime.jobs.spec import JobSpec, program_of
from elastic_runtime.launching.appdef import ORIGINAL_NAME, build_appdef, check_appdef
from elastic_runtime.launching.torchx_components import ddp
from elastic_runtime.names import is_valid


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    script = tmp_path / "my-trainer.py"
    script.touch()
    return JobSpec(program=program_of(str(script), None), nodes=parse_nodes("1:2"), arguments=["--x", "1"])


@pytest.mark.parametrize("name", ["x" * 120, "UPPER_case", "Ünïcode 名前", "my-trainer.py"])
def test_any_name_gives_a_valid_application_and_is_kept_in_the_metadata(spec: JobSpec, name: str) -> None:
    app = build_appdef(spec, name=name)
    assert is_valid(app.name)
    assert len(app.name) <= 47, "torchx appends a dash and an id"
    assert app.metadata[ORIGINAL_NAME] == name
    assert app.name == build_appdef(spec, name=name).name


def test_a_dry_run_leaves_the_application_as_it_was(spec: JobSpec) -> None:
    app = check_appdef(build_appdef(spec))
    before = copy.deepcopy(app)
    with get_runner() as runner:
        runner.dryrun(app, "local_cwd", {"log_dir": "unused"})
        runner.dryrun(app, "local_cwd", {"log_dir": "unused"})
    assert app == before


def test_macros_are_substituted_and_other_dollars_stay(spec: JobSpec) -> None:
    app = build_appdef(replace(spec, arguments=["$HOME", "${app_id}", "100$", "$$", "${other}"]))
    values = specs.macros.Values(img_root="", app_id="job-1", replica_id="0", rank0_env="X")
    assert values.apply(app.roles[0]).args[-5:] == ["$HOME", "job-1", "100$", "$$", "${other}"]


def role(name: str = "a", **fields: object) -> specs.Role:
    return specs.Role(name=name, image="", entrypoint="true", **fields)  # type: ignore[arg-type]


def test_environment_values_of_any_role_become_text() -> None:
    app = specs.AppDef(name="x", roles=[role(env={"N": 5})])
    assert check_appdef(app).roles[0].env == {"N": "5"}
    assert app.roles[0].env == {"N": 5}


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ([role("a"), role("a")], "role 'a' is there twice"),
        ([role("a", env={"N": None})], "role 'a': environment variable N=None"),
        ([role("a", port_map={"a-port-name-of-20-ch": 1})], "role 'a': port name 'a-port-name-of-20-ch'"),
        ([], "has no role"),
    ],
)
def test_a_wrong_role_is_named(roles: list[specs.Role], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_appdef(specs.AppDef(name="x", roles=roles))


def test_the_component_builds_the_same_application_as_the_launcher(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    by_component = ddp("--x", "1", script=str(script), j="1:2x3", max_restarts=4, heartbeat=2.5, wait_limit=7)
    spec = JobSpec(
        program=program_of(str(script), None),
        nodes=parse_nodes("1:2", 3),
        arguments=["--x", "1"],
        max_restarts=4,
        heartbeat=2.5,
        wait_limit=7,
    )
    assert {"--heartbeat=2.5", "--wait-limit=7"} <= set(by_component.roles[0].args)
    assert by_component == build_appdef(spec, resource=specs.resource(cpu=1, gpu=0, memMB=1024))
