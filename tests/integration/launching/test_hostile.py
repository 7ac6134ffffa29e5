"""Folders, scripts and surroundings that nobody would wish for: the exit code and the reason stay true."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

STEPS = "from elastic_runtime import worker\nworker.log(step=1)\nprint('worked')\n"


def run(sandbox: Any, script: str, *options: str, **more: Any) -> Any:
    return sandbox.run(
        "kfp-elastic", "run", "--json", "--state-dir", "job", *options, sandbox.script(script), **more
    )


def reason(done: Any) -> str:
    return str(json.loads(done.stdout)["reason"])


# --- the record is of this run -----------------------------------------------------------------------------------


def test_a_run_whose_supervisor_never_came_up_is_no_success_of_the_run_before(sandbox: Any) -> None:
    assert run(sandbox, STEPS).returncode == 0
    done = run(sandbox, STEPS, "--env", "PYTHONHOME=/nonexistent")
    assert done.returncode == 1
    assert "left no record" in reason(done)


def test_of_two_jobs_at_once_in_one_folder_one_is_refused(sandbox: Any) -> None:
    script = sandbox.script(STEPS + "import time\ntime.sleep(2)")
    both = [sandbox.start("kfp-elastic", "run", "--json", "--state-dir", "job", script) for _ in range(2)]
    ends = [(*process.communicate(timeout=60), process.returncode) for process in both]
    codes = sorted(code for _, _, code in ends)
    assert codes[0] == 0, ends
    assert codes[1] in (1, 2), ends
    (refused,) = [err for _, err, code in ends if code]
    assert "is running" in refused


# --- folders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("job.json", "garbage"),
        ("job.json", "[1]"),
        ("job.json", '{"schema": 7}'),
        ("record.json", "garbage"),
        ("record.json", b"\xff\xfe"),
        ("events.jsonl", "mine"),
        ("metrics.jsonl", '{"loss": 1}'),
        ("logs/experiment.log", "mine"),
        ("lock/", ""),
        ("logs", "a file"),
    ],
)
def test_a_folder_that_is_not_ours_is_refused_and_left_as_it_was(
    sandbox: Any, name: str, content: str | bytes
) -> None:
    path = sandbox.folder / "job" / name
    if name.endswith("/"):
        path.mkdir(parents=True)
    else:
        path.parent.mkdir(parents=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    done = run(sandbox, STEPS)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error:") == 1
    assert "state folder" in done.stderr
    assert "Traceback" not in done.stderr
    assert path.exists()
    if path.is_file():
        assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())


def test_garbage_after_our_own_events_and_metrics_does_no_harm(sandbox: Any) -> None:
    script = """
import os, pathlib
from elastic_runtime import worker
worker.log(step=1)
with pathlib.Path(os.environ["ELASTIC_JOB_DIR"], "metrics.jsonl").open("ab") as file:
    file.write(b'[1]\\n"x"\\n{"step": [2], "time": 1}\\n{"step": 3, "time": "now", "round": 0}\\n\\xff\\x00\\n{"step": 1e999}\\n')
    file.write(b'{"step": 9, "time": 1, "round": 0}\\n')
"""
    done = run(sandbox, script)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["global_step"] == 1


@pytest.fixture
def small_disk(sandbox: Any) -> Iterator[Path]:
    folder = sandbox.folder / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], check=False).returncode:
        pytest.skip("no right to mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_fails_the_job_with_that_reason(sandbox: Any, small_disk: Path) -> None:
    script = "print('x' * 1000, flush=True)\n" * 400
    done = sandbox.run(
        "kfp-elastic",
        "run",
        "--json",
        "--max-restarts",
        "1",
        "--state-dir",
        small_disk / "job",
        sandbox.script(script),
    )
    assert done.returncode == 1, done.stderr
    assert "No space left" in reason(done) or "is full" in reason(done)


def test_a_folder_that_cannot_be_written_is_one_error(sandbox: Any, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for words, env in (
        (["--state-dir", str(small_disk / "job")], {}),
        (["--state-dir", str(small_disk)], {}),
        ([], {"XDG_STATE_HOME": str(small_disk)}),
    ):
        done = sandbox.run("kfp-elastic", "run", *words, sandbox.script(STEPS), env=env)
        assert done.returncode == 2, done.stderr
        assert "Read-only file system" in done.stderr
        assert "Traceback" not in done.stderr


def test_spaces_unicode_and_dollars_in_the_state_folder(sandbox: Any) -> None:
    name = "mein $HOME ü ${x}"
    done = sandbox.run("kfp-elastic", "run", "--state-dir", name, sandbox.script(STEPS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((sandbox.folder / name / "record.json").read_text())["global_step"] == 1


# --- how scripts end ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import sys\nprint('start')\nsys.exit('no column price')", "no column price"),
        (
            "import argparse\nargparse.ArgumentParser().parse_args(['--x'])",
            "error: unrecognized arguments: --x",
        ),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("open('none')", "FileNotFoundError"),
    ],
)
def test_a_script_that_cannot_start_ends_the_job_after_the_second_time(
    sandbox: Any, script: str, words: str
) -> None:
    done = run(sandbox, script, "--nodes", "2")
    assert done.returncode == 1
    assert words in reason(done)
    assert "failed twice" in reason(done)
    assert json.loads(done.stdout)["restarts"] == 1


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("raise KeyboardInterrupt", "killed by SIGINT"),
        ("import os\nos.abort()", "killed by SIGABRT"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("import os\nos._exit(3)", "exit code 3"),
        ("import os\nfor fd in range(3): os.close(fd)\nos._exit(7)", "exit code 7"),
        ("raise SystemExit(5)", "exit code 5"),
    ],
)
def test_other_ends_are_named(sandbox: Any, script: str, words: str) -> None:
    done = run(sandbox, script, "--max-restarts", "0")
    assert done.returncode == 1
    assert words in reason(done)
    assert json.loads(done.stdout)["restarts"] == 0


def test_a_worker_that_ends_early_and_cleanly_is_named(sandbox: Any) -> None:
    script = """
import os, pathlib, sys, time
if os.environ["RANK"] == "1":
    sys.exit()
time.sleep(0.5)
raise RuntimeError("Connection closed by peer")
"""
    done = run(sandbox, script, "--nodes", "2")
    assert done.returncode == 1
    assert "rank 1 failed twice at step 0 with the same error: ended with exit code 0 while" in reason(done)


def test_one_rank_may_finish_long_before_the_others(sandbox: Any) -> None:
    done = run(sandbox, "import os, time\ntime.sleep(3 * int(os.environ['RANK']))", "--nodes", "2")
    assert (done.returncode, json.loads(done.stdout)["restarts"]) == (0, 0)


def test_spawned_processes_and_loaders_work_and_go_with_their_worker(
    sandbox: Any, wait: Callable[..., Any]
) -> None:
    script = """
import os, pathlib, signal, sys, time
import torch, torch.multiprocessing as mp
from torch.utils.data import DataLoader, TensorDataset

def child(number):
    print("spawned", number)

if __name__ == "__main__":
    mp.spawn(child, nprocs=2)
    loader = DataLoader(TensorDataset(torch.arange(8)), num_workers=2, persistent_workers=True)
    for batch in loader:
        pass
    print("loaded", flush=True)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run(sandbox, script)
    assert done.returncode == 0, done.stderr
    for words in ("spawned 0", "spawned 1", "loaded"):
        assert done.stderr.count(words) == 2
    assert json.loads(done.stdout)["restarts"] == 1


# --- input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT", "ELASTIC_OUTPUT_DIR"])
def test_variables_of_the_launcher_cannot_be_given(sandbox: Any, name: str) -> None:
    done = run(sandbox, STEPS, "--env", f"{name}=1")
    assert done.returncode == 2
    assert f"environment variable {name}" in done.stderr


@pytest.mark.parametrize("words", [["--env", "X=" + "x" * 130_990], ["--", "x" * 131_000]])
def test_what_just_fits_on_a_command_line_arrives(sandbox: Any, words: list[str]) -> None:
    script = sandbox.script(
        "import os, sys\nprint('LENGTH', len(os.environ.get('X', '')) + sum(map(len, sys.argv[1:])))"
    )
    options, arguments = (words, []) if words[0] == "--env" else ([], words)
    done = sandbox.run("kfp-elastic", "run", *options, script, *arguments)
    assert done.returncode == 0, done.stderr
    assert f"LENGTH {len(words[1].removeprefix('X='))}" in done.stdout


def test_what_does_not_fit_is_one_error(sandbox: Any) -> None:
    call = (
        "from elastic_runtime.launching.step import TrainOutputs, TrainRequest, train\nfrom pathlib import Path\n"
        "import sys\nfrom elastic_runtime.errors import InputError\n"
        "outputs = TrainOutputs(model=Path('m'), report=Path('r'), job_record=Path('j'), work_dir=Path('w'))\n"
        "for more in ({'hyperparameters': {'a': 'x' * 200_000}}, {'env': {'A': 'x' * 200_000}},\n"
        "             {'arguments': ['x' * 100_000] * 20}, {'arguments': ['\\ud800']}):\n"
        "    try:\n        train(TrainRequest(script='train.py', **more), outputs)\n"
        "    except InputError as error:\n        print('REFUSED', str(error)[:300])\n"
    )
    sandbox.script(STEPS)
    done = sandbox.run("python", "-c", call)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("REFUSED") == 4, done.stdout
    assert done.stdout.count("put it in a file") == 3
    assert "worked" not in done.stdout


# --- logs --------------------------------------------------------------------------------------------------------


def test_binary_garbage_and_endless_lines_pass(sandbox: Any) -> None:
    script = """
import os, sys
out = sys.stdout.buffer
out.write(b"\\xff\\xfe\\x00\\x1b[2J\\n" + bytes(range(256)) * 1000 + b"\\n")
out.write(b"x" * 20_000_000 + b"\\nlast line\\n")
"""
    done = sandbox.run(
        "kfp-elastic", "run", "--state-dir", "job", sandbox.script(script), env={"LC_ALL": "C"}
    )
    assert done.returncode == 0, done.stderr
    assert (sandbox.folder / "job" / "logs" / "rank-0.log").stat().st_size == 20_000_000 + 256_000 + 20
    assert done.stdout.count("x") >= 20_000_000
    assert "[rank0] last line" in done.stdout


def test_a_reader_that_goes_away_stops_the_job_quietly(sandbox: Any) -> None:
    script = sandbox.script("while True:\n    print('line', flush=True)\n")
    done = sandbox.run("sh", "-c", f"kfp-elastic run --state-dir job {script} | head -1; exit $?")
    assert "Traceback" not in done.stderr
    sandbox.assert_no_process_left()
    assert json.loads((sandbox.folder / "job" / "record.json").read_text())["state"] == "stopped"


@pytest.mark.parametrize(
    "env", [{"LC_ALL": "C", "LANG": "C"}, {"PYTHONIOENCODING": "ascii"}, {"TMPDIR": "/nonexistent"}]
)
def test_odd_surroundings(sandbox: Any, env: dict[str, str]) -> None:
    if "PYTHONIOENCODING" not in env:
        done = run(sandbox, "print('grün ✓')", env=env)
        assert done.returncode == 0, done.stderr
    done = sandbox.run(
        "kfp-elastic",
        "run",
        sandbox.script("import sys\nsys.stdout.buffer.write('grün ✓'.encode())"),
        env=env,
    )
    assert done.returncode == 0, done.stderr


def test_no_home_and_no_network_names(sandbox: Any) -> None:
    sandbox.environment.pop("HOME", None)
    script = sandbox.script("""
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("met", flush=True)
dist.destroy_process_group()
""")
    words = ["kfp-elastic", "run", "--nodes", "2", "--state-dir", "job", str(script)]
    inside = (
        "ip link set lo up 2>/dev/null || ifconfig lo up; hostname no.such.name.ip6.arpa; exec "
        + " ".join(words)
    )
    if subprocess.run(["unshare", "-n", "-u", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no right to make a network namespace")
    done = sandbox.run("unshare", "-n", "-u", "sh", "-c", inside)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("met") == 2


def test_many_nodes(sandbox: Any) -> None:
    done = run(sandbox, "import os\nprint('rank', os.environ['RANK'])", "--nodes", "50")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["world_size"] == 50


def test_a_torchxconfig_loses_against_the_command_line_and_a_broken_one_is_one_error(sandbox: Any) -> None:
    config = sandbox.folder / ".torchxconfig"
    config.write_text("[local_cwd]\nlog_dir = from_config\n")
    assert run(sandbox, STEPS, "--scheduler-arg", f"log_dir={sandbox.folder}/from_line").returncode == 0
    assert (sandbox.folder / "from_line").is_dir()
    assert not (sandbox.folder / "from_config").exists()
    assert run(sandbox, STEPS).returncode == 0
    assert (sandbox.folder / "from_config").is_dir()
    for text in ("no section here\n", "[local_cwd\n", "[local_cwd]\nlog_di = x\n"):
        config.write_text(text)
        done = run(sandbox, STEPS)
        assert done.returncode == 2, (text, done.stderr)
        assert ".torchxconfig" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_first_imports_run_is_no_success(
    sandbox: Any, wait: Callable[..., Any], number: signal.Signals
) -> None:
    process = sandbox.start("kfp-elastic", "run", sandbox.script(STEPS + "import time\ntime.sleep(600)"))
    wait(
        lambda: Path(f"/proc/{process.pid}/maps").read_bytes().count(b"libpython") or os.getpgid(process.pid)
    )
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode != 0
