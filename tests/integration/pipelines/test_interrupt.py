"""A run that is stopped at any moment leaves no process behind."""

import json
import os
import random
import signal
import subprocess
import uuid

import pytest

SEEDS = range(10)


def start(command, **parameters):
    """Start a run that would take minutes; return it and the mark of its processes."""
    mark = f"kfp_elastic_test_{uuid.uuid4().hex}"
    given = [part for key, value in parameters.items() for part in ("-p", f"{key}={value}")]
    process = command.start(
        "run",
        command.package,
        "--local",
        "--json",
        "-p",
        "seconds=300",
        *given,
        env={**os.environ, "KFP_ELASTIC_TEST_MARK": mark},
        start_new_session=True,
    )
    return process, mark


def wait_for_stray(process):
    """Wait until the step's grandchild has left its session; the line comes from itself."""
    for line in process.stderr:
        if "stray ready" in line:
            return
    pytest.fail("the step did not start")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("whole_group", [False, True], ids=["process", "group"])
def test_ctrl_c_at_a_random_moment(command, marked, seed, whole_group):
    process, mark = start(command)
    moment = random.Random(f"{seed}{whole_group}").uniform(0.15, 2.5)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=moment)
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert marked(mark) == {}
    assert process.returncode == 130, err
    assert "Traceback" not in err
    if out:
        assert json.loads(out)["error"].startswith("interrupted")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_running_step_is_stopped_with_all_below_it(command, marked, number):
    process, mark = start(command)
    wait_for_stray(process)
    assert len(marked(mark)) >= 5
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert marked(mark) == {}
    assert process.returncode == 130
    document = json.loads(out)
    assert (document["status"], document["error"]) == ("failed", "interrupted in step make")
    assert document["steps"][0]["status"] == "interrupted"
    page = (command.folder / "runs" / "throwaway" / "latest" / "index.html").read_text()
    assert "interrupted in step make" in page


def test_two_signals_are_no_harm(command, marked):
    process, mark = start(command)
    wait_for_stray(process)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert marked(mark) == {}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_command_leaves_nothing(command, marked, wait_until, seed):
    process, mark = start(command)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=random.Random(seed).uniform(0.0, 2.5))
    process.kill()
    process.communicate(timeout=30)
    assert wait_until(lambda: not marked(mark), 5), marked(mark)


def test_the_folder_of_a_killed_run_is_removed_by_the_next(command, tmp_path, marked, wait_until):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    mark = f"kfp_elastic_test_{uuid.uuid4().hex}"
    environment = {**os.environ, "TMPDIR": str(temporary), "KFP_ELASTIC_TEST_MARK": mark}
    process = command.start("run", command.package, "--local", "-p", "seconds=300", env=environment)
    wait_for_stray(process)
    process.kill()
    process.communicate(timeout=30)
    assert wait_until(lambda: not marked(mark), 5)
    assert len(list(temporary.iterdir())) == 1
    ran = command("run", command.package, "--local", env={"TMPDIR": str(temporary)})
    assert ran.code == 0, ran.err
    assert list(temporary.iterdir()) == []
