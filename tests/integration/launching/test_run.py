"""Real jobs: real processes, real signals, torch where the point needs it."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_runtime.jobs.folder import JobFolder

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "digits.py"

# Takes steps without torch, so that a job costs no import; `hold` waits for a file.
STEPS = """
import os, pathlib, sys, time
from elastic_runtime import worker
context = worker.context()
for step in range(1, int(sys.argv[1]) + 1):
    worker.log(step=step, loss=1 / step, samples=step)
    time.sleep(0.002)
"""
SLEEPER = """
import time
from elastic_runtime import worker
worker.log(step=1)
print("asleep", flush=True)
time.sleep(600)
"""


def record_of(folder: Path) -> dict[str, Any]:
    document = JobFolder(folder).record()
    assert document is not None, "the job left a record"
    return document


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in JobFolder(folder).events() if event["kind"] == kind]


def workers_of(folder: Path) -> dict[int, int]:
    """Return the pid of each rank of the newest round."""
    found = events_of(folder, "worker")
    newest = max((event["round"] for event in found), default=None)
    return {event["rank"]: event["pid"] for event in found if event["round"] == newest}


def test_a_job_runs_to_its_end(sandbox: Any) -> None:
    script = sandbox.script(STEPS)
    done = sandbox.run(
        "kfp-elastic", "run", "--name", "steps", "--nodes", "1:2", "--state-dir", "job", script, "--", "5"
    )
    assert done.returncode == 0, done.stderr
    record = record_of(sandbox.folder / "job")
    assert (record["state"], record["global_step"], record["world_size"], record["restarts"]) == (
        "succeeded",
        5,
        2,
        0,
    )
    assert record["recoveries"] == []


def test_json_is_one_document_and_the_log_goes_to_stderr(sandbox: Any) -> None:
    script = sandbox.script(STEPS + "print('hello from', context.rank)")
    done = sandbox.run("kfp-elastic", "run", "--json", "--nodes", "2", script, "--", "3")
    document = json.loads(done.stdout)
    assert document["schema"] == 1
    assert document["state"] == "succeeded"
    assert document["handle"].startswith("local_cwd://")
    assert "[rank0] hello from 0" in done.stderr
    assert "[rank1] hello from 1" in done.stderr


def test_a_sigkilled_worker_costs_steps_since_the_checkpoint_and_no_more(sandbox: Any) -> None:
    done = sandbox.run(
        "kfp-elastic", "run", "--nodes", "1:2", "--state-dir", "job", EXAMPLE, "--", "--epochs", "3",
        env={"ELASTIC_FAULTS": "kill rank=1 step=25"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    record = record_of(sandbox.folder / "job")
    assert record["state"] == "succeeded"
    assert record["restarts"] == 1
    (recovery,) = record["recoveries"]
    assert recovery["cause"] == "rank 1: killed by SIGKILL"
    assert recovery["seconds"] > 0
    assert 0 <= recovery["steps_lost"] <= 10
    assert record["global_step"] == 87
    assert "resumed at step 20" in done.stdout
    assert (sandbox.folder / "job" / "output" / "config.json").is_file()


def test_the_result_is_the_same_with_and_without_a_kill_at_one_worker(sandbox: Any) -> None:
    import torch

    weights = []
    for number, faults in enumerate(("", "kill rank=0 step=25")):
        done = sandbox.run(
            "kfp-elastic", "run", "--state-dir", f"job{number}", EXAMPLE, "--", "--epochs", "2",
            env={"ELASTIC_FAULTS": faults},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        (newest,) = list((sandbox.folder / f"job{number}" / "checkpoints").glob("step-*50-*.pt"))
        weights.append(torch.load(newest, weights_only=True)["state"]["net"])
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


def test_torchx_run_survives_a_kill(sandbox: Any) -> None:
    done = sandbox.run(
        "torchx", "run", "-s", "local_cwd", "elastic.ddp", "-j", "1:3x1", "--state_dir", "job", "--script", EXAMPLE,
        "--", "--epochs", "2", env={"ELASTIC_FAULTS": "kill rank=2 step=12"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    record = record_of(sandbox.folder / "job")
    assert (record["state"], record["restarts"], record["world_size"]) == ("succeeded", 1, 3)


def test_torchx_lists_ours_and_its_own_components_and_schedulers(sandbox: Any) -> None:
    listed = sandbox.run("torchx", "builtins").stdout
    for component in ("elastic.ddp", "dist.ddp", "dist.torchrun", "utils.echo", "utils.sh"):
        assert component in listed
    offered = sandbox.run("torchx", "run", "--help").stdout
    for scheduler in ("local_cwd", "local_docker", "slurm", "kubernetes"):
        assert scheduler in offered
    assert sandbox.run("torchx", "run", "-s", "local_cwd", "utils.echo", "--msg", "hi").returncode == 0


@pytest.mark.parametrize("j", ["3:2x1", "0x1", "2x0", "x"])
def test_torchx_run_names_a_wrong_j_in_one_message(sandbox: Any, j: str) -> None:
    done = sandbox.run("torchx", "run", "-s", "local_cwd", "elastic.ddp", "-j", j, "--script", EXAMPLE)
    assert done.returncode != 0
    assert f"-j '{j}'" in done.stderr
    assert "Traceback" not in done.stderr


BAD = [
    (["--nodes", "3:2", EXAMPLE], "--nodes '3:2'"),
    (["nope.py"], "'nope.py' not found"),
    (["-m", "no.such.module"], "'no.such.module' not found"),
    (["--nproc-per-node", "0", EXAMPLE], "--nproc-per-node '0'"),
    (["--max-restarts", "-1", EXAMPLE], "--max-restarts -1"),
    (["--name", "a_b", EXAMPLE], "--name 'a_b'"),
    (["--scheduler", "local_cw", EXAMPLE], "did you mean 'local_cwd'"),
    (["--scheduler-arg", "log_di=x", EXAMPLE], "did you mean 'log_dir'"),
    (["--env", "A-B=1", EXAMPLE], "'A-B'"),
    (["--env", "AB", EXAMPLE], "--env 'AB'"),
    (["--state-dir", "s3://bucket/x", EXAMPLE], "--state-dir"),
    ([EXAMPLE, "--epochs"], "come after --"),
    (["--no-such-option", EXAMPLE], "--no-such-option"),
    ([], "no program given"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_wrong_input_is_one_error_and_exit_code_2(sandbox: Any, words: list[str], message: str) -> None:
    done = sandbox.run("kfp-elastic", "run", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((sandbox.folder / "state").glob("**/record.json"))


def test_a_syntax_error_is_found_before_anything_starts(sandbox: Any) -> None:
    done = sandbox.run("kfp-elastic", "run", sandbox.script("x = 1\nif x\n"))
    assert done.returncode == 2
    assert "train.py, line 2: SyntaxError" in done.stderr


def test_an_exception_at_the_same_step_stops_the_job_after_the_second_time(sandbox: Any) -> None:
    script = sandbox.script("raise ValueError('wrong shape')")
    done = sandbox.run("kfp-elastic", "run", "--nodes", "2", "--state-dir", "job", script)
    assert done.returncode == 1
    record = record_of(sandbox.folder / "job")
    assert record["state"] == "failed"
    assert "ValueError: wrong shape" in record["reason"]
    assert len(events_of(sandbox.folder / "job", "round")) == 2
    assert record["reason"] in done.stdout


def test_the_budget_ends_a_job_that_keeps_dying(sandbox: Any) -> None:
    script = sandbox.script(
        "import os\nfrom elastic_runtime import worker\nprint('round', worker.context().round)\nos._exit(3)"
    )
    done = sandbox.run("kfp-elastic", "run", "--max-restarts", "1", "--state-dir", "job", script)
    assert done.returncode == 1
    record = record_of(sandbox.folder / "job")
    assert "exit code 3" in record["reason"]
    assert record["restarts"] == 1
    assert "round 1" in done.stdout
    assert "round 2" not in done.stdout


def test_a_killed_agent_and_a_killed_store_are_survived(sandbox: Any, wait: Callable[..., Any]) -> None:
    script = sandbox.script("""
import os, pathlib, time, torch.distributed as dist, torch
from elastic_runtime import worker
dist.init_process_group("gloo")
step = 0
while not pathlib.Path("finish").exists() or step < 5:
    flag = torch.tensor([float(pathlib.Path("finish").exists())])
    dist.all_reduce(flag)
    step += 1
    worker.log(step=step)
    if flag.item() and step >= 5:
        break
    time.sleep(0.01)
# Without this, who ends last may find its peer gone and abort: then that is a failure, and charged.
dist.barrier()
dist.destroy_process_group()
""")
    folder = sandbox.folder / "job"
    process = sandbox.start("kfp-elastic", "run", "--nodes", "1:2", "--state-dir", "job", script)
    wait(lambda: (folder / "metrics.jsonl").exists(), what="a first step")
    os.kill(events_of(folder, "agent")[0]["pid"], signal.SIGKILL)
    wait(lambda: len(events_of(folder, "recovered")) == 1, what="recovery from the lost agent")
    (store,) = [pid for pid, command in sandbox.processes() if "store_host" in command]
    os.kill(store, signal.SIGKILL)
    os.kill(workers_of(folder)[0], signal.SIGKILL)
    wait(lambda: len(events_of(folder, "recovered")) == 2, what="recovery from the lost store")
    (sandbox.folder / "finish").touch()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    record = record_of(folder)
    told = [event["text"] for event in record["events"] if "text" in event]
    assert record["restarts"] == 1, f"a lost node is not charged: {told}"
    assert [recovery["cause"] for recovery in record["recoveries"]] == [
        "node 0 lost",
        "rank 0: killed by SIGKILL",
    ]


def test_a_live_name_is_refused_and_free_again_after_the_end(sandbox: Any, wait: Callable[..., Any]) -> None:
    script = sandbox.script(SLEEPER)
    first = sandbox.start("kfp-elastic", "run", "--name", "twice", script)
    folder = sandbox.folder / "state" / "kfp-elastic" / "jobs" / "twice"
    wait(lambda: workers_of(folder))
    second = sandbox.run("kfp-elastic", "run", "--name", "twice", script)
    assert second.returncode == 2
    assert "job 'twice' is running" in second.stderr
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=30)
    assert first.returncode == 130
    assert record_of(folder)["state"] == "stopped"
    assert (
        sandbox.run(
            "kfp-elastic", "run", "--name", "twice", sandbox.script(STEPS, "other.py"), "--", "2"
        ).returncode
        == 0
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("delay", [0.0, 0.1, 0.3, 0.5, 0.8, None])
def test_the_end_of_the_launcher_at_any_moment_leaves_no_process(
    sandbox: Any, wait: Callable[..., Any], number: signal.Signals, delay: float | None
) -> None:
    script = sandbox.script(SLEEPER)
    process = sandbox.start("kfp-elastic", "run", "--nodes", "2", "--state-dir", "job", script)
    if delay is None:
        wait(lambda: len(workers_of(sandbox.folder / "job")) == 2)
    else:
        # The moment itself is the input here, not a wait for something.
        time.sleep(delay * random.uniform(0.8, 1.2))
    process.send_signal(number)
    process.communicate(timeout=30)
    if number == signal.SIGINT and delay is None:
        assert process.returncode == 130
    sandbox.assert_no_process_left()


def test_torchx_killed_leaves_no_process(sandbox: Any, wait: Callable[..., Any]) -> None:
    script = sandbox.script(SLEEPER)
    process = sandbox.start(
        "torchx",
        "run",
        "-s",
        "local_cwd",
        "elastic.ddp",
        "-j",
        "2x1",
        "--state_dir",
        "job",
        "--script",
        script,
    )
    wait(lambda: len(workers_of(sandbox.folder / "job")) == 2)
    process.kill()
    process.communicate()
    sandbox.assert_no_process_left()


def test_workers_that_ignore_sigterm_and_their_children_are_killed_too(
    sandbox: Any, wait: Callable[..., Any]
) -> None:
    script = sandbox.script("""
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["setsid", "sleep", "600"])
subprocess.Popen(["sleep", "600"])
print("ready", flush=True)
time.sleep(600)
""")
    process = sandbox.start("kfp-elastic", "run", "--grace", "0.5", "--state-dir", "job", script)
    log = sandbox.folder / "job" / "logs" / "rank-0.log"
    wait(lambda: log.exists() and "ready" in log.read_text())
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130


def test_every_byte_is_in_the_log_file_and_in_the_stream(sandbox: Any) -> None:
    script = sandbox.script("""
import os, pathlib, signal, sys, time
for number in range(10_000):
    print("line", number)
sys.stdout.write("no newline")
if os.environ["RANK"] == "0":
    pathlib.Path("rank 0 is done").touch()
else:
    while not pathlib.Path("rank 0 is done").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
""")
    done = sandbox.run(
        "kfp-elastic", "run", "--nodes", "2", "--max-restarts", "0", "--state-dir", "job", script
    )
    expected = [f"line {number}" for number in range(10_000)] + ["no newline"]
    for rank in range(2):
        assert (sandbox.folder / "job" / "logs" / f"rank-{rank}.log").read_text() == "\n".join(expected)
        streamed = [
            line.removeprefix(f"[rank{rank}] ")
            for line in done.stdout.splitlines()
            if line.startswith(f"[rank{rank}]")
        ]
        assert streamed == expected


def test_scripts_run_as_under_python(sandbox: Any) -> None:
    """A folder of the user's own with our name, helpers beside the script, spaces and unicode in the path."""
    home = sandbox.folder / "mein Ordner ü"
    sandbox.script("value = 'theirs'", "mein Ordner ü/elastic_runtime/__init__.py")
    sandbox.script("value = 'their component'", "mein Ordner ü/components/__init__.py")
    sandbox.script("value = 'helper'", "mein Ordner ü/helper.py")
    script = sandbox.script(
        """
import argparse, os, sys
import components, elastic_runtime, helper
parser = argparse.ArgumentParser(); parser.add_argument("--word"); parser.add_argument("rest", nargs="*")
given = parser.parse_args()
if __name__ == "__main__":
    print(components.value, elastic_runtime.value, helper.value, given.word, given.rest, os.path.abspath(sys.argv[0]) == __file__)
""",
        "mein Ordner ü/mit Leerzeichen.py",
    )
    done = sandbox.run(
        "kfp-elastic", "run", script.name, "--", "--word", "$HOME ${x} ä b", "--", "--tail", "", cwd=home
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[rank0] their component theirs helper $HOME ${x} ä b ['--tail', ''] True" in done.stdout


def test_a_module_runs_as_under_python_m(sandbox: Any) -> None:
    sandbox.script("", "package/__init__.py")
    sandbox.script("from . import part\nprint('module', part.name, __name__, __package__)", "package/tool.py")
    sandbox.script("name = 'part'", "package/part.py")
    # As with python -m, the current folder is where modules are looked for.
    done = sandbox.run("kfp-elastic", "run", "-m", "package.tool")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[rank0] module part __main__ package" in done.stdout


def test_workers_get_torchruns_environment(sandbox: Any) -> None:
    script = sandbox.script("""
import json, os
names = ("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE "
         "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS").split()
print("ENV", json.dumps({name: int(os.environ[name]) for name in names}), flush=True)
assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"]) > 0 and os.environ["TORCHELASTIC_RUN_ID"]
""")
    done = sandbox.run("kfp-elastic", "run", "--nodes", "2", "--nproc-per-node", "2", "--env", "X=5", script)
    assert done.returncode == 0, done.stdout
    found = sorted((json.loads(line.partition("ENV ")[2]) for line in done.stdout.splitlines() if "ENV " in line), key=lambda each: each["RANK"])  # fmt: skip
    assert [each["RANK"] for each in found] == [0, 1, 2, 3]
    assert [each["LOCAL_RANK"] for each in found] == [0, 1, 0, 1]
    assert [each["GROUP_RANK"] for each in found] == [0, 0, 1, 1]
    assert {(each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"], each["GROUP_WORLD_SIZE"]) for each in found} == {
        (4, 2, 2)
    }


def test_two_jobs_at_once_do_not_meet(sandbox: Any) -> None:
    script = sandbox.script(STEPS)
    both = [
        sandbox.start("kfp-elastic", "run", "--nodes", "2", "--json", script, "--", "50") for _ in range(2)
    ]
    documents = []
    for process in both:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        documents.append(json.loads(out))
    assert documents[0]["name"] != documents[1]["name"]
    assert {document["global_step"] for document in documents} == {50}


def test_the_same_job_goes_on_from_its_checkpoints_and_a_finished_one_starts_anew(sandbox: Any) -> None:
    words = ["kfp-elastic", "run", "--name", "again", "--max-restarts", "0", EXAMPLE, "--", "--epochs", "2"]
    failed = sandbox.run(*words, env={"ELASTIC_FAULTS": "kill rank=0 step=35"})
    assert failed.returncode == 1
    resumed = sandbox.run(*words)
    assert resumed.returncode == 0, resumed.stdout
    assert "resumed at step 30" in resumed.stdout
    anew = sandbox.run(*words)
    assert "starting anew" in anew.stdout
    assert "resumed" not in anew.stdout


def test_help_is_light(sandbox: Any) -> None:
    code = (
        "import sys\nfrom kfp_elastic.pipelines.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'kfp', 'pandas', 'numpy', 'torchx', 'kubernetes', 'sklearn'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    done = sandbox.run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert "run" in done.stdout


def test_supervisor_and_agents_do_not_load_torch(sandbox: Any) -> None:
    code = (
        "import sys\nimport elastic_runtime.supervisor.job, elastic_runtime.agent.__main__\n"
        "import elastic_runtime.processes.guard, elastic_runtime.launching.launcher\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert sandbox.run(sys.executable, "-c", code).returncode == 0
