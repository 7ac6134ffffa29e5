"""The pipelines made of our components, by name. Importing this package does not load kfp."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from elastic_runtime.errors import MissingFileError, UnknownNameError

__all__ = ["REGISTRY", "RegisteredPipeline", "lookup"]


@dataclass(frozen=True, kw_only=True)
class RegisteredPipeline:
    """One pipeline that `kfp-elastic pipeline` knows, or a compiled one that the user names by its file."""

    name: str
    """Name on the command line and of the folder below `runs/`."""
    target: str
    """`module:attribute` of the kfp pipeline, or the path of a compiled `.yaml` file."""
    description: str
    """One line for people."""
    train_rows: int | None = None
    """Rows of the training split with default parameters; None when unknown. `--kill-worker` needs it."""

    @property
    def is_file(self) -> bool:
        """Whether `target` is a compiled file."""
        return self.target.endswith((".yaml", ".yml"))


REGISTRY: dict[str, RegisteredPipeline] = {
    entry.name: entry
    for entry in (
        RegisteredPipeline(
            name="digits",
            target="kfp_elastic.pipelines.digits:digits",
            description="handwritten digits of scikit-learn: preprocess, train on 2 workers, evaluate, serve",
            train_rows=1258,
        ),
        RegisteredPipeline(
            name="tabular_regression",
            target="kfp_elastic.pipelines.tabular_regression:tabular_regression",
            description="a table (diabetes progression): preprocess, train on 2 workers, evaluate, serve",
            train_rows=310,
        ),
    )
}
"""Every pipeline of this package by name."""


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, for one
        return False


def lookup(name: str) -> RegisteredPipeline:
    """Return the pipeline `name`: a registered one (`-` and `_` are the same), or a compiled `.yaml` file.

    Raises `UnknownNameError` with the near match, or `MissingFileError` for a file that is not there.
    """
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not _is_file(path):
            raise MissingFileError(
                f"pipeline file {name!r} does not exist: check the path, or compile it first"
            )
        folder = re.sub(r"[^A-Za-z0-9_.-]+", "_", path.stem).strip(".") or "pipeline"
        return RegisteredPipeline(
            name=folder, target=str(path.resolve()), description=f"compiled file {name}"
        )
    found = REGISTRY.get(name.replace("-", "_"))
    if found is None:
        code = name if name.endswith(".py") else "FILE.py"
        target = code.removesuffix(".py") + ".yaml"
        raise UnknownNameError(
            f"{UnknownNameError.of('pipeline', name, REGISTRY)}; a compiled .yaml file is taken too: "
            f"kfp dsl compile --py {shlex.quote(code)} --output {shlex.quote(target)}"
        )
    return found
