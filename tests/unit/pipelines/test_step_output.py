"""What steps print: kfp's noise left out, nothing else, and the error that ended a step."""

import io
import threading

import pytest

from kfp_elastic.pipelines.step_output import StepLog, StepOutput, readable

PREFIX = "[KFP Executor 2026-12-01 14:13:16,468 INFO]: "
DUMP = [f"{PREFIX}Got executor_input:", "{", '    "inputs": {', "    }", "}"]


def read(lines):
    file = io.StringIO()
    log = StepLog(file)
    shown = [shown for line in lines for shown in log.read(line)] + log.end()
    assert readable(lines) == shown
    return log, shown, file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (["plain"], ["plain"]),
        (["", "  "], []),
        ([f"{PREFIX}Looking for component `one` in"], []),
        ([f"{PREFIX}Wrote executor output file to /x."], []),
        ([*DUMP, "after"], ["after"]),
        ([*DUMP, *DUMP, "after"], ["after"]),
        ([f"{PREFIX}rows: 5"], ["rows: 5"]),
        (["[KFP Executor 2026 WARNING]: careful"], ["WARNING: careful"]),
        (["[KFP Executor 2026 ERROR]: Got executor_input is bad"], ["ERROR: Got executor_input is bad"]),
        (["}", "{", '    "inputs"'], ["}", "{", '    "inputs"']),
    ],
)
def test_noise_is_left_out_and_nothing_else(lines, shown):
    _, got, written = read(lines)
    assert got == shown
    assert written == [line.rstrip("\n") for line in lines], "the file has everything"


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([], "exit code 1; it printed nothing"),
        (["working", "Killed"], "exit code 1; its last line: Killed"),
        (
            [
                "Traceback (most recent call last):",
                '  File "x", line 1',
                "    f()",
                "ValueError: bad rows 1, 2",
            ],
            "ValueError: bad rows 1, 2",
        ),
        (
            ["Traceback (most recent call last):", "  f()", "elastic_runtime.errors.DataError: column x"],
            "DataError: column x",
        ),
        (
            ["Traceback (most recent call last):", "  f()", "ValueError: first", "second line"],
            "ValueError: first\nsecond line",
        ),
        (
            [
                "Traceback (most recent call last):",
                "  f()",
                "KeyError: 'a'",
                "",
                "During handling of the above exception, another exception occurred:",
                "",
                "Traceback (most recent call last):",
                "  g()",
                "a.b.InputError: the cause people need",
            ],
            "InputError: the cause people need",
        ),
        (["Traceback (most recent call last):", "  f()", "KeyboardInterrupt"], "KeyboardInterrupt"),
        (["Traceback (most recent call last):", "  cut off"], "exit code 1; its last line: cut off"),
    ],
)
def test_the_error_that_ended_a_step(lines, error):
    log, _, _ = read(lines)
    assert log.error() == error


def test_lines_are_named_by_step_and_separators_left_out(tmp_path):
    target = io.StringIO()
    output = StepOutput(target)
    with output.step("train", tmp_path / "logs" / "train.log"):
        output.step_line("loss 0.5")
        output.step_line("----")
        output.step_line("")
        print("\n", file=output)
        print("-" * 80, file=output)
    print("from", "outside", file=output)
    assert target.getvalue().splitlines() == ["train | loss 0.5", "train | ----", "from outside"]
    assert (tmp_path / "logs" / "train.log").read_text() == "loss 0.5\n----\n\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (3, "exit code 3"),
        (137, "killed by SIGKILL"),
        (143, "killed by SIGTERM"),
        (228, "killed by signal 100"),
    ],
)
def test_how_a_step_ended_that_did_not_say_why(code, said):
    log, _, _ = read(["epoch 3"])
    assert log.error(code) == f"{said}; its last line: epoch 3"


def test_steps_in_parallel_are_told_apart(tmp_path):
    target = io.StringIO()
    output = StepOutput(target)
    together = threading.Barrier(2)

    def step(name):
        with output.step(name, tmp_path / name):
            for i in range(50):
                together.wait(10)
                output.step_line(f"{name} {i}")

    threads = [threading.Thread(target=step, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = target.getvalue().splitlines()
    for name in ("a", "b"):
        assert [line for line in lines if line.startswith(name)] == [
            f"{name} | {name} {i}" for i in range(50)
        ]


CAUSE = [
    "Traceback (most recent call last):",
    '  File "x", line 1',
    "KeyError: 'a'",
    "",
    "The above exception was the direct cause of the following exception:",
    "",
]
OURS = [
    "Traceback (most recent call last):",
    "  f()",
    "    ^^^",
    "elastic_runtime.errors.DataError: column x",
]
OTHER = ["Traceback (most recent call last):", "  f()", "ValueError: bad"]


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (["a", *OURS], ["a", "DataError: column x"]),
        (["a", *OURS, "second line", "b"], ["a", "DataError: column x", "second line", "b"]),
        ([*CAUSE, *OURS], ["DataError: column x"]),
        (["a", *OTHER, "b"], ["a", *OTHER, "b"]),
        ([*CAUSE, *OTHER], [line for line in [*CAUSE, *OTHER] if line]),
        (
            [*OURS, "", "During handling of the above exception, another exception occurred:", "", *OTHER],
            [*OURS, "During handling of the above exception, another exception occurred:", *OTHER],
        ),
        ([*OTHER, *OURS], [*OTHER, "DataError: column x"]),
        ([*OURS, *OURS], ["DataError: column x", "DataError: column x"]),
        (OTHER[:2], OTHER[:2]),
        ([*OTHER[:1], "between", "after"], [*OTHER[:1], "between", "after"]),
        (
            ["rank 0 | Traceback (most recent call last):", "b"],
            ["rank 0 | Traceback (most recent call last):", "b"],
        ),
    ],
)
def test_the_traceback_of_an_error_of_ours_is_left_out_and_no_other(lines, shown):
    _, got, written = read(lines)
    assert got == shown
    assert written == lines, "the file has everything"


def test_what_is_held_back_is_shown_when_the_step_ends(tmp_path):
    target = io.StringIO()
    output = StepOutput(target)
    with output.step("train", tmp_path / "train.log"):
        for line in OTHER:
            output.step_line(line)
    assert target.getvalue().splitlines() == [f"train | {line}" for line in OTHER]


def test_a_traceback_without_an_end_is_not_held_for_ever():
    log = StepLog(io.StringIO())
    assert any(log.read(line) for line in [OTHER[0], *["  f()"] * 3000])
