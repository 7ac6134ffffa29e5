"""What a job is: program, arguments, sizes, budget. Checked whole before anything starts."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import keyword
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from elastic_runtime.errors import InputError, MissingFileError
from elastic_runtime.jobs.nodes import NodeRange

__all__ = ["JobSpec", "Program", "environment_of", "preload_of", "program_of"]

_LONGEST_WORD = (1 << 17) - 1
"""Bytes of one argument or environment variable that Linux passes to a process (MAX_ARG_STRLEN)."""
_MOST_WORDS = 1 << 20
"""Bytes of all arguments and variables together; Linux takes about two megabytes, the environment here included."""
_RESERVED = frozenset(
    [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "ELASTIC_JOB_DIR",
        "ELASTIC_OUTPUT_DIR",
        "ELASTIC_CHECKPOINT_DIR",
        "ELASTIC_CHANNEL",
        "KFP_ELASTIC_PYTHON",
        "KFP_ELASTIC_PARENT",
    ]
)
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Program:
    """The training program: a script file or a module, never both."""

    script: str | None = None
    """Path of a Python file, as given."""
    module: str | None = None
    """Name of a module to run as `python -m`."""

    @property
    def label(self) -> str:
        """The script's stem or the module's last part, for names."""
        return Path(self.script).stem if self.script else (self.module or "").rpartition(".")[2]

    def source(self) -> Path | None:
        """Return the file that holds the program, or None for a module that is only in the image.

        Modules are looked for as an import would, and then in the current folder, which `python -m` searches too.
        """
        if self.script:
            return Path(self.script)
        parts = (self.module or "").split(".")
        spec = _find(parts)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = _find([*parts, "__main__"])
        return Path(spec.origin) if spec is not None and spec.origin and Path(spec.origin).is_file() else None

    def sha256(self) -> str:
        """Return the checksum of the program's source, or an empty string if it is not on this machine."""
        path = self.source()
        return hashlib.sha256(path.read_bytes()).hexdigest() if path is not None else ""


def _find(parts: Sequence[str]) -> ModuleSpec | None:
    """Find a module by the parts of its name. Nothing is imported, if it lies in a folder of the import path."""
    folders: Sequence[str] | None = [*sys.path, str(Path.cwd())]
    spec: ModuleSpec | None = None
    for number, part in enumerate(parts):
        spec = PathFinder.find_spec(".".join(parts[: number + 1]), folders) if part else None
        if spec is None and number > 0:
            return None
        if spec is None:
            break
        folders = spec.submodule_search_locations
    if spec is None:
        try:
            # Packages with an import hook of their own, such as some editable installs.
            spec = importlib.util.find_spec(".".join(parts))
        except (ImportError, ValueError):
            return None
    return spec


def program_of(script: str | None, module: str | None, *, present: bool = True) -> Program:
    """Return the program that the user named by a script or a module.

    With `present` the program must be on this machine and compile. Raises `InputError` for none or both,
    `MissingFileError` for a missing one, `InputError` with file and line for a syntax error.
    """
    if bool(script) == bool(module):
        given = f"script={script!r} and module={module!r}" if script else "neither a script nor a module"
        raise InputError(f"a job runs exactly one program, but {given} was given")
    program = Program(script=script or None, module=module or None)
    if not present:
        return program
    path = program.source()
    if script and not Path(script).is_file():
        raise MissingFileError(_missing(Path(script)))
    if path is None:
        raise MissingFileError(f"module {module!r} not found: is it installed, or is this the right folder?")
    if path.suffix in (".py", ""):
        try:
            compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            raise InputError(
                f"{path}{line}: {type(error).__name__}: {getattr(error, 'msg', error)}"
            ) from error
    return program


def _missing(script: Path) -> str:
    """Say that there is no such script, and which one beside it may be meant."""
    if script.exists():
        return f"script '{script}' is not a file"
    try:
        beside = sorted(path.name for path in script.parent.glob("*.py"))
    except OSError:
        beside = []
    near = difflib.get_close_matches(script.name, beside, n=1)
    hint = f"; did you mean '{script.parent / near[0]}'?" if near else ""
    return f"script '{script}' not found in {script.parent.absolute()}{hint}"


def environment_of(values: Mapping[str, object] | None) -> dict[str, str]:
    """Return environment variables with text values: numbers as Python writes them, booleans as 1 and 0.

    Raises `InputError` that names a variable whose name or value cannot be one.
    """
    environment = {}
    for name, value in (values or {}).items():
        if not isinstance(name, str) or not _ENVIRONMENT_NAME.fullmatch(name):
            raise InputError(
                f"environment variable name {name!r}: letters, digits and _ only, not first a digit"
            )
        if isinstance(value, bool):
            value = int(value)
        if not isinstance(value, str | int | float):
            raise InputError(f"environment variable {name}={value!r}: a text or a number is wanted")
        if isinstance(value, str) and "\0" in value:
            raise InputError(f"environment variable {name}: the value holds a NUL character")
        environment[name] = str(value)
    return environment


def preload_of(text: str) -> tuple[str, ...]:
    """Return the modules that a text such as `numpy,my.models` names, each once. Raises `InputError`."""
    names = dict.fromkeys(part.strip() for part in text.split(",")) if text.strip() else {}
    _check_preload(tuple(names))
    return tuple(names)


def _check_preload(names: Sequence[str]) -> None:
    for name in names:
        parts = name.split(".")
        if not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
            raise InputError(
                f"--preload {name!r}: takes names of modules as import does, separated by commas, "
                "such as numpy,my_package.models"
            )


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """Everything that decides what a job does."""

    program: Program
    """What each worker runs."""
    arguments: Sequence[str] = ()
    """Command line of the program."""
    nodes: NodeRange
    """How many nodes, and workers on each."""
    name: str | None = None
    """Job name, a DNS label; None takes torchx's application id."""
    max_restarts: int = 10
    """Worker failures over the whole job after which it stops; lost nodes do not count."""
    grace: float = 3.0
    """Seconds between SIGTERM and SIGKILL when workers are stopped."""
    heartbeat: float = 5.0
    """Seconds after which an agent that says nothing is taken for lost."""
    wait_limit: float = 600.0
    """Seconds for which a job below its minimum waits for workers; then it fails."""
    state_dir: str | None = None
    """Folder for logs, events, checkpoints and the record; None is a folder by the job's name."""
    output_dir: str | None = None
    """Folder for what the program produces; None is `output` in the state folder."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Extra environment of every worker."""
    preload: Sequence[str] = ()
    """Modules that the zygote imports before workers are forked, so that no worker's start waits for them."""

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise InputError(f"--max-restarts {self.max_restarts}: takes a number from 0")
        if not 0 <= self.grace <= 3600:
            raise InputError(f"--grace {self.grace}: takes seconds from 0 to 3600")
        # Agents are asked every second: less than two would take a slow one for a lost one.
        if not 2 <= self.heartbeat <= 3600:
            raise InputError(f"--heartbeat {self.heartbeat}: takes seconds from 2 to 3600")
        if not 0 <= self.wait_limit <= 365 * 86_400:
            raise InputError(f"--wait-limit {self.wait_limit}: takes seconds from 0 to {365 * 86_400}")
        _check_preload(self.preload)
        for place, argument in enumerate(self.arguments):
            if "\0" in argument:
                raise InputError(f"argument {place + 1} of the program holds a NUL character")
        words = {f"argument {place + 1} of the program": text for place, text in enumerate(self.arguments)}
        words |= {f"environment variable {key}": f"{key}={text}" for key, text in self.environment.items()}
        total = 0
        for what, text in words.items():
            try:
                size = len(os.fsencode(text)) + 1
            except UnicodeEncodeError as error:
                raise InputError(f"{what}: {error.reason}: {text[error.start : error.end]!r}") from error
            total += size
            if size > _LONGEST_WORD or total > _MOST_WORDS:
                raise InputError(
                    f"{what}: {size:,} bytes ({total:,} with those before it) are more than a command line takes "
                    f"({_LONGEST_WORD:,}, and {_MOST_WORDS:,} together): put it in a file and pass the file's name"
                )
        for key in self.environment:
            if key in _RESERVED:
                raise InputError(
                    f"environment variable {key}: the launcher sets it for each worker; leave it out"
                )
