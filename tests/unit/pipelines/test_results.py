"""The result of a run, collected from what its steps recorded and wrote."""

import json

import pytest

from kfp_elastic.pipelines.faults import middle_step
from kfp_elastic.pipelines.results import collect, write_result
from kfp_elastic.pipelines.run_page import render_run


def record(name, status="succeeded", *, artifacts=None, output=None, error=None):
    return {
        "name": name,
        "status": status,
        "started": 0.0,
        "seconds": None if status == "running" else 1.5,
        "error": error,
        "parameters": {} if output is None else {"Output": output},
        "artifacts": artifacts or {},
    }


def artifact(kind, path, **metadata):
    return {"type": f"system.{kind}", "path": str(path), "metadata": metadata}


def result_of(run_dir, records, *, exit_code=0, interrupted=False, wants_recovery=False):
    return collect(
        pipeline="digits",
        run_dir=run_dir,
        parameters={"epochs": 3},
        records=records,
        exit_code=exit_code,
        interrupted=interrupted,
        seconds=12.3456,
        wants_recovery=wants_recovery,
    )


@pytest.fixture
def full(tmp_path):
    """Return the records of a whole run, with its files."""
    train, evaluate, serve = (tmp_path / name for name in ("elastic-train", "evaluate", "serve"))
    for folder in (train / "model", evaluate, serve / "serving"):
        folder.mkdir(parents=True)
    (train / "model" / "config.json").write_text("{}")
    (train / "report").write_text("<!DOCTYPE html>")
    (train / "job_record").write_text(
        json.dumps({"recoveries": [{"cause": "rank 1: SIGKILL", "seconds": 0.5, "steps_lost": 3, "more": 1}]})
    )
    (serve / "serving" / "serving.json").write_text(
        json.dumps(
            {
                "url": "http://127.0.0.1:1",
                "matches_offline": True,
                "latency_ms": {"p50": 1.0, "p99": 2.0},
                "example_response": {"outputs": [{"name": "label", "data": ["2"]}]},
            }
        )
    )
    return [
        record(
            "elastic-train",
            artifacts={
                "model": artifact("Model", train / "model"),
                "report": artifact("HTML", train / "report"),
                "job_record": artifact("Artifact", train / "job_record"),
                "metrics": artifact("Metrics", train / "metrics", steps=400.0, rows=10.0),
            },
        ),
        record(
            "evaluate",
            output="passed",
            artifacts={"metrics": artifact("Metrics", evaluate / "metrics", test_accuracy=0.97, rows=5.0)},
        ),
        record(
            "serve",
            output="http://127.0.0.1:1",
            artifacts={"serving": artifact("Artifact", serve / "serving")},
        ),
    ]


def test_a_whole_run(full, tmp_path):
    result = result_of(tmp_path, full)
    write_result(result)
    document = json.loads((tmp_path / "result.json").read_text())
    assert document["schema"] == 1
    assert document["status"] == "succeeded"
    assert document["metrics"] == {
        "steps": 400,
        "elastic_train_rows": 10,
        "rows": 5,
        "test_accuracy": 0.97,
    }
    assert document["recoveries"] == [{"cause": "rank 1: SIGKILL", "seconds": 0.5, "steps_lost": 3}]
    assert document["served"]["matches_offline"] is True
    assert document["served"]["answer"] == "2"
    assert document["seconds"] == 12.346
    assert result.exit_code == 0
    for name, path in document["artifacts"].items():
        assert (tmp_path / name).samefile(path)
    assert json.loads((tmp_path / "elastic-train" / "metrics").read_text())["steps"] == 400
    assert (tmp_path / "elastic-train" / "report.html").read_text() == "<!DOCTYPE html>"
    # The file has the name that a browser knows, and the artifact's own name is the link: see write_result.
    assert not (tmp_path / "elastic-train" / "job_record.json").is_symlink()
    assert (tmp_path / "elastic-train" / "job_record").readlink().name == "job_record.json"
    page = render_run(result)
    for link in (
        "elastic-train/report.html",
        "elastic-train/job_record.json",
        "serve/serving/",
        "result.json",
    ):
        assert f'href="{link}"' in page
    assert str(tmp_path) not in page, "links stay right when the folder is moved"


@pytest.mark.parametrize(
    ("records", "options", "status", "exit_code", "said"),
    [
        ([record("evaluate", output="failed")], {}, "gate_failed", 4, "gate of step evaluate said no"),
        (
            [record("preprocess"), record("elastic-train", "failed", error="DataError: column x")],
            {"exit_code": 1},
            "failed",
            1,
            "step elastic-train failed: DataError: column x",
        ),
        (
            [record("preprocess", "running")],
            {"exit_code": 137},
            "failed",
            1,
            "in step preprocess with signal 9",
        ),
        ([], {"exit_code": 1}, "failed", 1, "exit code 1"),
        (
            [record("preprocess", "running")],
            {"exit_code": 143, "interrupted": True},
            "failed",
            130,
            "interrupted in step preprocess",
        ),
        ([], {"exit_code": 143, "interrupted": True}, "failed", 130, "interrupted"),
        # A gate elsewhere: only the evaluation's verdict decides.
        ([record("serve", output="failed")], {}, "succeeded", 0, None),
    ],
)
def test_verdicts(records, options, status, exit_code, said, tmp_path):
    result = result_of(tmp_path, records, **options)
    assert (result.status, result.exit_code) == (status, exit_code)
    assert said is None if result.error is None else said in result.error
    page = render_run(result)
    assert ("interrupted" if result.interrupted else status.replace("_", " ")) in page


def test_a_kill_that_did_not_happen_is_said(tmp_path):
    (note,) = result_of(tmp_path, [record("elastic-train")], wants_recovery=True).notes
    assert "no worker was killed" in note
    assert not result_of(tmp_path, [record("elastic-train")]).notes


def test_damaged_files_of_steps_do_not_hide_the_run(full, tmp_path):
    (tmp_path / "elastic-train" / "job_record").write_text('{"recoveries": [')
    (tmp_path / "serve" / "serving" / "serving.json").unlink()
    result = result_of(tmp_path, full)
    assert result.recoveries == []
    assert result.served is None
    write_result(result)
    assert "job_record" in render_run(result)


@pytest.mark.parametrize(
    ("rows", "batch", "epochs", "step"),
    [(1259, 64, 20, 33), (1259, 64, 1, 13), (10, 64, 5, 1), (10, 64, 1, 1)],
)
def test_the_step_at_which_a_worker_is_killed(rows, batch, epochs, step):
    assert middle_step(rows, batch, epochs) == step
    per_epoch = -(-rows // batch)
    assert per_epoch == 1 or step % per_epoch, "not at the end of an epoch"
