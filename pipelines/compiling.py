"""Compile pipelines and components to the YAML that Kubeflow Pipelines loads.

    python -m kfp_elastic.pipelines.compiling [--check]

writes `components/<name>/component.yaml` and `pipelines/<name>.yaml` of this repository anew; `--check`
writes nothing and exits 1 when a file is not what a fresh compile gives.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from kfp import compiler
from kfp import components as kfp_components
from kfp.dsl import base_component

import kfp_elastic.components
import kfp_elastic.pipelines
from elastic_runtime.errors import EXIT_FAILED, EXIT_OK, InputError
from kfp_elastic.components.authoring import DEFAULT_IMAGE
from kfp_elastic.pipelines import REGISTRY, RegisteredPipeline, lookup

__all__ = ["check_image", "compile_pipeline", "compiled_text", "load_pipeline", "main", "repository_files"]

_IMAGE = re.compile(
    r"[a-z0-9]([a-z0-9._:/-]*[a-z0-9])?(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[0-9a-f]{64})?"
)


def load_pipeline(entry: RegisteredPipeline) -> base_component.BaseComponent:
    """Return the kfp pipeline of `entry`. Raises `InputError` for a file that kfp's loader refuses."""
    if not entry.is_file:
        module, _, attribute = entry.target.partition(":")
        pipeline: base_component.BaseComponent = getattr(importlib.import_module(module), attribute)
        return pipeline
    try:
        loaded: base_component.BaseComponent = kfp_components.load_component_from_file(entry.target)
        if loaded.pipeline_spec.root.dag.tasks:
            return loaded
    except Exception as error:
        # kfp's loader raises whatever its YAML and protobuf parsers raise.
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, KeyError):
            first_line = f"{first_line} is missing"
        elif isinstance(error, AttributeError | TypeError):
            first_line = "it is no YAML object of the form that kfp's compiler writes"
        raise InputError(
            f"pipeline file {entry.target!r} is no compiled kfp v2 pipeline: {first_line}"
        ) from error
    raise InputError(f"pipeline file {entry.target!r} has no steps: compile a pipeline with kfp 2")


def check_image(image: str) -> str:
    """Return `image` if it is a container image reference; raises `InputError` otherwise."""
    if not _IMAGE.fullmatch(image) or "//" in image:
        raise InputError(
            f"--image {image!r} is no container image: write [REGISTRY/]NAME[:TAG][@sha256:DIGEST]"
        )
    return image


def compile_pipeline(name: str, path: str | Path, *, image: str | None = None) -> Path:
    """Compile the pipeline `name` into the YAML file `path` and return its path.

    `image` sets the container image of every step; without it the components' own is kept. The same pipeline
    gives the same bytes. Raises `InputError` for an unknown name, a wrong image or a path that cannot be
    written.
    """
    entry = lookup(name)
    target = Path(path)
    if target.suffix not in {".yaml", ".yml"}:
        raise InputError(
            f"output {str(path)!r} must end in .yaml, the only format that Kubeflow Pipelines 2 loads"
        )
    try:
        folder_is_there = target.parent.is_dir()
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r}: {error.strerror}") from error
    if not folder_is_there:
        raise InputError(
            f"output {str(path)!r}: the folder {str(target.parent)!r} does not exist: create it first"
        )
    if image is not None:
        check_image(image)
    text = compiled_text(load_pipeline(entry), image=image)
    _write(target, text)
    return target


def compiled_text(pipeline: base_component.BaseComponent, *, image: str | None = None) -> str:
    """Return the YAML of a kfp pipeline or component; `image`, if given, replaces every step's."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "compiled.yaml")
        compiler.Compiler().compile(pipeline, str(file))
        text = file.read_text(encoding="utf-8")
    if image is None:
        return text
    comments = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    documents = list(yaml.safe_load_all(text))
    for executor in documents[0]["deploymentSpec"]["executors"].values():
        if "container" in executor:
            executor["container"]["image"] = image
    return comments + str(yaml.dump_all(documents, sort_keys=True))


def repository_files() -> dict[Path, str]:
    """Return the compiled files that belong into this repository, by path, as they should be now.

    The image in them is `DEFAULT_IMAGE`, so that they do not depend on who compiles.
    """
    components = Path(kfp_elastic.components.__path__[0]).resolve()
    pipelines = Path(kfp_elastic.pipelines.__path__[0]).resolve()
    wanted: dict[Path, Any] = {
        components / name / "component.yaml": getattr(kfp_elastic.components, name)
        for name in kfp_elastic.components.__all__
    }
    wanted |= {pipelines / f"{name}.yaml": load_pipeline(entry) for name, entry in REGISTRY.items()}
    return {path: compiled_text(made, image=DEFAULT_IMAGE) for path, made in wanted.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Write (or `--check`) the compiled files of this repository and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="compiling", description="Compile this repository's YAML files anew."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    arguments = parser.parse_args(argv)
    stale = {
        path: text
        for path, text in repository_files().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    }
    for path, text in stale.items():
        if not arguments.check:
            _write(path, text)
        sys.stdout.write(f"{path} {'is out of date: run make compile' if arguments.check else 'written'}\n")
    return EXIT_FAILED if arguments.check and stale else EXIT_OK


def _write(path: Path, text: str) -> None:
    # Whoever reads the file while it is written must see the old or the new one.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise InputError(f"cannot write {str(path)!r}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
