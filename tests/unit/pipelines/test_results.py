"""The result of a run, collected from what its steps recorded and wrote."""

import dataclasses
import io
import json
import re

import pytest

from kfp_elastic.pipelines.faults import middle_step
from kfp_elastic.pipelines.results import collect, write_result
from kfp_elastic.pipelines.run_page import render_run
from kfp_elastic.pipelines.summary import show


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


def result_of(run_dir, records, *, exit_code=0, interrupted=False, wants_recovery=False, planned=()):
    return collect(
        pipeline="digits",
        run_dir=run_dir,
        parameters={"epochs": 3},
        records=records,
        exit_code=exit_code,
        interrupted=interrupted,
        seconds=12.3456,
        wants_recovery=wants_recovery,
        planned=planned,
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


def judged(name, accuracy, output="passed"):
    metrics = artifact("Metrics", f"/nowhere/{name}", test_accuracy=accuracy)
    return record(name, output=output, artifacts={"metrics": metrics})


def test_a_gate_inside_a_loop_counts(tmp_path):
    names = [f"for-loop-2-iteration-{number}/evaluate" for number in range(2)]
    result = result_of(tmp_path, [judged(names[0], 0.9), judged(names[1], 0.1, "failed")])
    assert (result.status, result.exit_code) == ("gate_failed", 4)
    assert names[1] in result.error


def test_two_evaluations_keep_both_metrics(tmp_path):
    result = result_of(tmp_path, [judged("evaluate", 0.9), judged("evaluate-2", 0.8)])
    assert result.metrics == {"evaluate_test_accuracy": 0.9, "evaluate_2_test_accuracy": 0.8}


def test_the_model_that_was_served_is_the_one_to_keep_serving(full, tmp_path):
    assert result_of(tmp_path, full).packaged == tmp_path / "serve" / "serving"
    assert result_of(tmp_path, full[:2]).packaged is None


def test_people_read_rounded_seconds(full, tmp_path):
    record_file = tmp_path / "elastic-train" / "job_record"
    record_file.write_text(json.dumps({"recoveries": [{"cause": "x", "seconds": 0.51234, "steps_lost": 3}]}))
    result = result_of(tmp_path, [{**step, "seconds": 4.1234} for step in full])
    summary = io.StringIO()
    show(result, summary)
    for text in (summary.getvalue(), render_run(result)):
        assert "4.1234" not in text
        assert "4.12" not in text
        assert "4.1" in text
        assert "0.5123" not in text
        assert "0.51" in text
    assert result.document()["steps"][0]["seconds"] == 4.1234
    assert result.recoveries[0]["seconds"] == 0.51234


def test_a_long_error_is_not_broken_into_lines(tmp_path):
    summary = io.StringIO()
    show(result_of(tmp_path, [record("a", "failed", error="x " * 300)], exit_code=1), summary)
    assert ("x " * 300).strip() in summary.getvalue()


def test_a_gate_that_says_no_says_why(tmp_path):
    rules = [
        {"name": "min_accuracy", "passed": False, "reason": "accuracy on test 0.8076 is below 0.99"},
        {"name": "min_f1", "passed": True, "reason": "macro F1 on test 0.8 is at least 0.5"},
        {"name": "min_auc", "passed": False, "reason": "area under the ROC curve on test 0.5 is below 0.9"},
    ]
    folder = tmp_path / "evaluate"
    folder.mkdir()
    (folder / "evaluation").write_text(json.dumps({"gate": {"verdict": "failed", "rules": rules}}))
    (folder / "report").write_text("<!DOCTYPE html>")
    artifacts = {
        "report": artifact("HTML", folder / "report"),
        "evaluation": artifact("Artifact", folder / "evaluation"),
    }
    result = result_of(tmp_path, [record("evaluate", output="failed", artifacts=artifacts)])
    assert result.document()["error"] == (
        "the quality gate of step evaluate said no: accuracy on test 0.8076 is below 0.99; "
        "area under the ROC curve on test 0.5 is below 0.9"
    )
    write_result(result)
    page = render_run(result)
    happened = page[page.index("What happened") : page.index(">Steps<")]
    assert 'href="evaluate/report.html"' in happened
    assert "is below 0.99" in happened


def said(result):
    stream = io.StringIO()
    show(result, stream)
    return stream.getvalue()


def test_a_served_model_is_said_to_be_stopped(full, tmp_path):
    result = result_of(tmp_path, full)
    wanted = "was served at http://127.0.0.1:1 (stopped; --keep-serving leaves it running)"
    assert wanted in said(result)
    assert wanted in render_run(result)
    assert "answered '2', which equals the offline prediction" in said(result)


def test_a_server_that_goes_on_is_said_to_run_and_how_to_stop_it(full, tmp_path):
    result = result_of(tmp_path, full)
    kept = {**result.served, "url": "http://127.0.0.1:2", "pid": 77, "stop": "kill 77"}
    result = dataclasses.replace(result, served=kept)
    wanted = "is being served at http://127.0.0.1:2 by process 77, until you stop it: kill 77"
    assert wanted in said(result)
    assert wanted in render_run(result)
    assert "(stopped" not in said(result) + render_run(result)


def test_steps_that_did_not_run_are_listed(tmp_path):
    planned = ["preprocess", "evaluate", "serve"]
    no = result_of(tmp_path, [record("preprocess"), record("evaluate", output="failed")], planned=planned)
    assert no.not_run == ["serve"]
    assert re.search(r"^serve +skipped", said(no), re.MULTILINE)
    assert "skipped" in render_run(no)
    assert [step["name"] for step in no.document()["steps"]] == ["preprocess", "evaluate"]
    broken = result_of(tmp_path, [record("preprocess", "failed", error="x")], exit_code=1, planned=planned)
    assert re.search(r"^serve +not run", said(broken), re.MULTILINE)
    loop = result_of(tmp_path, [record("for-loop-1-iteration-0/serve")], planned=["serve"])
    assert loop.not_run == []


def test_metrics_are_listed_by_step(full, tmp_path):
    page = re.sub(r">\s+<", "><", render_run(result_of(tmp_path, full)))
    rows = re.findall(r"<tr><td>([^<]*)</td><td>([^<]*)</td><td class=\"number\">([^<]*)</td></tr>", page)
    assert rows[:2] == [("elastic-train", "rows", "10"), ("elastic-train", "steps", "400")]
    assert rows[2:] == [("evaluate", "rows", "5"), ("evaluate", "test_accuracy", "0.97")]


def test_a_run_without_its_evaluation_still_says_that_the_gate_said_no(tmp_path):
    result = result_of(tmp_path, [record("evaluate", output="failed")])
    assert result.error == "the quality gate of step evaluate said no: see its report"


def test_the_failure_that_ended_the_job_is_no_recovery(full, tmp_path):
    survived = {"cause": "rank 1: SIGKILL", "seconds": 0.5, "steps_lost": 3}
    ended = {"cause": "rank 0: ValueError", "seconds": None, "steps_lost": None}
    (tmp_path / "elastic-train" / "job_record").write_text(json.dumps({"recoveries": [survived, ended]}))
    failed = {**full[0], "status": "failed", "error": "JobFailed: x"}
    assert result_of(tmp_path, [failed], exit_code=1).recoveries == [survived]
    assert result_of(tmp_path, full).recoveries == [survived, ended]
