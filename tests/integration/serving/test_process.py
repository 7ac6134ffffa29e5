"""The server as a process: it says when it answers, why it does not start, and nothing of it is left."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from elastic_runtime.errors import InputError, JobFailed, MissingFileError
from elastic_runtime.models import load_model
from elastic_runtime.serving import start_server
from elastic_runtime.serving.client import Client, output_array, request_document

COMMAND = [sys.executable, "-m", "elastic_runtime.serving"]


def ask(url: str, name: str, model_folder: Path) -> bool:
    model = load_model(model_folder)
    rows = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    with Client(url, name) as client:
        served = output_array(client.infer(request_document(model.config, rows)), "logits")
    return bool(np.allclose(served, model.predict(rows), atol=1e-5))


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_the_command_says_where_it_serves_and_ends_when_told_to(
    sandbox: Any, model_folder: Path, signum: signal.Signals, code: int
) -> None:
    process = sandbox.start(*COMMAND, "--model", model_folder, "--name", "digits", "--port", "0")
    line = process.stdout.readline().strip()
    assert line.startswith("serving digits at http://127.0.0.1:")
    url = line.rpartition(" ")[2]
    assert ask(url, "digits", model_folder)
    # An open connection that asks nothing must not hold up the end.
    idle = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    idle.request("GET", "/v2/health/live")
    idle.getresponse().read()
    begin = time.monotonic()
    process.send_signal(signum)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert time.monotonic() - begin < 10
    assert (out, err) == ("", "")
    idle.close()


def test_requests_in_progress_are_finished_before_the_end(sandbox: Any, model_folder: Path) -> None:
    process = sandbox.start(*COMMAND, "--model", model_folder, "--port", "0")
    url = process.stdout.readline().strip().rpartition(" ")[2]
    config = load_model(model_folder).config
    body = json.dumps(request_document(config, np.zeros((20_000, 64), np.float32))).encode()
    answers: list[int] = []
    sent = threading.Event()

    def call() -> None:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
        connection.putrequest("POST", "/v2/models/model/infer")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        connection.send(body[:1000])
        sent.set()
        connection.send(body[1000:])
        response = connection.getresponse()
        answers.append(response.status if len(response.read()) > 100_000 else 0)
        connection.close()

    caller = threading.Thread(target=call)
    caller.start()
    assert sent.wait(10)
    # The server has taken the connection as soon as it answers one that came later.
    later = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    later.request("GET", "/v2/health/live")
    assert later.getresponse().read() == b'{"live":true}'
    later.close()
    process.send_signal(signal.SIGTERM)
    caller.join(30)
    process.communicate(timeout=30)
    assert answers == [200]
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "MODEL", "--port", "BUSY"],
            "error: port=BUSY is in use on 127.0.0.1: give another, or 0",
        ),
        (["--model", "MODEL", "--port", "70000"], "error: port=70000 is not a port"),
        (["--model", "MODEL", "--port", "x"], "error: argument --port: invalid int value: 'x'"),
        (["--model", "MODEL", "--name", "Bad_Name"], "error: name='Bad_Name' is not a DNS label"),
        (["--model", "MODEL", "--name", "a" * 64], "is not a DNS label"),
        (["--model", "MODEL", "--host", "203.0.113.9"], "error: port=0 cannot be opened on '203.0.113.9'"),
        (["--model", "nowhere"], "error: no model in 'nowhere': the folder does not exist"),
        (["--mod", "MODEL"], "error: the following arguments are required: --model"),
        ([], "error: the following arguments are required: --model"),
    ],
)
def test_wrong_arguments_end_at_once_with_2(
    sandbox: Any, model_folder: Path, arguments: list[str], message: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        words = [word.replace("MODEL", str(model_folder)).replace("BUSY", port) for word in arguments]
        done = sandbox.run(*COMMAND, *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message.replace("BUSY", port) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_damaged_model_is_not_served(tmp_path: Path, sandbox: Any, model_folder: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model_folder, copy)
    (copy / "model.pt2").write_bytes(b"x")
    done = sandbox.run(*COMMAND, "--model", copy)
    assert done.returncode == 1
    assert "model.pt2 (1 bytes) has sha256" in done.stderr
    with pytest.raises(JobFailed, match=r"model\.pt2 \(1 bytes\) has sha256"):
        start_server(copy, name="digits")


def test_start_server_checks_before_it_starts(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(InputError, match="name='A'"):
        start_server(model_folder, name="A")
    with pytest.raises(InputError, match="port=-1"):
        start_server(model_folder, name="a", port=-1)
    with pytest.raises(MissingFileError, match=r"config\.json is missing"):
        start_server(tmp_path, name="a")
    with pytest.raises(InputError, match="log_file=None"):
        start_server(model_folder, name="a", detached=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="log_file="):
        start_server(model_folder, name="a", log_file=tmp_path / "file" / "log")


@pytest.mark.parametrize("detached", [False, True])
def test_a_port_in_use(tmp_path: Path, model_folder: Path, detached: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(InputError, match=f"port={port} is in use"):
            start_server(model_folder, name="a", port=port, detached=detached, log_file=tmp_path / "log")


def test_a_server_that_dies_early_shows_its_log(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kserve that cannot be imported, as after a broken upgrade."""
    (tmp_path / "kserve").mkdir()
    (tmp_path / "kserve" / "__init__.py").write_text("raise OSError('libbroken.so is missing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(
        JobFailed, match=r"(?s)ended before it answered \(exit code 1\).*libbroken\.so is missing"
    ):
        start_server(model_folder, name="a")


@pytest.mark.parametrize("detached", [False, True])
def test_a_server_that_does_not_answer_in_time_is_gone(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, sandbox: Any, detached: bool
) -> None:
    (tmp_path / "kserve").mkdir()
    (tmp_path / "kserve" / "__init__.py").write_text("import time; time.sleep(600)")
    for name, value in sandbox.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(JobFailed, match="did not answer within 2 s"):
        start_server(model_folder, name="a", patience=2, detached=detached, log_file=tmp_path / "log")
    sandbox.assert_no_process_left()


def test_stopping_kills_a_server_that_hangs(model_folder: Path) -> None:
    server = start_server(model_folder, name="digits")
    os.kill(server.pid, signal.SIGSTOP)
    begin = time.monotonic()
    server.stop(patience=0.2)
    assert time.monotonic() - begin < 10
    assert not Path(f"/proc/{server.pid}").exists()
    assert not server.alive
    server.stop()


def test_the_server_dies_with_who_started_it(
    sandbox: Any, model_folder: Path, wait: Callable[..., Any]
) -> None:
    script = sandbox.script(
        """
import sys, time
from elastic_runtime.serving import start_server
server = start_server(sys.argv[1], name="digits")
print(server.pid, flush=True)
time.sleep(600)
"""
    )
    process = sandbox.start(sys.executable, script, model_folder)
    pid = int(process.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    process.kill()
    process.communicate()
    wait(lambda: not Path(f"/proc/{pid}").exists(), timeout=5, what="the end of the server")


def test_a_detached_server_outlives_its_starter(sandbox: Any, model_folder: Path) -> None:
    script = sandbox.script(
        """
import json, sys
from elastic_runtime.serving import start_server
server = start_server(sys.argv[1], name="digits", detached=True, log_file=sys.argv[2])
print(json.dumps([server.pid, server.url]))
server.release()
"""
    )
    log = sandbox.folder / "logs" / "server.log"
    done = sandbox.run(sys.executable, "-W", "error", script, model_folder, log)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    pid, url = json.loads(done.stdout)
    try:
        assert os.getsid(pid) == pid
        assert ask(url, "digits", model_folder)
        assert log.read_text().splitlines()[0] == f"serving digits at {url}"
    finally:
        pidfd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGTERM)
        import select

        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(10_000)
        os.close(pidfd)


def test_without_kserve_the_extra_is_named(sandbox: Any, model_folder: Path) -> None:
    """In an interpreter whose finders do not find kserve, as where the extra is not installed."""
    script = sandbox.script(
        """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "kserve" else find(name, *rest)
from elastic_runtime.serving.server import main
sys.exit(main(["--model", sys.argv[1]]))
"""
    )
    done = sandbox.run(sys.executable, script, model_folder)
    assert done.returncode == 2
    assert "kserve is not installed: pip install 'kfp-elastic[serve]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_starting_needs_neither_kserve_nor_torch_in_this_process() -> None:
    code = (
        "import sys; from elastic_runtime.serving import start_server, package_model;"
        "print(sorted({'torch', 'kserve', 'fastapi', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
