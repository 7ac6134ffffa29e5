"""What only another process shows: the same bytes under any hash seed, and what an import loads."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

MAKE = """
import sys
from pathlib import Path
from elastic_runtime.preprocessing import PreprocessConfig, preprocess, render_report
result = preprocess(PreprocessConfig(source=sys.argv[1], target="y" if "." in sys.argv[1] else "",
    extra_columns=["city"] if "." in sys.argv[1] else [], on_bad_rows="quarantine", seed=5, rows_per_shard=50),
    sys.argv[2])
Path(sys.argv[2], "report.html").write_text(render_report(result), encoding="utf-8")
"""

LOADED = """
import sys, json
heavy = {"torch", "kfp", "pandas", "pandera", "sklearn", "matplotlib", "pyarrow", "numpy", "fsspec", "scipy"}
exec(sys.argv[1])
print(json.dumps(sorted(heavy & set(sys.modules))))
"""


def python(code: str, *arguments: str, seed: str = "0") -> str:
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("kind", ["digits", "csv", "jsonl"])
def test_same_input_gives_same_bytes(tmp_path: Path, kind: str) -> None:
    """Other folders for input and output, another hash seed: every file of the dataset and the report agree."""
    found = []
    for seed in ("0", "4242"):
        folder = tmp_path / f"run-{seed}"
        folder.mkdir()
        source = kind
        if kind != "digits":
            data = pd.DataFrame(
                {
                    "a": [i * 37 % 101 / 8 for i in range(200)],
                    "city": ["Bern", "Zürich"] * 100,
                    "y": ["no", "yes", "may be", "no"] * 50,
                }
            ).astype({"a": object})
            data.loc[9, "a"] = "x"
            data["b"] = range(200)
            source = str(folder / f"rows.{kind}")
            if kind == "csv":
                data.to_csv(source, index=False)
            else:
                data.to_json(source, orient="records", lines=True)
        python(MAKE, source, str(folder / "out"), seed=seed)
        found.append(digests(folder / "out"))
    assert found[0] == found[1]
    assert "manifest.json" in found[0]
    assert ("quarantine.jsonl" in found[0]) is (kind != "digits")


@pytest.mark.parametrize(
    ("statement", "loaded"),
    [
        ("import elastic_runtime.datasets as d; d.read_manifest", []),
        ("from elastic_runtime.preprocessing import PreprocessConfig; PreprocessConfig(source='digits')", []),
    ],
)
def test_imports_stay_light(statement: str, loaded: list[str]) -> None:
    assert json.loads(python(LOADED, statement)) == loaded


def test_loading_a_split_needs_only_numpy_and_pyarrow(tmp_path: Path) -> None:
    """A training process loads its split: neither pandas nor anything of preprocessing comes with it."""
    python(MAKE, "iris", str(tmp_path / "out"))
    statement = (
        "from elastic_runtime.datasets import load_split; "
        f"split = load_split({str(tmp_path / 'out')!r}, 'train'); assert split.features.shape == (105, 4)"
    )
    assert json.loads(python(LOADED, statement)) == ["numpy", "pyarrow"]
