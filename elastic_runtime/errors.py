"""Every error that this package raises on purpose.

    ElasticError
    ├── InputError (ValueError)              the user gave something wrong: exit code 2
    │   ├── UnknownNameError (LookupError)   no such pipeline, job, split, column …
    │   ├── MissingFileError (FileNotFoundError)
    │   └── NameInUseError (FileExistsError) a live job, or a folder, of that name
    ├── DataError (ValueError)               data breaks a rule: names column, rows and rule
    ├── IntegrityError (ValueError)          a stored file does not match its checksum
    ├── GateError                            a quality gate said no: exit code 4
    ├── JobFailed (RuntimeError)             the job ended for good without success: exit code 1
    ├── JobPreempted (RuntimeError)          preempted or interrupted by the platform: exit code 3
    └── MissingDependencyError (ImportError) an optional extra is not installed

Each message names the field, the value and the fix.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "EXIT_FAILED",
    "EXIT_GATE",
    "EXIT_INPUT",
    "EXIT_INTERRUPTED",
    "EXIT_OK",
    "EXIT_TRY_AGAIN",
    "DataError",
    "ElasticError",
    "GateError",
    "InputError",
    "IntegrityError",
    "JobFailed",
    "JobPreempted",
    "MissingDependencyError",
    "MissingFileError",
    "NameInUseError",
    "UnknownNameError",
]

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_INPUT = 2
EXIT_TRY_AGAIN = 3
EXIT_GATE = 4
EXIT_INTERRUPTED = 130

_SHOWN_NAMES = 10
"""Known names that a message lists before it counts the rest."""


class ElasticError(Exception):
    """Base of every error of this package; `exit_code` is what a command line returns for it."""

    exit_code = EXIT_FAILED


class InputError(ElasticError, ValueError):
    """A parameter, option or file that the user gave is wrong."""

    exit_code = EXIT_INPUT


class UnknownNameError(InputError, LookupError):
    """A name that does not exist; the message offers the near match."""

    @classmethod
    def of(cls, what: str, given: str, known: Iterable[str]) -> UnknownNameError:
        """Build the error for `given`, which is none of `known` (`what` says what kind of name it is)."""
        names = sorted(known)
        near = difflib.get_close_matches(given, names, n=3)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if len(names) > _SHOWN_NAMES + 1:
            shown = [*near, *(name for name in names if name not in near)][:_SHOWN_NAMES]
            listed = f"{', '.join(shown)} … and {len(names) - len(shown)} more"
        else:
            listed = ", ".join(names) or "none"
        return cls(f"unknown {what} {given!r}{hint} (known: {listed})")


class MissingFileError(InputError, FileNotFoundError):
    """A file or folder that the user named does not exist."""


class NameInUseError(InputError, FileExistsError):
    """Something live already has this name."""


class DataError(ElasticError, ValueError):
    """Data that breaks a rule; the message names the column, the rows and the rule."""

    exit_code = EXIT_INPUT


class IntegrityError(ElasticError, ValueError):
    """A stored file that is missing, cut short or does not match its checksum."""


class GateError(ElasticError):
    """A quality gate refused the model."""

    exit_code = EXIT_GATE


class JobFailed(ElasticError, RuntimeError):
    """A job ended for good without success."""


class JobPreempted(ElasticError, RuntimeError):
    """The platform took a job away; trying again is right."""

    exit_code = EXIT_TRY_AGAIN


class MissingDependencyError(ElasticError, ImportError):
    """An optional extra of this package is needed and not installed."""

    exit_code = EXIT_INPUT

    @classmethod
    def of(cls, package: str, extra: str) -> MissingDependencyError:
        """Build the error for `package`, which the extra `extra` installs."""
        return cls(f"{package} is not installed: pip install 'kfp-elastic[{extra}]'")
