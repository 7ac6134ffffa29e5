"""Every HTML page of a whole run, opened in a real browser: it shows, in light and dark, and asks for nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="needs chromium"),
]
PAGES = [
    "index.html",
    "preprocess/report.html",
    "elastic-train/report.html",
    "evaluate/report.html",
    "serve/report.html",
]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a digits run in which a worker was killed."""
    import sys

    folder = tmp_path_factory.mktemp("run")
    command = Path(sys.executable).parent / "kfp-elastic"
    done = subprocess.run(
        [command, "pipeline", "run", "digits", "--local", "--kill-worker", "--json", "-p", "epochs=10"],
        cwd=folder, capture_output=True, text=True, timeout=280, env={**os.environ, "XDG_STATE_HOME": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return Path(json.loads(done.stdout)["run_dir"])


def browse(page: Path, work: Path, *, dark: bool = False, width: int = 1000) -> tuple[str, list[str], str]:
    """Open a page; return its DOM after loading, the addresses it asked for, and the browser's console."""
    log = work / "net.json"
    done = subprocess.run(
        [BROWSER or "", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         f"--user-data-dir={work / 'profile'}", f"--window-size={width},1200", f"--log-net-log={log}",
         "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--dump-dom",
         *(["--force-dark-mode"] if dark else []), page.as_uri()],
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    asked = []
    for event in log.read_text(errors="replace").splitlines():
        found = re.search(r'"url":"((?:https?|wss?|ftp):[^"]*)"', event)
        initiator = re.search(r'"initiator":"([^"]*)"', event)
        # The browser asks for things of its own, too; those have no page behind them.
        if found and initiator and initiator[1] != "not an origin":
            asked.append(found[1])
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return done.stdout, asked, console


def test_a_request_of_a_page_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        '<link rel="stylesheet" href="https://fonts.example/css"><img src="http://images.example/x.png">'
    )
    _, asked, _ = browse(page, tmp_path)
    assert {"https://fonts.example/css", "http://images.example/x.png"} <= set(asked)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_and_needs_nothing_from_elsewhere(run_folder: Path, tmp_path: Path, name: str) -> None:
    dom, asked, console = browse(run_folder / name, tmp_path)
    assert "<h1>" in dom
    assert asked == []
    assert console == ""
    assert "<script" not in dom


def test_the_index_links_every_artifact_and_each_link_leads_somewhere(
    run_folder: Path, tmp_path: Path
) -> None:
    dom, _, _ = browse(run_folder / "index.html", tmp_path)
    links = {unquote(link) for link in re.findall(r'href="([^"]+)"', dom) if not link.startswith("data:")}
    assert set(PAGES[1:]) <= links
    for link in links:
        assert not link.startswith(("/", "http")), "the folder can be moved"
        assert (run_folder / link).exists(), link


def test_the_run_report_shows_the_kill_and_the_recovery(run_folder: Path, tmp_path: Path) -> None:
    dom, _, _ = browse(run_folder / "elastic-train" / "report.html", tmp_path)
    assert "killed by SIGKILL" in dom
    assert "training again after" in dom
    assert dom.count("<svg") == 1


def test_pages_fit_a_narrow_window_without_scrolling_sideways(run_folder: Path, tmp_path: Path) -> None:
    """A page wider than the window would scroll as a whole; wide tables scroll in their own box."""
    for number, name in enumerate(PAGES):
        probe = tmp_path / f"{number}.html"
        script = "<script>document.title = document.documentElement.scrollWidth - window.innerWidth</script></body>"
        probe.write_text(
            (run_folder / name).read_text(encoding="utf-8").replace("</body>", script), encoding="utf-8"
        )
        (tmp_path / str(number)).mkdir()
        dom, _, _ = browse(probe, tmp_path / str(number), width=520)
        excess = re.search(r"<title>(-?\d+)</title>", dom)
        assert excess is not None
        assert int(excess[1]) <= 0, name
