"""The dataset folder: what is written is read back, and whatever is damaged is named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_runtime.datasets import (
    FeatureStatistics,
    Manifest,
    SourceInfo,
    load_split,
    read_manifest,
    write_dataset,
)
from elastic_runtime.errors import (
    InputError,
    IntegrityError,
    MissingFileError,
    NameInUseError,
    UnknownNameError,
)

ROWS = 7


def make_manifest(**changes: Any) -> Manifest:
    """A manifest of two features whose names are awkward on purpose."""
    fields: dict[str, Any] = {
        "name": "set",
        "task": "classification",
        "target": "label",
        "classes": ("no", "yes"),
        "features": ("self", "b,\n“c”"),
        "extra_columns": ("id",),
        "normalisation": "none",
        "statistics": {
            name: FeatureStatistics(mean=0.1, std=1.0, min=-1.0, max=2.5) for name in ("self", "b,\n“c”")
        },
        "seed": 3,
        "splits": {},
        "source": SourceInfo(url="set.csv", rows=ROWS, rows_quarantined=0, sha256="0" * 64),
    }
    return Manifest(**{**fields, **changes})


def make_table(manifest: Manifest) -> pa.Table:
    first, second = manifest.features
    target = pa.array([0, 1] * 3 + [1]) if manifest.classes else pa.array(np.linspace(-1, 1, ROWS))
    return pa.table(
        {
            first: pa.array(np.arange(ROWS), pa.float32()),
            second: pa.array(np.arange(ROWS) / 3, pa.float32()),
            manifest.target: target,
            "id": pa.array(["001", None, "c", "d", "e", "f", "g"]),
        }
    )


def write(folder: Path, manifest: Manifest | None = None, rows_per_shard: int = 3) -> Manifest:
    manifest = manifest or make_manifest()
    table = make_table(manifest)
    tables = {"train": table, "validation": table.slice(0, 2), "test": table.slice(0, 0)}
    return write_dataset(folder, manifest, tables, rows_per_shard=rows_per_shard)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_round_trip(tmp_path: Path) -> None:
    written = write(tmp_path / "d")
    assert read_manifest(tmp_path / "d") == written
    assert [shard.rows for shard in written.splits["train"].shards] == [3, 3, 1]
    split = load_split(tmp_path / "d", "train")
    assert split.features.dtype == np.float32
    assert split.features.flags.c_contiguous
    np.testing.assert_array_equal(split.features[:, 0], np.arange(ROWS))
    np.testing.assert_array_equal(split.features[:, 1], (np.arange(ROWS) / 3).astype(np.float32))
    assert split.target.dtype == np.int64
    assert split.target.tolist() == [0, 1, 0, 1, 0, 1, 1]
    assert split.frame.columns.tolist() == [*written.features, "label", "id"]
    assert split.frame["id"].tolist() == ["001", None, "c", "d", "e", "f", "g"]
    assert len(split) == ROWS


def test_changing_the_frame_leaves_the_arrays(tmp_path: Path) -> None:
    write(tmp_path / "d")
    split = load_split(tmp_path / "d", "train")
    split.frame.loc[:, "self"] = -1.0
    split.frame.loc[:, "label"] = -1
    assert split.features[:, 0].tolist() == list(range(ROWS))
    assert split.target.min() == 0


def test_regression_target_is_float(tmp_path: Path) -> None:
    write(tmp_path / "d", make_manifest(task="regression", classes=None))
    split = load_split(tmp_path / "d", "train")
    assert split.target.dtype == np.float64
    np.testing.assert_array_equal(split.target, np.linspace(-1, 1, ROWS))


def test_empty_split(tmp_path: Path) -> None:
    write(tmp_path / "d")
    split = load_split(tmp_path / "d", "test")
    assert split.features.shape == (0, 2)
    assert split.target.shape == (0,)
    assert split.frame.columns.tolist() == ["self", "b,\n“c”", "label", "id"]


def test_same_tables_give_same_bytes(tmp_path: Path) -> None:
    digests = []
    for name in ("one", "two"):
        write(tmp_path / name)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        digests.append([(str(p.relative_to(tmp_path / name)), p.read_bytes()) for p in files])
    assert digests[0] == digests[1]
    assert len(digests[0]) == 5


def test_metadata_of_the_table_does_not_reach_the_file(tmp_path: Path) -> None:
    manifest = make_manifest()
    table = make_table(manifest).replace_schema_metadata({"written_at": "now"})
    write_dataset(tmp_path / "d", manifest, {"train": table}, rows_per_shard=10)
    assert b"written_at" not in (tmp_path / "d/train/part-00000.parquet").read_bytes()


def test_nothing_is_left_of_a_failed_write(tmp_path: Path) -> None:
    manifest = make_manifest()
    tables = {"train": make_table(manifest), "test": make_table(manifest).drop_columns(["id"])}
    with pytest.raises(AssertionError):
        write_dataset(tmp_path / "d", manifest, tables, rows_per_shard=3)
    assert list(tmp_path.iterdir()) == []


def test_taken_folder_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    write(tmp_path / "d")
    before = (tmp_path / "d/manifest.json").read_bytes()
    with pytest.raises(NameInUseError, match="not empty"):
        write(tmp_path / "d")
    assert (tmp_path / "d/manifest.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="cannot be made"):
        write(tmp_path / "file" / "d")


def test_rows_per_shard_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rows_per_shard is 0"):
        write(tmp_path / "d", rows_per_shard=0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), "bytes, the manifest says"),
        (lambda p: p.write_bytes(p.read_bytes()[:40] + b"\x00" + p.read_bytes()[41:]), "has sha256"),
        (lambda p: p.unlink(), "cannot be read"),
        (lambda p: p.write_bytes(b""), "has 0 bytes"),
    ],
)
def test_damaged_shard_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    write(tmp_path / "d")
    shard = tmp_path / "d/train/part-00001.parquet"
    assert shard.read_bytes()[40:41] != b"\x00"
    damage(shard)
    with pytest.raises(IntegrityError, match=message) as caught:
        load_split(tmp_path / "d", "train")
    assert "train/part-00001.parquet" in str(caught.value)
    assert load_split(tmp_path / "d", "validation").target.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (lambda t: t.slice(0, 2), "has 2 rows, the manifest says 3"),
        (lambda t: t.drop_columns(["id"]), "has no column 'id'"),
        (lambda t: t.set_column(0, "self", pa.array(np.arange(3.0))), "column 'self' of type float64"),
        (lambda t: t.set_column(0, "self", pa.array([1.0, None, 2.0], pa.float32())), "1 missing values"),
        (lambda t: t.set_column(2, "label", pa.array(["a", "b", "c"])), "column 'label' of type string"),
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_shard_that_contradicts_the_manifest(
    tmp_path: Path, table: Callable[[pa.Table], pa.Table], message: str, verify: bool
) -> None:
    write(tmp_path / "d")
    shard = tmp_path / "d/train/part-00000.parquet"
    pq.write_table(table(pq.read_table(shard)), shard)
    content = shard.read_bytes()

    def bless(manifest: dict[str, Any]) -> None:
        entry = manifest["splits"]["train"]["shards"][0]
        entry.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())

    rewrite(tmp_path / "d", bless)
    with pytest.raises(IntegrityError, match=message):
        load_split(tmp_path / "d", "train", verify=verify)


def test_class_index_out_of_range(tmp_path: Path) -> None:
    write(tmp_path / "d")
    rewrite(tmp_path / "d", lambda m: m.update(classes=["only"]))
    with pytest.raises(IntegrityError, match="class index outside 0 … 0"):
        load_split(tmp_path / "d", "train")


def test_without_verify_the_checksum_is_not_compared(tmp_path: Path) -> None:
    write(tmp_path / "d")
    rewrite(tmp_path / "d", lambda m: m["splits"]["train"]["shards"][0].update(sha256="f" * 64))
    assert len(load_split(tmp_path / "d", "train", verify=False)) == ROWS
    with pytest.raises(IntegrityError):
        load_split(tmp_path / "d", "train")


def test_unknown_split_offers_the_near_one(tmp_path: Path) -> None:
    write(tmp_path / "d")
    with pytest.raises(UnknownNameError, match=r"unknown split 'valid'.*'validation'"):
        load_split(tmp_path / "d", "valid")


@pytest.mark.parametrize("schema", [2, "1", None, True])
def test_unknown_schema_is_refused(tmp_path: Path, schema: object) -> None:
    write(tmp_path / "d")
    rewrite(tmp_path / "d", lambda m: m.update(schema=schema))
    with pytest.raises(InputError, match="schema is"):
        read_manifest(tmp_path / "d")


def _set(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        at: Any = content
        for key in parents:
            at = at[int(key)] if isinstance(at, list) else at[key]
        at[last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("name", "", "name is ''"),
        ("task", "clustering", "task is 'clustering'"),
        ("classes", None, "classes is None"),
        ("features", [], "features is"),
        ("features", ["self", "self"], "features is"),
        ("features", ["self", "id"], "features is"),
        ("statistics", {}, "statistics is"),
        ("statistics/self", {"mean": 0, "std": 0, "min": 0, "max": 0}, "statistics is"),
        ("statistics/self/mean", "0", r"statistics\.self\.mean"),
        ("seed", -1, "seed is -1"),
        ("seed", 1.5, "seed is 1.5"),
        ("splits", [], "splits is"),
        ("splits/train/rows", 8, r"splits\.train\.rows is 8"),
        ("splits/train/shards", {}, r"splits\.train\.shards is"),
        ("splits/train/shards/0/path", "../../etc/passwd", r"shards\[0\]\.path"),
        ("splits/train/shards/0/path", "/etc/passwd", r"shards\[0\]\.path"),
        ("splits/train/shards/0/sha256", None, r"shards\[0\]\.sha256"),
        ("source", None, "source is None"),
        ("source/rows", "7", r"source\.rows is '7'"),
        ("normalisation", None, "normalisation is None"),
    ],
)
def test_wrong_field_is_named(tmp_path: Path, path: str, value: object, named: str) -> None:
    write(tmp_path / "d")
    rewrite(tmp_path / "d", _set(path, value))
    with pytest.raises(IntegrityError, match=named):
        read_manifest(tmp_path / "d")


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe"])
def test_not_a_manifest(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(IntegrityError, match=r"manifest\.json"):
        read_manifest(tmp_path)


def test_no_dataset_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder, message in (("", "has no manifest"), ("none", "does not exist"), ("file", "is a file")):
        with pytest.raises(MissingFileError, match=message):
            load_split(tmp_path / folder, "train")
