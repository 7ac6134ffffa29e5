from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from elastic_runtime.errors import InputError, MissingFileError
from elastic_runtime.jobs.nodes import parse_nodes
from elastic_runtime.jobs.spec import JobSpec, environment_of, preload_of, program_of


def test_environment_values_become_text() -> None:
    assert environment_of({"A": 5, "B": 0.5, "C": "x", "D": True, "E": ""}) == {
        "A": "5", "B": "0.5", "C": "x", "D": "1", "E": "",
    }  # fmt: skip
    assert environment_of(None) == {}


@pytest.mark.parametrize(
    ("values", "named"),
    [({"A-B": "1"}, "'A-B'"), ({"1A": "1"}, "'1A'"), ({"": "1"}, "''"), ({"A": None}, "A=None"), ({"A": [1]}, "A="),
     ({"A": "a\0b"}, "NUL")],
)  # fmt: skip
def test_a_wrong_environment_names_the_variable(values: dict[str, object], named: str) -> None:
    with pytest.raises(InputError, match=named.replace("[", r"\[")):
        environment_of(values)


def test_a_program_is_a_script_or_a_module(tmp_path: Path) -> None:
    script = tmp_path / "train me.py"
    script.write_text("print(1)\n")
    program = program_of(str(script), None)
    assert (program.script, program.module) == (str(script), None)
    assert program.label == "train me"
    assert program.sha256() == hashlib.sha256(b"print(1)\n").hexdigest()
    module = program_of(None, "json.tool")
    assert (module.script, module.module) == (None, "json.tool")
    assert module.label == "tool"
    assert len(module.sha256()) == 64


@pytest.mark.parametrize(("script", "module"), [(None, None), ("", ""), ("a.py", "b")])
def test_none_or_both_is_an_error(script: str | None, module: str | None) -> None:
    with pytest.raises(InputError, match="exactly one program"):
        program_of(script, module)


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"no/such.py"):
        program_of("no/such.py", None)
    (tmp_path / "train.py").touch()
    with pytest.raises(MissingFileError, match=r"did you mean '.*train\.py'"):
        program_of(str(tmp_path / "trian.py"), None)
    with pytest.raises(MissingFileError, match="is not a file"):
        program_of(str(tmp_path), None)
    with pytest.raises(MissingFileError, match="no_such_module"):
        program_of(None, "no_such_module.at.all")
    with pytest.raises(MissingFileError, match=r"'..x'"):
        program_of(None, "..x")


def test_a_program_that_is_only_in_the_image_is_accepted() -> None:
    assert program_of("/app/train.py", None, present=False).script == "/app/train.py"


@pytest.mark.parametrize("source", ["if x\n", "def f(:\n", "x = '\0'\n", "  y = 1\n"])
def test_what_does_not_compile_is_refused_with_its_file(tmp_path: Path, source: str) -> None:
    script = tmp_path / "bad.py"
    script.write_text(source)
    with pytest.raises(InputError, match=r"bad\.py"):
        program_of(str(script), None)


def test_a_module_of_the_current_folder_is_found_without_importing_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    for name in ("tool", "__main__"):
        (package / f"{name}.py").write_text(f"name = {name!r}")
    assert program_of(None, "own_package.tool").source() == package / "tool.py"
    assert program_of(None, "own_package").source() == package / "__main__.py"
    for missing in ("no_package.tool", "own_package.none"):
        with pytest.raises(MissingFileError, match=missing):
            program_of(None, missing)


def test_checking_a_script_does_not_run_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    program_of(str(script), None)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_restarts", -1), ("grace", -0.1), ("grace", float("nan")), ("arguments", ["a\0"]), ("heartbeat", 1.9),
        ("heartbeat", float("nan")), ("wait_limit", -1), ("wait_limit", float("inf")),
    ],
)  # fmt: skip
def test_a_wrong_field_of_a_job_is_refused(tmp_path: Path, field: str, value: object) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(InputError):
        JobSpec(program=program_of(str(script), None), nodes=parse_nodes("1"), **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "names"),
    [("", ()), ("numpy", ("numpy",)), ("numpy, my_package.models,numpy", ("numpy", "my_package.models")), ("größe", ("größe",))],
)  # fmt: skip
def test_preloads_are_names_of_modules_each_once(text: str, names: tuple[str, ...]) -> None:
    assert preload_of(text) == names


@pytest.mark.parametrize("wrong", ["a-b", "a..b", ".a", "a,", "1a", "class", "a.if", "a b", "a/b.py"])
def test_a_preload_that_cannot_be_imported_by_that_name_is_refused(wrong: str) -> None:
    with pytest.raises(InputError, match=r"--preload .*takes names of modules as import does"):
        preload_of(wrong)
