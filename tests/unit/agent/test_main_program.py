from __future__ import annotations

import sys
import types
import zipfile
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from elastic_runtime.agent.forked import seed_of
from elastic_runtime.agent.main_program import forget_shadowed, path_entry
from elastic_runtime.agent.requests import Program


def program(folder: Path, **fields: object) -> Program:
    return Program(**{"environment": {}, "cwd": str(folder), **fields})  # type: ignore[arg-type]


def test_the_import_path_starts_where_the_interpreters_does(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").touch()
    (tmp_path / "link.py").symlink_to(tmp_path / "code" / "train.py")
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", "")
    expected = {"code/train.py": "code", "link.py": "code", "app.pyz": "app.pyz", "code": "code"}
    for script, entry in expected.items():
        assert path_entry(program(tmp_path, script=script)) == str(tmp_path / entry), script
    assert path_entry(program(tmp_path, module="m")) == str(tmp_path)
    assert path_entry(program(tmp_path, module="m", environment={"PYTHONSAFEPATH": "1"})) is None


@pytest.fixture
def loaded() -> Iterator[dict[str, types.ModuleType]]:
    before = dict(sys.modules)
    modules = {}
    for name in ("zz_library", "zz_library.part", "zz_data", "zz_other", "zz_kept"):
        module = modules[name] = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, origin=f"/somewhere/else/{name}.py")
        sys.modules[name] = module
    yield modules
    sys.modules.clear()
    sys.modules.update(before)


def test_only_what_an_import_would_find_elsewhere_is_forgotten(
    tmp_path: Path, loaded: dict[str, types.ModuleType]
) -> None:
    (tmp_path / "zz_library").mkdir()
    (tmp_path / "zz_library" / "__init__.py").touch()
    (tmp_path / "zz_data").mkdir()  # A folder of data does not hide an installed module.
    (tmp_path / "zz_kept.py").touch()
    (tmp_path / "zz_mine.py").touch()
    mine = sys.modules["zz_mine"] = types.ModuleType("zz_mine")
    mine.__spec__ = ModuleSpec("zz_mine", None, origin=str(tmp_path / "zz_mine.py"))
    forget_shadowed(str(tmp_path), keep={"zz_kept"})
    left = {name for name in sys.modules if name.startswith("zz_")}
    assert left == {"zz_data", "zz_other", "zz_kept", "zz_mine"}
    forget_shadowed(str(tmp_path / "no such folder"), keep=())
    assert "zz_mine" in sys.modules


def test_seeds_differ_by_seed_rank_and_round_and_by_nothing_else() -> None:
    places = [
        {},
        {"RANK": "1"},
        {"TORCHELASTIC_RESTART_COUNT": "1"},
        {"ELASTIC_SEED": "7"},
        {"RANK": "1", "TORCHELASTIC_RESTART_COUNT": "1"},
    ]
    seeds = [seed_of(place) for place in places]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [seed_of({**place, "MASTER_PORT": "1234", "WORLD_SIZE": "9"}) for place in places]
    assert all(0 <= seed < 1 << 64 for seed in seeds)
