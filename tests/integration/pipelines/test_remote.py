"""`pipeline run --host` against a real HTTP server that answers as the API server does and keeps the requests."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from elastic_runtime.errors import ElasticError
from kfp_elastic.pipelines import remote


class Api(ThreadingHTTPServer):
    """The part of the Kubeflow Pipelines v2beta1 API that a submission uses."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests = []
        self.answers = {}
        self.url = f"http://127.0.0.1:{self.server_port}"

    def posted(self, path):
        """Return the bodies that were posted to `path`."""
        return [body for method, where, body, _ in self.requests if (method, where) == ("POST", path)]


class Handler(BaseHTTPRequestHandler):
    """Answers with what the server was told to, or with what a healthy API server would say."""

    def do_GET(self):
        self._answer("GET")

    def do_POST(self):
        self._answer("POST")

    def log_message(self, *arguments):
        pass

    def _answer(self, method):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        parsed = json.loads(body) if body else None
        self.server.requests.append((method, path, parsed, dict(self.headers)))
        usual = {
            ("GET", "/apis/v2beta1/healthz"): (200, {"multi_user": False}),
            ("GET", "/apis/v2beta1/experiments"): (200, {"experiments": []}),
            ("POST", "/apis/v2beta1/experiments"): (200, {"experiment_id": "e1", "display_name": "Default"}),
            ("POST", "/apis/v2beta1/runs"): (200, {"run_id": "r-42", "experiment_id": "e1"}),
        }
        told = self.server.answers.get((method, path), usual.get((method, path), (404, {"error": "no"})))
        if isinstance(told, threading.Event):
            told.wait(60)
            self.close_connection = True
            return
        code, document = told
        text = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def api():
    """A running API server."""
    with Api() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_submission_carries_the_pipeline_and_its_parameters(command, api):
    ran = command(
        "run",
        "digits",
        "--host",
        api.url + "/",
        "--json",
        "-p",
        "epochs=7",
        "-p",
        "lr=1",
        "--experiment",
        "mine",
    )
    assert ran.code == 0, ran.err
    assert ran.document == {
        "schema": 1,
        "pipeline": "digits",
        "status": "submitted",
        "run_id": "r-42",
        "url": f"{api.url}/#/runs/details/r-42",
    }
    (run,) = api.posted("/apis/v2beta1/runs")
    assert run["experiment_id"] == "e1"
    assert run["runtime_config"]["parameters"] == {"epochs": 7, "lr": 1.0}
    spec = run["pipeline_spec"]
    assert spec["pipelineInfo"]["name"] == "digits"
    assert set(spec["root"]["dag"]["tasks"]) == {"preprocess", "elastic-train", "evaluate", "condition-1"}
    assert "ELASTIC_FAULTS" not in json.dumps(run)
    (experiment,) = api.posted("/apis/v2beta1/experiments")
    assert experiment["display_name"] == "mine"
    assert list(command.folder.iterdir()) == []


def test_image_namespace_and_token_are_passed_on(command, api):
    (command.folder / "token").write_text("se.cr.et\n")
    ran = command(
        *("run", "digits", "--host", api.url, "--token-file", "token"),
        *("--namespace", "team", "--image", "registry.example/elastic:2"),
    )
    assert ran.code == 0, ran.err
    assert ran.out.splitlines() == ["submitted run r-42", f"{api.url}/#/runs/details/r-42"]
    (run,) = api.posted("/apis/v2beta1/runs")
    executors = run["pipeline_spec"]["deploymentSpec"]["executors"].values()
    assert {executor["container"]["image"] for executor in executors} == {"registry.example/elastic:2"}
    (experiment,) = api.posted("/apis/v2beta1/experiments")
    assert experiment["namespace"] == "team"
    assert {headers.get("Authorization", headers.get("authorization")) for *_, headers in api.requests} == {
        "Bearer se.cr.et"
    }
    assert "se.cr.et" not in ran.out + ran.err


@pytest.mark.parametrize(
    ("where", "answer", "said"),
    [
        (("GET", "/apis/v2beta1/healthz"), (404, {}), "is no Kubeflow Pipelines API (404"),
        (("GET", "/apis/v2beta1/healthz"), (200, b"<html>"), "is no Kubeflow Pipelines API (no JSON"),
        (("GET", "/apis/v2beta1/healthz"), (401, {}), "wants a login: give a token with --token-file"),
        (("GET", "/apis/v2beta1/healthz"), (503, {}), "answers 503"),
        (
            ("POST", "/apis/v2beta1/runs"),
            (400, {"error": "Invalid input error: unknown field"}),
            "refused the run: 400 Invalid input error: unknown field",
        ),
        (("POST", "/apis/v2beta1/runs"), (500, b"oops"), "refused the run: 500"),
    ],
)
def test_a_server_that_says_no_is_one_error(command, api, where, answer, said):
    api.answers[where] = answer
    ran = command("run", "digits", "--host", api.url)
    assert ran.code == 1
    assert ran.out == ""
    assert ran.err.startswith(f"error: --host {api.url} ")
    assert said in ran.err
    assert len(ran.err.splitlines()) == 1


def test_nobody_listens(command):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    ran = command("run", "digits", "--host", url)
    assert ran.code == 1
    assert ran.err == (
        f"error: --host {url} cannot be reached: Connection refused; is the server up, and the port forwarded?\n"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "ftp://x"], "--host 'ftp://x' is no address"),
        (["--host", "http://"], "is no address"),
        (["--host", "http://a:b"], "is no address"),
        (["--host", "http://user:pw@a"], "has a password in it"),
        (["--host", "http://a/#/runs"], "leave out what follows '#'"),
        (["--host", "http://a", "--token-file", "nowhere"], "--token-file 'nowhere' does not exist"),
        (["--host", "http://a", "-p", "epochs=x"], "parameter epochs='x' is not a whole number"),
        (["--host", "http://a", "--keep-serving"], "--keep-serving has no meaning with --host"),
        (["--host", "http://a", "--image", "a b"], "is no container image"),
    ],
)
def test_wrong_input_is_found_before_anything_is_sent(command, arguments, said):
    ran = command("run", "digits", *arguments)
    assert ran.code == 2
    assert said in ran.err
    assert "pw" not in ran.err
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("limit", "silent", "said"),
    [
        ("_PROBE_S", "GET /apis/v2beta1/healthz", "within 0.5 s; is it the API server?"),
        ("_SUBMIT_S", "POST /apis/v2beta1/runs", "within 0.5 s; the run may be there"),
    ],
)
def test_a_server_that_falls_silent_is_not_waited_for(api, monkeypatch, limit, silent, said):
    # The real limits are longer than a test should take.
    monkeypatch.setattr(remote, limit, 0.5)
    method, path = silent.split()
    released = threading.Event()
    api.answers[method, path] = released
    try:
        with pytest.raises(ElasticError) as caught:
            remote.submit("digits", host=api.url)
    finally:
        released.set()
    assert said in str(caught.value)
