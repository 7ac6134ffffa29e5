"""What is built is what works: the wheel's content, and the wheel in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WANTED = {
    "elastic_runtime/__init__.py",
    "elastic_runtime/py.typed",
    "elastic_runtime/report/templates/page.html.jinja",
    "elastic_runtime/report/templates/page.css",
    "kfp_elastic/__init__.py",
    "kfp_elastic/py.typed",
    "kfp_elastic/components/preprocess/component.py",
    "kfp_elastic/components/preprocess/component.yaml",
    "kfp_elastic/components/preprocess/README.md",
    "kfp_elastic/pipelines/digits.py",
    "kfp_elastic/pipelines/digits.yaml",
    "kfp_elastic/examples/digits.py",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from it, as a release would."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


def test_the_wheel_has_everything_and_no_bare_names(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert names >= WANTED
    tops = {name.split("/")[0] for name in names if not name.startswith("kfp_elastic-")}
    assert tops == {"elastic_runtime", "kfp_elastic"}, (
        "components and pipelines are never installed by bare names"
    )
    assert not [name for name in names if name.startswith(("kfp_elastic/tests", "elastic_runtime/tests"))]


def test_the_sdist_holds_files_and_no_links(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()]
        assert any(
            name.endswith("src/kfp_elastic/components/serve/component.py") for name in archive.getnames()
        )


def test_the_wheel_works_in_an_environment_of_its_own(built: Path, sandbox: Any) -> None:
    """Dependencies come from the environment of the tests; the package itself only from the wheel."""
    home = sandbox.folder / "env"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    done = sandbox.run(
        python, "-m", "pip", "install", "--no-deps", "--no-index", "--disable-pip-version-check", wheel
    )
    assert done.returncode == 0, done.stderr
    site = next(home.glob("lib/python*/site-packages"))
    (site / "zz-dependencies.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    where = sandbox.run(
        python,
        "-c",
        "import kfp_elastic, elastic_runtime; print(kfp_elastic.__file__, elastic_runtime.__file__)",
    )
    assert where.stdout.count(str(site)) == 2, where.stdout + where.stderr

    listed = sandbox.run(python, "-m", "torchx.cli.main", "builtins").stdout
    for component in ("elastic.ddp", "dist.ddp", "utils.echo"):
        assert component in listed
    # A user's own folders of these names do not shadow ours, and ours not theirs.
    sandbox.script("mine = True", "components/__init__.py")
    sandbox.script("mine = True", "pipelines/__init__.py")
    check = (
        "import sys; sys.path.insert(0, '.')\n"
        "from kfp_elastic.components import elastic_train\n"
        "assert 'components' not in sys.modules and 'pipelines' not in sys.modules\n"
        "import components, pipelines\n"
        "assert components.mine and pipelines.mine and elastic_train.name == 'elastic-train'"
    )
    assert sandbox.run(python, "-W", "ignore", "-c", check).returncode == 0
    compiled = sandbox.run(home / "bin" / "kfp-elastic", "pipeline", "compile", "digits", "-o", "digits.yaml")
    assert compiled.returncode == 0, compiled.stderr
    assert (sandbox.folder / "digits.yaml").read_bytes() == (ROOT / "pipelines" / "digits.yaml").read_bytes()
    script = sandbox.script("print('trained')")
    run = sandbox.run(home / "bin" / "kfp-elastic", "run", "--nodes", "2", script)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("trained") == 2
