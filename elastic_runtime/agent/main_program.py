"""Runs a script or module as `__main__` of a process that is a fork, as the interpreter itself would have.

What pickling, multiprocessing, argparse, relative imports and tracebacks see is what they see under `python`: argv,
the import path, a `__main__` of its own, and no frame of ours in a traceback.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import os
import pkgutil
import runpy
import signal
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from elastic_runtime.agent.requests import Program

__all__ = ["forget_shadowed", "path_entry", "run"]

_CANNOT_OPEN = 2
"""The interpreter's exit code for a script that it cannot open."""
_INTERRUPTED = 130
_former_main: list[ModuleType] = []


def path_entry(program: Program) -> str | None:
    """Return what the interpreter puts first on the import path for `program`; None with PYTHONSAFEPATH."""
    if program.environment.get("PYTHONSAFEPATH"):
        return None
    if program.script is None:
        return program.cwd
    script = Path(program.cwd, program.script)
    return str(script.resolve() if _is_importable(script) else script.resolve().parent)


def forget_shadowed(entry: str, keep: Collection[str]) -> None:
    """Forget imported modules that the folder `entry` holds others of: an import would find those first.

    Those in `keep` stay: what an interpreter has loaded before a script starts is not found there either.
    """
    try:
        names = {_importable_name(item) for item in os.scandir(entry)}
    except OSError:
        return
    for name in (names & {module.partition(".")[0] for module in sys.modules}) - set(keep) - {"__main__"}:
        origin = getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None) or ""
        if Path(entry) in Path(origin).parents:
            continue  # Preloaded from there.
        for module in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
            del sys.modules[module]


def run(program: Program) -> NoReturn:
    """Run `program` and end the process as the interpreter does: return to its caller only by an exception."""
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    # The module that this process was started with still holds running code, so it must not be cleared.
    _former_main.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    sys.orig_argv = [sys.executable, *program.words()]
    entry = path_entry(program)
    if entry is not None:
        sys.path.insert(0, entry)
        sys.path_importer_cache.pop(entry, None)
    try:
        if program.script is None:
            sys.argv = ["-m", *program.arguments]
            _run_module(program.module or "")
        elif _is_importable(Path(program.script)):
            sys.argv = [program.script, *program.arguments]
            _run_module("__main__", as_argument=False)
        else:
            sys.argv = [program.script, *program.arguments]
            _run_file(Path(program.script), main)
    except SystemExit:
        raise
    except KeyboardInterrupt as interrupt:
        _hide_our_frames()
        if program.script is None:
            raise  # `python -m` ends with exit code 1.
        _end_interrupted(interrupt)
    except BaseException:
        _hide_our_frames()
        raise
    raise SystemExit(0)


def _end_interrupted(interrupt: KeyboardInterrupt) -> NoReturn:
    """End as the interpreter does when a script leaves KeyboardInterrupt unhandled: told, tidied up, by SIGINT."""
    sys.excepthook(KeyboardInterrupt, interrupt, interrupt.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    raise SystemExit(_INTERRUPTED)


def _importable_name(item: os.DirEntry[str]) -> str:
    """Return the name under which an import finds a folder's item; empty if it does not."""
    if item.name.endswith((".py", ".so")):
        return item.name.partition(".")[0]
    # A folder without __init__.py comes after every module of that name on the whole path.
    return item.name if Path(item.path, "__init__.py").is_file() else ""


def _is_importable(script: Path) -> bool:
    """Return whether `script` is a folder or archive whose `__main__` is run, as the interpreter asks."""
    return pkgutil.get_importer(str(script)) is not None


def _run_module(name: str, *, as_argument: bool = True) -> None:
    # What the interpreter itself calls for -m and for folders.
    runpy._run_module_as_main(name, as_argument)  # type: ignore[attr-defined]


def _run_file(script: Path, main: ModuleType) -> None:
    path = os.path.abspath(script)  # noqa: PTH100 - as the interpreter: not resolved
    main.__file__ = path
    main.__dict__["__cached__"] = None
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    exec(_code_of(script, path), main.__dict__)


def _code_of(script: Path, path: str) -> CodeType:
    try:
        with script.open("rb") as file:
            compiled: CodeType | None = pkgutil.read_code(file)
            if compiled is not None:
                return compiled
            file.seek(0)
            source = file.read()
    except OSError as error:
        sys.stderr.write(
            f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n"
        )
        raise SystemExit(_CANNOT_OPEN) from None
    return compile(source, path, "exec", dont_inherit=True)


def _hide_our_frames() -> None:
    """Have the exception shown from the program's first frame on, by whatever hook the program installed."""
    hook = sys.excepthook
    ours = {run.__code__, _run_file.__code__, _run_module.__code__, _code_of.__code__}

    def show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> Any:
        last = trace
        frame = trace
        while frame is not None:
            if frame.tb_frame.f_code in ours:
                last = frame.tb_next
            frame = frame.tb_next
        value.__traceback__ = last
        return hook(kind, value, last)

    sys.excepthook = show
