"""Finding a job of this machine by its name, its torchx handle, or the path of its folder.

`names/NAME` beside the folder of all jobs says in which folder the newest job of that name is. The job's supervisor
holds it as long as it lives, so that no two jobs have one name, wherever their folders are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_runtime.errors import (
    InputError,
    IntegrityError,
    MissingFileError,
    NameInUseError,
    UnknownNameError,
)
from elastic_runtime.jobs import locks
from elastic_runtime.jobs.folder import JobFolder, default_folder
from elastic_runtime.names import is_valid

__all__ = ["FoundJob", "check_free", "claim", "find_job"]

_MANY = 500
"""Names that are kept, also of jobs whose folder is gone."""


@dataclass(frozen=True)
class FoundJob:
    """A job that runs or ran on this machine."""

    name: str
    """Job name."""
    folder: JobFolder
    """Its folder."""
    description: dict[str, Any]
    """What `job.json` says; empty while the job starts for the first time in this folder."""


def check_free(name: str, folder: Path) -> None:
    """Raise `NameInUseError` if a live job in another folder than `folder` has this name."""
    try:
        held = locks.is_held(_pointer(name))
    except OSError:
        return
    if held and locks.read(_pointer(name)) != str(folder):
        raise _in_use(name)


def claim(name: str, folder: Path) -> int | None:
    """Note that the job `name` is in `folder`, and return the descriptor that keeps the name to it.

    Raises `NameInUseError` if a live job in another folder has the name. Returns None where nothing can be noted,
    such as in a container without a home: then the job is found by the path of its folder only.
    """
    pointer = _pointer(name)
    try:
        pointer.parent.mkdir(parents=True, exist_ok=True)
        descriptor = locks.take(pointer)
    except OSError:
        return None
    if descriptor is None:
        raise _in_use(name)
    with contextlib.suppress(OSError):
        locks.write(descriptor, str(folder))
    with contextlib.suppress(OSError):
        _forget_gone(pointer)
    return descriptor


def find_job(job: str) -> FoundJob:
    """Return the job that `job` means.

    That is a name, also of a job whose folder is elsewhere (`--state-dir`), a torchx handle such as
    `local_cwd://torchx/NAME-ID`, or the path of a job's folder. Raises `UnknownNameError` with near matches,
    `MissingFileError` for a path where nothing is, and `InputError` for a folder that is not of a job.
    """
    if "://" in job:
        return _by_handle(job)
    if os.sep in job or job in (".", "..", "~"):
        return _by_path(Path(job).expanduser())
    found = _by_name(job)
    if found is not None:
        return found
    if (Path(job) / "job.json").is_file():
        return _by_path(Path(job))
    raise _unknown(job)


def _names() -> Path:
    return default_folder("any").parent.parent / "names"


def _pointer(name: str) -> Path:
    return _names() / name


def _in_use(name: str) -> NameInUseError:
    where = locks.read(_pointer(name)) or "starting"
    return NameInUseError(f"job {name!r} is running ({where}): stop it or choose another name")


def _forget_gone(own: Path) -> None:
    """Remove the names of jobs whose folders are gone, once there are many names."""
    with os.scandir(own.parent) as entries:
        names = [Path(entry.path) for entry in entries]
    for pointer in names if len(names) > _MANY else ():
        if pointer == own or (Path(locks.read(pointer)) / "job.json").exists():
            continue
        descriptor = locks.take(pointer, patience=0.0)
        if descriptor is not None:  # Not of a job that has only just begun.
            pointer.unlink(missing_ok=True)
            os.close(descriptor)


def _by_name(name: str) -> FoundJob | None:
    if not is_valid(name):
        return None
    noted = locks.read(_pointer(name))
    for path in (Path(noted) if noted else None, default_folder(name)):
        if path is None:
            continue
        folder = JobFolder(path)
        document = _description(folder)
        if document is not None and document.get("name") == name:
            return FoundJob(name, folder, document)
        if document is None and _is_live(folder):
            return FoundJob(name, folder, {})
    return None


def _by_path(path: Path) -> FoundJob:
    # Absolute by the name that the user gave: links are not resolved, so that messages name what the user knows.
    folder = JobFolder(path.absolute())
    if not path.exists():
        raise MissingFileError(f"job folder {str(path)!r}: not found: give a job's name, handle or folder")
    try:
        document = folder.description()
    except (IntegrityError, OSError) as error:
        raise InputError(f"job folder {str(path)!r}: {error}") from error
    if document is None and not _is_live(folder):
        raise InputError(f"job folder {str(path)!r}: has no job.json: it is not the folder of a job")
    return FoundJob(str((document or {}).get("name", path.name)), folder, document or {})


def _by_handle(handle: str) -> FoundJob:
    app_id = handle.rpartition("/")[2]
    jobs = {str(job.description.get("app_id")): job for job in _known()}
    if app_id and app_id in jobs:
        return jobs[app_id]
    scheduler = handle.partition("://")[0]
    if not scheduler.startswith("local"):
        raise InputError(
            f"job {handle!r}: jobs of scheduler {scheduler!r} cannot be controlled from here yet: "
            f"use torchx (torchx status {handle})"
        )
    raise UnknownNameError.of("job handle", app_id, [name for name in jobs if name])


def _known() -> Iterator[FoundJob]:
    """Yield every job of this machine that can be found by its name."""
    names: set[str] = set()
    for place in (_names(), default_folder("any").parent):
        with contextlib.suppress(OSError):
            names.update(os.listdir(place))  # noqa: PTH208
    for name in sorted(names):
        job = _by_name(name)
        if job is not None:
            yield job


def _unknown(name: str) -> InputError:
    error = UnknownNameError.of("job", name, [job.name for job in _known()])
    if is_valid(name):
        noted = locks.read(_pointer(name))
        if noted and not Path(noted).exists():
            return UnknownNameError(f"{error}; job {name!r} was in {noted}, which is gone")
        if not noted and default_folder(name).exists():
            return UnknownNameError(
                f"{error}; {default_folder(name)} has no job.json: job {name!r} has not started yet, "
                "or its start failed"
            )
    return error


def _description(folder: JobFolder) -> dict[str, Any] | None:
    try:
        return folder.description()
    except (IntegrityError, OSError):
        return None


def _is_live(folder: JobFolder) -> bool:
    try:
        return folder.is_live()
    except OSError:
        return False
