"""`pipeline run --local` as a user runs it: documents, folders, failures, gates, wrong input."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

KEYS = {"schema", "status", "run_dir", "metrics", "recoveries", "served", "artifacts", "seconds"}


def received(ran):
    """Return the arguments that the first step printed."""
    return json.loads(re.search(r"make \| received (.*)", ran.err)[1])


def test_a_run_that_succeeds(command):
    ran = command.local()
    document = ran.document
    assert ran.code == 0, ran.err
    assert document.keys() >= KEYS
    assert document["schema"] == 1
    assert document["status"] == "succeeded"
    assert document["metrics"] == {"rows": 7, "test_accuracy": 0.9}
    assert document["served"] is None
    assert document["recoveries"] == []
    assert [(step["name"], step["status"]) for step in document["steps"]] == [
        ("make", "succeeded"),
        ("evaluate", "succeeded"),
        ("publish", "succeeded"),
    ]
    run_dir = command.folder / "runs" / "throwaway" / document["run_id"]
    assert document["run_dir"] == str(run_dir)
    assert (command.folder / "runs" / "throwaway" / "latest").resolve() == run_dir
    assert document["artifacts"].keys() == {"make/data", "make/report", "make/metrics", "evaluate/metrics"}
    for name, path in document["artifacts"].items():
        assert path == str(run_dir / name)
        assert Path(path).exists()
    assert json.loads((run_dir / "result.json").read_text()) == document
    page = (run_dir / "index.html").read_text()
    assert 'href="make/report.html"' in page
    assert (run_dir / "make" / "report.html").read_text() == "<!DOCTYPE html><p>report"
    assert "executor_input" not in ran.err
    assert "RuntimeWarning" not in ran.err
    assert "received" in (run_dir / "logs" / "make.log").read_text()


def test_people_get_a_summary_and_the_path(command):
    ran = command("run", command.package, "--local")
    assert ran.code == 0, ran.err
    (run_dir,) = [path for path in (command.folder / "runs" / "throwaway").iterdir() if path.name != "latest"]
    assert f"run: {run_dir}" in ran.out
    assert re.search(r"publish +succeeded +\d", ran.out)
    assert re.search(r"test_accuracy +0.9", ran.out)
    assert "\x1b" not in ran.out


def test_values_arrive_as_they_were_given(command):
    ran = command.local(epochs=5, min_accuracy=0.75, given="[1, 2.5, [3]]", text="ünï 'x' \"y\" $HOME")
    assert ran.code == 0, ran.err
    assert received(ran) == {
        "mixed": {"epochs": 5, "rate": 0.75, "widths": [64, 32], "none": None, "half": 0.5, "empty": []},
        "numbers": [1, 2.5, [3]],
        "text": "ünï 'x' \"y\" $HOME",
        "seconds": 0.0,
    }
    assert "5.0" not in re.search(r"received (.*)", ran.err)[1]


def test_a_gate_that_says_no(command):
    ran = command.local(min_accuracy=0.99)
    assert ran.code == 4
    assert ran.document["status"] == "gate_failed"
    assert [step["name"] for step in ran.document["steps"]] == ["make", "evaluate"]
    assert ran.document["metrics"]["test_accuracy"] == 0.9


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("raise", "step make failed: ValueError: column 'age': rows 3, 4 break the rule\nsee the report"),
        ("exit", "step make failed: exit code 3; its last line: environment {}"),
        ("die", "step make failed: killed by SIGKILL; its last line: Killed"),
        ("no artifact", "did not write the artifact 'data' (Dataset, "),
        ("empty folder", "did not write the artifact 'data' (Dataset, "),
        ("no metrics", "did not write the artifact 'metrics' (Metrics, "),
        ("no return", "did not write the return value 'Output'"),
    ],
)
def test_a_step_that_fails(command, mode, said):
    ran = command.local(mode=mode)
    document = ran.document
    assert ran.code == 1
    assert document["status"] == "failed"
    assert said in document["error"]
    assert [(step["name"], step["status"]) for step in document["steps"]] == [("make", "failed")]
    page = (command.folder / "runs" / "throwaway" / "latest" / "index.html").read_text()
    assert "received" in page, "the end of the step's output is on the page"
    assert Path(document["run_dir"], "result.json").exists()


def test_what_a_failed_step_wrote_is_kept(command):
    document = command.local(mode="no metrics").document
    assert document["artifacts"].keys() == {"make/data", "make/report"}


def test_what_a_step_wrote_before_it_raised_is_named_and_linked(command):
    document = command.local(mode="raise late").document
    assert document["artifacts"].keys() == {"make/data", "make/report"}
    run_dir = Path(document["run_dir"])
    assert (run_dir / "make" / "report.html").read_text() == "<!DOCTYPE html><p>report"
    page = (run_dir / "index.html").read_text()
    happened = page[page.index("What happened") : page.index(">Steps<")]
    assert "<p>step make failed: RuntimeError: after the report</p>" in happened
    assert 'href="make/report.html"' in happened
    assert 'href="logs/make.log"' in happened
    assert happened.index("make/report.html") < happened.index("<pre")
    assert "executor_input" not in happened
    assert "Traceback" in happened, "the traceback of a program is of use"


def test_an_error_of_ours_is_said_without_its_traceback(command):
    ran = command.local(mode="our error")
    assert ran.document["error"] == "step make failed: DataError: column 'age' holds text"
    assert "make | DataError: column 'age' holds text" in ran.err
    assert "Traceback" not in ran.err
    run_dir = Path(ran.document["run_dir"])
    assert "Traceback" not in (run_dir / "index.html").read_text()
    assert "Traceback" in (run_dir / "logs" / "make.log").read_text(), "the log has everything"


def test_steps_behind_a_gate_that_said_no_are_listed_as_skipped(command):
    ran = command("run", command.package, "--local", "-p", "min_accuracy=0.99")
    assert ran.code == 4
    assert re.search(r"^publish +skipped", ran.out, re.MULTILINE)
    page = (command.folder / "runs" / "throwaway" / "latest" / "index.html").read_text()
    assert re.search(r"<td>publish</td><td>skipped</td>", re.sub(r">\s+<", "><", page))
    assert "did not run" not in page


def test_steps_after_a_failed_one_are_listed_as_not_run(command):
    ran = command("run", command.package, "--local", "-p", "mode=raise")
    assert re.search(r"^evaluate +not run", ran.out, re.MULTILINE)
    assert re.search(r"^publish +not run", ran.out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "digit", "--local"], "unknown pipeline 'digit'; did you mean 'digits'?"),
        (["run", "no/such.yaml", "--local"], "pipeline file 'no/such.yaml' does not exist"),
        (["run", "digits", "--local", "-p", "epoch=3"], "did you mean 'epochs'?"),
        (["run", "digits", "--local", "-p", "lr=abc"], "parameter lr='abc' is not a number"),
        (["run", "digits", "--local", "-p", "lr=inf"], "must be finite"),
        (["run", "digits", "--local", "-p", "nodes=3:2"], "parameter nodes='3:2'"),
        (["run", "digits", "--local", "-p", "min_accuracy=95"], "for 95 percent write 0.95"),
        (["run", "digits", "--local", "-p", "epochs=-1"], "parameter epochs=-1 is below 1"),
        (["run", "tabular-regression", "--local", "-p", "min_r2=7"], "parameter min_r2=7.0 is above 1"),
        (
            ["run", "digits", "--host", "http://127.0.0.1:1", "-p", "lr=-1"],
            "parameter lr=-1.0 is not above 0",
        ),
        (["run", "mine.py", "--local"], "compiled .yaml file"),
        (["run", "digits", "--local", "-p", "epochs"], "write -p NAME=VALUE"),
        (["run", "digits", "--local", "-p", "nodes=" + "1" * 110_000], "a parameter may have 100,000"),
        (["run", "digits", "--local", "--runs-dir", "file"], "--runs-dir 'file' cannot be written"),
        (["run", "digits", "--local", "--runs-dir", "/proc/x"], "--runs-dir '/proc/x' cannot be written"),
        (["run", "digits", "--local", "--runs-dir", ""], "--runs-dir is empty: give a folder"),
        (["run", "digits", "--local", "--namespace", "a"], "--namespace has no meaning with --local"),
        (["run", "digits", "--host", "http://127.0.0.1:1", "--kill-worker"], "--kill-worker has no meaning"),
        (["run", "digits", "--host", "127.0.0.1:1"], "is no address: write http[s]://HOST"),
        (["run", "digits", "--local", "--host", "http://a"], "not allowed with argument"),
        (["run", "digits"], "one of the arguments --local --host is required"),
        (["run"], "the following arguments are required: NAME"),
        (["compile", "digits", "-o", "x.json"], "must end in .yaml"),
        (["compile", "digits", "-o", "x.yaml", "--image", "A B"], "is no container image"),
        (["run", "broken.yaml", "--local"], "is no compiled kfp v2 pipeline"),
    ],
)
def test_wrong_input_is_one_error_before_anything_starts(command, arguments, said):
    (command.folder / "file").write_text("")
    (command.folder / "broken.yaml").write_text("a: [1\n")
    ran = command(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert said in ran.err
    assert ran.err.startswith("error: ")
    assert len(ran.err.splitlines()) <= 2
    assert sorted(path.name for path in command.folder.iterdir()) == ["broken.yaml", "file"]


def test_kill_worker_needs_a_training_step(command):
    ran = command("run", command.package, "--local", "--kill-worker")
    assert ran.code == 2
    assert "--kill-worker: pipeline throwaway has no step elastic-train" in ran.err


def test_a_folder_that_cannot_be_written(command):
    (command.folder / "locked").mkdir(mode=0o555)
    # Root may write everywhere, unless it lacks this capability.
    plain = ["setpriv", "--bounding-set", "-dac_override"] if os.geteuid() == 0 else []
    arguments = command.arguments("run", command.package, "--local", "--runs-dir", "locked")
    ran = subprocess.run([*plain, *arguments], cwd=command.folder, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert "--runs-dir 'locked' cannot be written: Permission denied" in ran.stderr


def test_two_runs_at_once(command):
    both = [command.start("run", command.package, "--local", "--json", "-p", "seconds=0.5") for _ in range(2)]
    documents = []
    for process in both:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        documents.append(json.loads(out))
    assert documents[0]["run_dir"] != documents[1]["run_dir"]
    latest = (command.folder / "runs" / "throwaway" / "latest").resolve()
    assert str(latest) in {document["run_dir"] for document in documents}
    for document in documents:
        assert all(path.startswith(document["run_dir"]) for path in document["artifacts"].values())


def test_a_full_disk_is_one_error(command, tmp_path):
    # A limit on the size of files stands in for the disk: the first step's log goes over it.
    limited = [
        "sh",
        "-c",
        'ulimit -f 64; exec "$@"',
        "sh",
        *command.arguments("run", command.package, "--local"),
    ]
    ran = subprocess.run(
        [*limited, "-p", "text=" + "x" * 90_000], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 1
    assert "File too large" in ran.stderr + ran.stdout


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_disk_that_is_full_at_the_end_still_gives_the_document(command, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    # In a mount namespace of its own, so that nothing is left mounted: room for the steps, not for the page.
    script = 'mount -t tmpfs -o size=80k none disk && exec "$@"'
    arguments = command.arguments("run", command.package, "--local", "--json", "--runs-dir", "disk")
    ran = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *arguments, "-p", "text=" + "x" * 90_000],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 1, ran.stderr
    (line,) = ran.stdout.splitlines()
    document = json.loads(line)
    assert document["status"] == "failed"
    assert "No space left on device" in document["error"]
    assert "\nTraceback" not in ran.stderr


def test_nothing_stays_in_the_temporary_folder(command, tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    ran = command("run", command.package, "--local", env={"TMPDIR": str(temporary)})
    assert ran.code == 0, ran.err
    assert list(temporary.iterdir()) == []


def test_help_is_quick_and_light(command):
    code = (
        "import sys; from kfp_elastic.pipelines.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'kfp', 'torch', 'pandas', 'yaml', 'rich', 'numpy'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy), 'bare:', sorted({'components', 'pipelines'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pipeline" in ran.stdout
    assert ran.stdout.splitlines()[-1] == "heavy: [] bare: []"


def test_list(command):
    assert re.search(r"^digits +\w", command("list").out, re.MULTILINE)
    names = [entry["name"] for entry in command("list", "--json").document["pipelines"]]
    assert names == ["digits", "tabular_regression"]


def test_a_process_that_a_step_leaves_behind_does_not_hold_the_run(command, marked):
    ran = command(
        "run",
        command.package,
        "--local",
        "--json",
        "-p",
        "seconds=0.3",
        env={"KFP_ELASTIC_TEST_MARK": "left behind"},
    )
    assert ran.code == 0, ran.err
    assert "make | stray ready" in ran.err
    assert ran.document["seconds"] < 30
    assert marked("KFP_ELASTIC_TEST_MARK=left behind") == {}


def test_output_that_is_not_utf8(command):
    ran = command.local(mode="not utf-8")
    assert ran.code == 0, ran.err
    assert "make | caf\ufffd" in ran.err
