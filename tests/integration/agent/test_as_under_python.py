"""A forked worker does what `python` does with the same program: each runs both ways, and the outcome is compared."""

from __future__ import annotations

import socket
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = {
    "exit code": "import sys; print('out'); sys.exit(3)",
    "exit text": "import sys; sys.exit('went wrong')",
    "exit none": "import sys; sys.exit()",
    "exit at once": "import os; print('out'); os._exit(7)",
    "falls off the end": "print('out', end='')",
    "exception": "def inner():\n    raise ValueError('ü')\n\ndef outer():\n    inner()\n\nouter()\n",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise RuntimeError('second') from error\n",
    "exception group": "raise ExceptionGroup('many', [ValueError(1), TypeError(2)])",
    "syntax error": "x = 1\nif x\n",
    "wrong encoding": "# coding: latin-1\nprint(ascii('\u00fc'))\n",
    "import error": "import no_such_module_here",
    "killed": "import os, signal; print('out'); os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "interrupted": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "keyboard interrupt": "import atexit; atexit.register(print, 'atexit'); raise KeyboardInterrupt",
    "own handler": "import os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\nos.kill(os.getpid(), signal.SIGTERM)\n",
    "aborted": "import os; os.abort()",
    "signals": "import signal\nprint({str(n): str(signal.getsignal(n)).split(' at ')[0] for n in signal.valid_signals()}, signal.pthread_sigmask(signal.SIG_BLOCK, []))",
    "atexit and threads": "import atexit, threading, time\natexit.register(print, 'atexit')\nthreading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\nprint('main ends')\n",
    "exception in a thread": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='mine'); t.start(); t.join()",
    "own excepthook": "import sys\nsys.excepthook = lambda kind, value, trace: print('hook', kind, value, trace.tb_frame.f_code.co_name, trace.tb_next)\nraise ValueError(5)\n",
    "itself": "import sys\nprint(__name__, __file__, __package__, __spec__, __doc__, __annotations__, type(__loader__).__name__, __builtins__, sorted(globals()))\nprint(sys.argv, sys.orig_argv[1:], sys.path[0], sys.modules['__main__'].__dict__ is globals())\n",
    "docstring": "'''The doc.'''\nx: int = 5\nprint(__doc__, __annotations__)",
    "future": "print('annotations' in globals(), 1 / 2)\nprint(__import__('inspect').signature(compile))",
    "argparse": "import argparse\np = argparse.ArgumentParser(); p.add_argument('--word'); p.add_argument('rest', nargs='*')\nprint(p.parse_args()); p.print_usage(); p.error('bad')\n",
    "helpers": "import helper; print(helper.value, helper.__file__)",
    "pickle": "import pickle\nclass Thing:\n    x = 5\nprint(type(pickle.loads(pickle.dumps(Thing()))), pickle.dumps(Thing))\n",
    "multiprocessing fork": "import multiprocessing as mp\ndef work(n):\n    return n * n\nif __name__ == '__main__':\n    with mp.get_context('fork').Pool(2) as pool:\n        print(pool.map(work, range(5)))\n",
    "multiprocessing spawn": "import multiprocessing as mp, sys\nprint('top', __name__)\ndef work(n):\n    return n * n, __name__, sys.argv\nif __name__ == '__main__':\n    with mp.get_context('spawn').Pool(1) as pool:\n        print(pool.map(work, range(3)))\n",
    "multiprocessing forkserver": "import multiprocessing as mp\ndef work(n):\n    return n + 1\nif __name__ == '__main__':\n    with mp.get_context('forkserver').Pool(1) as pool:\n        print(pool.map(work, range(3)))\n",
    "torch spawn": "import torch, torch.multiprocessing as mp\ndef work(rank, queue):\n    queue.put((rank, torch.ones(2).sum().item()))\nif __name__ == '__main__':\n    queue = mp.get_context('spawn').SimpleQueue()\n    mp.spawn(work, (queue,), nprocs=1)\n    print(queue.get())\n",
    "subprocess": "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'import os, signal; print(os.environ[\"MARK\"], signal.getsignal(signal.SIGINT))'], capture_output=True, text=True).stdout)\n",
    "place": "import os\nprint(os.getcwd(), os.environ['MARK'], sorted(k for k in os.environ if not k.startswith('PYTORCH')) == sorted(os.environ), os.getsid(0) == os.getpid(), open(0).read() == '')\n",
    "streams": "import sys\nfor s in (sys.stdin, sys.stdout, sys.stderr):\n    print(s.encoding, s.errors, s.fileno(), s.isatty())\nsys.stdout.buffer.write(b'raw\\n'); print('ü')\n",
    "source": "import inspect\ndef f():\n    return 5\nprint(inspect.getsource(f), len(inspect.stack()) > 0)\n",
    "warnings": "import warnings\nwarnings.warn('mine'); warnings.warn('old', DeprecationWarning)\n",
    "logging": "import logging\nlogging.basicConfig(level='INFO', format='%(message)s'); logging.info('said'); print(logging.root.handlers)\n",
    "recursion": "def f():\n    f()\ntry:\n    f()\nexcept RecursionError as error:\n    print(error)\n",
    "data loader": "import torch\nfrom torch.utils.data import DataLoader\nif __name__ == '__main__':\n    print([b.tolist() for b in DataLoader(list(range(6)), batch_size=2, num_workers=2)])\n",
    "parallel op": "import torch\ntorch.set_num_threads(2)\na = torch.ones(512, 512)\nprint((a @ a).sum().item(), torch.get_num_threads())\nx = torch.ones(300_000, requires_grad=True); (x * 2).sum().backward(); print(x.grad.sum().item())\n",
    "process group": "import os, torch, torch.distributed as dist\nos.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='0', RANK='0', WORLD_SIZE='1', LOCAL_RANK='0')\ndist.init_process_group('gloo')\nt = torch.ones(3); dist.all_reduce(t); print(t)\ndist.destroy_process_group()\n",
}  # fmt: skip


def by_python(python: str, folder: Path, words: list[str], environment: dict[str, str]) -> tuple[int, str]:
    with (folder / "python.log").open("wb") as log:
        done = subprocess.run(
            [python, *words], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, timeout=120, check=False,
        )  # fmt: skip
    return done.returncode, (folder / "python.log").read_text()


def compare(shared: Any, python: str, program: Any) -> tuple[int, str]:
    forked = shared.run(program)
    exact = by_python(python, shared.folder, program.words(), dict(program.environment))
    assert forked == exact
    return forked


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_what_it_does_under_python(shared: Any, python: str, name: str) -> None:
    (shared.folder / "helper.py").write_text("value = 'helped'")
    encoding = "latin-1" if name == "wrong encoding" else "utf-8"
    (shared.folder / "train.py").write_text(SCRIPTS[name], encoding=encoding)
    compare(shared, python, shared.program("train.py", "--word", "ä b", "x", MARK="here"))


@pytest.mark.parametrize(
    "module",
    ["package.tool", "package", "package.missing", "no_such_package", "package.fails", "package.interrupted"],
)
def test_a_module_does_what_it_does_under_python_m(shared: Any, python: str, module: str) -> None:
    package = shared.folder / "package"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("import sys\nprint('package', sys.argv)")
    (package / "__main__.py").write_text("print('main of', __package__, __name__)")
    (package / "part.py").write_text("name = 'part'")
    (package / "interrupted.py").write_text("import torch._dynamo\nraise KeyboardInterrupt")
    (package / "fails.py").write_text("def f():\n    raise ValueError('x')\nf()\n")
    (package / "tool.py").write_text(
        "import multiprocessing as mp, sys\nfrom . import part\n"
        "def work(n):\n    return n, __name__\n"
        "if __name__ == '__main__':\n"
        "    print(part.name, __name__, __package__, __spec__.name, __file__, sys.argv, sys.orig_argv[1:], sys.path[0])\n"
        "    with mp.get_context('spawn').Pool(1) as pool:\n        print(pool.map(work, range(2)))\n"
    )
    compare(shared, python, shared.program(None, "--x", "1", module=module))


def test_folders_archives_links_and_missing_files_run_as_under_python(shared: Any, python: str) -> None:
    folder = shared.folder
    show = "import sys; print(__name__, __file__, sys.argv, sys.path[0])"
    (folder / "app").mkdir()
    (folder / "app" / "__main__.py").write_text(show)
    with zipfile.ZipFile(folder / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", show)
    (folder / "deep").mkdir()
    (folder / "deep" / "real.py").write_text(show)
    (folder / "link.py").symlink_to("deep/real.py")
    for script, code in {"app": 0, "app.pyz": 0, "link.py": 0, "deep/real.py": 0, "missing.py": 2}.items():
        assert compare(shared, python, shared.program(script, "a"))[0] == code, script


def test_a_folder_of_the_users_with_the_name_of_a_loaded_library_is_what_the_script_imports(
    shared: Any, python: str
) -> None:
    for name in ("elastic_runtime", "sympy"):
        (shared.folder / name).mkdir(exist_ok=True)
        (shared.folder / name / "__init__.py").write_text("value = 'theirs'")
    (shared.folder / "train.py").write_text(
        "import elastic_runtime, sympy; print(elastic_runtime.value, sympy.value)"
    )
    try:
        assert compare(shared, python, shared.program("train.py")) == (0, "theirs theirs\n")
    finally:
        for name in ("elastic_runtime", "sympy"):
            (shared.folder / name / "__init__.py").unlink()


def test_a_worker_has_no_descriptor_but_its_own(shared: Any) -> None:
    (shared.folder / "train.py").write_text(
        "import os\n"
        "for number in sorted(os.listdir('/proc/self/fd'), key=int):\n"
        "    try:\n        print(number, os.readlink(f'/proc/self/fd/{number}').split('[')[0], os.get_inheritable(int(number)))\n"
        "    except OSError:\n        pass\n"
        "print(os.environ.get('ELASTIC_CHANNEL'))\n"
    )
    code, said = shared.run(shared.program("train.py"))
    *descriptors, channel = said.splitlines()
    assert [line.split()[0] for line in descriptors] == ["0", "1", "2"], said
    assert (code, channel) == (0, "None")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        code, said = shared.run(shared.program("train.py"), channel=theirs.fileno())
    *descriptors, channel = said.splitlines()
    assert descriptors[3:] == [f"{channel} socket: False"]


def test_no_line_is_lost_when_the_worker_is_killed(shared: Any) -> None:
    (shared.folder / "train.py").write_text(
        "import os, sys\nfor n in range(2000):\n    print('line', n)\n"
        "sys.stderr.write('no newline'); os.kill(os.getpid(), 9)"
    )
    code, said = shared.run(shared.program("train.py", PYTHONUNBUFFERED=""))
    assert code == -9
    assert said == "".join(f"line {n}\n" for n in range(2000)) + "no newline"


def test_random_numbers_differ_by_rank_and_come_again_in_a_second_run(shared: Any) -> None:
    (shared.folder / "train.py").write_text(
        "import random, numpy, torch\nprint(torch.rand(1), numpy.random.rand(), random.random(), torch.initial_seed())"
    )
    runs = [
        [shared.run(shared.program("train.py", RANK=str(rank), ELASTIC_SEED="3")) for rank in range(3)]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 3


@pytest.mark.parametrize("number", ["1", "2", "3", "2,1"])
def test_the_worker_has_the_threads_that_its_environment_names(shared: Any, number: str) -> None:
    (shared.folder / "train.py").write_text(
        "import os, torch, threadpoolctl\n"
        "blas = {pool['num_threads'] for pool in threadpoolctl.threadpool_info() if pool['user_api'] == 'blas'}\n"
        "print(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'], blas, 'OPENBLAS_NUM_THREADS' in os.environ)"
    )
    first = int(number.partition(",")[0])
    code, said = shared.run(shared.program("train.py", OMP_NUM_THREADS=number))
    assert (code, said) == (0, f"{first} {number} {{{first}}} False\n")


def test_a_working_folder_that_is_gone_is_said_and_no_other_is_taken(shared: Any, tmp_path: Path) -> None:
    program = shared.program("train.py")
    gone = tmp_path / "gone"
    object.__setattr__(program, "cwd", str(gone))
    code, said = shared.run(program)
    assert code == 1
    assert f"No such file or directory: '{gone}'" in said
    assert Path.cwd() != gone
