from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from elastic_runtime.agent.config import AgentConfig, fingerprint
from elastic_runtime.agent.environment import DEFAULTS, worker_environment
from elastic_runtime.errors import IntegrityError
from elastic_runtime.jobs.spec import Program
from elastic_runtime.membership.actions import Place


def config(folder: Path, **fields: Any) -> AgentConfig:
    return AgentConfig(
        **{
            "name": "job", "program": Program(script="train.py"), "arguments": ("--x", "ü"), "environment": {"A": "1"},
            "workers": 2, "nodes": 3, "max_restarts": 4, "grace": 2.5, "job_dir": str(folder),
            "output_dir": str(folder / "out"), "coordinator": ("127.0.0.1", 1234), "secret": str(folder / "secret"),
            **fields,
        }
    )  # fmt: skip


PLACE = Place(
    slot=1, spawn=9, rank=3, world_size=5, group_rank=1, group_world_size=3, local_world_size=2, log=3
)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "agents.json"
    for program in (Program(script="a b/träin.py"), Program(module="pkg.train")):
        before = config(tmp_path, program=program, coordinator=("::1", 65535), store_host="10.0.0.1")
        before.write(path)
        after = AgentConfig.read(path)
        assert list(after.arguments) == ["--x", "ü"]
        assert {**vars(after), "arguments": ()} == {**vars(before), "arguments": ()} | {
            name: value for name, value in vars(after).items() if name == "preload"
        }


@pytest.mark.parametrize(
    "damage", ["gone", "empty", "cut", "no json", "a list", "a field less", "a field more", "port"]
)
def test_what_is_no_configuration_is_one_clear_error(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "agents.json"
    config(tmp_path).write(path)
    document = json.loads(path.read_text())
    changed = {
        "gone": None, "empty": "", "cut": path.read_text()[:40], "no json": "{'a': 1}", "a list": "[1]",
        "a field less": json.dumps({k: v for k, v in document.items() if k != "workers"}),
        "a field more": json.dumps({**document, "colour": "red"}),
        "port": json.dumps({**document, "coordinator": ["h", "x"]}),
    }[damage]  # fmt: skip
    if changed is None:
        path.unlink()
    else:
        path.write_text(changed)
    with pytest.raises(IntegrityError) as raised:
        AgentConfig.read(path)
    assert str(raised.value).startswith(f"{path}: is no agent's configuration: ")


def test_the_fingerprint_follows_the_program_and_names_the_versions(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("a = 1\n")
    first = fingerprint(Program(script=str(script)))
    assert set(first) == {"program", "torch", "kfp-elastic", "python"}
    assert "+" not in first["torch"], "the same release for CPU and GPU is the same"
    script.write_text("a = 2\n")
    second = fingerprint(Program(script=str(script)))
    assert first["program"] != second["program"]
    assert {**first, "program": ""} == {**second, "program": ""}
    other = tmp_path / "elsewhere.py"
    other.write_text("a = 2\n")
    assert fingerprint(Program(script=str(other))) == second, "where it lies does not matter"
    assert fingerprint(Program(module="no_such_module_here"))["program"] == "unknown"


def test_a_worker_gets_torchruns_contract_and_the_jobs_folders(tmp_path: Path) -> None:
    found = worker_environment(config(tmp_path), PLACE, round_=6, store=("::1", 29500))
    expected = {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "5", "ROLE_NAME": "default",
        "MASTER_ADDR": "::1", "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "6",
        "TORCHELASTIC_MAX_RESTARTS": "4", "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "ELASTIC_JOB_DIR": str(tmp_path), "ELASTIC_OUTPUT_DIR": str(tmp_path / "out"),
        "ELASTIC_CHECKPOINT_DIR": str(tmp_path / "checkpoints"), "A": "1",
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


def test_who_wins_defaults_the_agents_environment_the_jobs_or_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*DEFAULTS, "OMP_NUM_THREADS", "ONLY_HERE"):
        monkeypatch.delenv(name, raising=False)
    bare = worker_environment(config(tmp_path), PLACE, round_=0, store=("h", 1))
    assert {name: bare[name] for name in DEFAULTS} == DEFAULTS
    assert int(bare["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 6)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("ONLY_HERE", "yes")
    monkeypatch.setenv("RANK", "77")
    mine = config(tmp_path, environment={"OMP_NUM_THREADS": "5", "RANK": "88", "ELASTIC_OUTPUT_DIR": "/mine"})
    found = worker_environment(mine, PLACE, round_=0, store=("h", 1))
    assert found["GLOO_SOCKET_IFNAME"] == "eth7", "the agent's environment is above the defaults"
    assert found["OMP_NUM_THREADS"] == "5", "the job's is above the agent's"
    assert found["RANK"] == "3", "the contract is above all"
    assert found["ONLY_HERE"] == "yes"
    assert all(isinstance(value, str) for value in found.values())
