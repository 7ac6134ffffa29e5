"""One job from start to stop, controlled from the command line: real processes all the way."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

KEYS = {
    "schema", "name", "state", "global_step", "world_size", "min", "max", "desired", "restarts", "term", "round",
    "coordinator", "nodes", "events",
}  # fmt: skip


def test_a_detached_job_from_start_to_stop(sandbox: Any, control: Any, wait: Callable[..., Any]) -> None:
    started = control.start("alpha", "--nodes", "1:2", "--state-dir", "far/away")
    folder = sandbox.folder / "far" / "away"
    assert started.keys() == {"schema", "name", "handle", "folder"}
    assert (started["name"], started["folder"]) == ("alpha", str(folder))
    assert started["handle"].startswith("local_cwd://torchx/alpha-")
    document = control.until(
        "alpha",
        lambda d: d["global_step"] == 3 and all(w["pid"] for n in d["nodes"] for w in n["workers"]),
        "a step",
    )

    # Status, by each way to name a job.
    assert document.keys() >= KEYS
    wanted = {"name": "alpha", "state": "running", "world_size": 2, "min": 1, "max": 2, "desired": 2, "restarts": 0,
              "term": 1, "round": 0, "exit_code": None}  # fmt: skip
    assert {key: document[key] for key in wanted} == wanted
    running = {pid for pid, _ in sandbox.processes()}
    assert document["coordinator"].keys() == {"host", "pid"}
    pids = [document["coordinator"]["pid"], document["supervisor"]]
    for number, node in enumerate(document["nodes"]):
        (worker,) = node["workers"]
        assert (node["id"], worker["rank"]) == (str(number), number)
        pids += [node["agent_pid"], worker["pid"]]
    assert len(document["nodes"]) == 2
    assert len(set(pids)) == len(pids)
    assert running.issuperset(pids)
    assert all(
        {"time", "kind", "cause", "verdict", "seconds"} <= event.keys() for event in document["events"]
    )
    for word in (started["handle"], str(folder)):
        assert control.document("status", word)["coordinator"] == document["coordinator"]
    table = control("status", "alpha").stdout
    assert "job alpha: running" in table
    assert "round 0: 2 workers on 2 nodes" in table
    assert control.document("status", "alpha", "--events", "1")["events"] == document["events"][-1:]

    # Its name and its folder are taken, for every way to start a job.
    for options in ((), ("--detach",), ("--state-dir", folder), ("--detach", "--state-dir", folder)):
        assert "is running" in control("run", "--name", "alpha", *options, control.script, code=2).stderr

    # Logs.
    lines = [f"line {number} of rank 0" for number in range(5)]
    both = control("logs", "alpha").stdout.splitlines()
    assert [line.removeprefix("[rank0] ") for line in both if "[rank0]" in line] == [*lines, "asleep"]
    assert control("logs", "alpha", "--grep", r"line [13] of", "--rank", "1").stdout.splitlines() == [
        "[rank1] line 1 of rank 1",
        "[rank1] line 3 of rank 1",
    ]
    assert control("logs", "alpha", "--tail", "1").stdout.splitlines() == ["[rank0] asleep", "[rank1] asleep"]
    assert control.document("logs", "alpha", "--rank", "0", "--grep", "line", "--tail", "2")["lines"] == [
        {"rank": 0, "text": lines[3]}, {"rank": 0, "text": lines[4]},
    ]  # fmt: skip
    assert control.error("logs", "alpha", "--grep", "(").startswith("error: --grep '('")
    assert "there are: 0, 1" in control.error("logs", "alpha", "--rank", "9")
    piped = sandbox.run(
        "bash",
        "-c",
        "set -o pipefail; yes '' | head -1; kfp-elastic logs -f alpha | head -1",
        cwd=control.elsewhere,
    )
    assert (piped.returncode, piped.stderr) == (0, ""), "a reader that goes away is no error"

    # A report of a job that still runs.
    page = control("report", "alpha").stdout.strip()
    assert page == str(folder / "report.html")
    assert "still running" in (folder / "report.html").read_text()
    other = sandbox.folder / "other.html"
    assert control.document("report", "alpha", "--out", other)["report"] == str(other)
    assert "there is no folder" in control.error("report", "alpha", "--out", "no/such/file.html")

    # Sizes that it may not have.
    assert "this job may have from 1 to 2 workers" in control.error("scale", "alpha", "3")
    assert "choose a number from 1" in control.error("scale", "alpha", "0")
    assert control.document("scale", "alpha", "2")["reached"] is True

    # Followers see the end; two stops at once are one, and both wait for it.
    follower = sandbox.start("kfp-elastic", "logs", "--follow", "--tail", "1", "alpha", cwd=control.elsewhere)
    assert follower.stdout.readline() == "[rank0] asleep\n"
    stops = [sandbox.start("kfp-elastic", "stop", "--json", "alpha", cwd=control.elsewhere) for _ in range(2)]
    for stop in stops:
        out, err = stop.communicate(timeout=60)
        assert stop.returncode == 0, err
        assert json.loads(out)["state"] == "stopped"
        assert not running.intersection(pid for pid, _ in sandbox.processes()), "nothing of it is left"
    out, err = follower.communicate(timeout=30)
    assert (follower.returncode, out, err) == (0, "[rank1] asleep\n", "")

    # And after the end.
    document = control.document("status", "alpha")
    wanted = {
        "name": "alpha",
        "state": "stopped",
        "coordinator": None,
        "nodes": [],
        "global_step": 3,
        "exit_code": 130,
    }
    assert {key: document[key] for key in wanted} == wanted
    assert control.document("status", started["handle"])["state"] == "stopped"
    assert control.document("stop", "alpha")["was_running"] is False
    assert "job 'alpha' is over (stopped)" in control.error("scale", "alpha", "1")
    assert control("logs", "-f", "alpha", "--tail", "1").stdout.splitlines() == [
        "[rank0] asleep",
        "[rank1] asleep",
    ]
    assert "SIGTERM received" in (folder / "logs" / "launcher.log").read_text()
    assert (folder / "report.html").read_text().count("still running") == 0, "the launcher wrote the last one"
    for name in ("secret", "agent.json", "coordinator.json", "leader"):
        assert not (folder / name).exists()


def test_a_job_that_ends_by_itself_is_followed_to_its_last_word(sandbox: Any, control: Any) -> None:
    control.start("ends")
    follower = sandbox.start(
        "kfp-elastic", "logs", "-f", "ends", "--grep", "asleep|awake", cwd=control.elsewhere
    )
    assert follower.stdout.readline() == "[rank0] asleep\n"
    (sandbox.folder / "finish").touch()
    out, err = follower.communicate(timeout=60)
    assert (follower.returncode, out, err) == (0, "[rank0] awake\n", ""), "a last line without an end too"
    document = control.until("ends", lambda d: d["state"] != "running", "the end")
    assert (document["state"], document["exit_code"], document["reason"]) == (
        "succeeded", 0, "every worker ended with exit code 0",
    )  # fmt: skip
    assert control.document("stop", "ends")["state"] == "succeeded"


def test_what_cannot_start_detached_is_an_error_as_in_the_foreground(sandbox: Any, control: Any) -> None:
    script, state = control.script, sandbox.folder / "state" / "kfp-elastic"
    bad = sandbox.script("def f(:\n", "bad.py")
    for words, told in {
        (bad,): "bad.py, line 1: SyntaxError",
        ("--scheduler", "nope", script): "unknown scheduler 'nope'",
        ("--scheduler-arg", "colour=red", script): "unknown option of scheduler local_cwd 'colour'",
        ("--nodes", "0", script): "--nodes '0'",
    }.items():
        assert told in control.error("run", "--detach", "--name", "never", *words)
    assert not list(state.glob("jobs/*")), "nothing is left of what did not start"
    assert "unknown job 'never'" in control.error("status", "never")

    # Two of one name at once: one of them starts.
    command = ("kfp-elastic", "run", "--detach", "--name", "once", script)
    pair = [sandbox.start(*command) for _ in range(2)]
    results = [(*process.communicate(timeout=60), process.returncode) for process in pair]
    assert sorted(code for *_, code in results) == [0, 2], results
    (refused,) = [err for _, err, code in results if code == 2]
    assert "error: job 'once'" in refused
    control("stop", "once")


def test_commands_load_nothing_heavy(sandbox: Any, control: Any) -> None:
    control.start("light")
    control.until("light", lambda d: d["state"] == "running", "training")
    heavy = ("torch", "torchx", "kfp", "numpy", "matplotlib", "jinja2", "rich", "asyncio")
    code = (
        "import sys\nfrom kfp_elastic.pipelines.main import main\ncode = main(sys.argv[1:])\n"
        f"found = [name for name in {heavy} if name in sys.modules]\nsys.exit(code or ' '.join(found) or None)"
    )
    python = sandbox.environment["PATH"].partition(os.pathsep)[0] + "/python"
    for words in (("status",), ("scale", "light", "1"), ("logs",), ("stop",)):
        done = sandbox.run(python, "-c", code, *words, *(() if "light" in words else ("light",)))
        assert (done.returncode, done.stderr) == (0, ""), (words, done.stderr)
