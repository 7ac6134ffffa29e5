"""`kfp-elastic pipeline run | compile | list`. Nothing heavy is imported before a sub-command runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from elastic_runtime.cli import print_json
from elastic_runtime.errors import EXIT_OK, InputError
from kfp_elastic.pipelines import REGISTRY, lookup

__all__ = ["PipelineCommand"]

_NAME_HELP = f"a pipeline of this package ({', '.join(REGISTRY)}) or a compiled .yaml file"


class PipelineCommand:
    """The `pipeline` command."""

    name = "pipeline"
    help = "run, compile and list pipelines"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the sub-commands and their options."""
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        self._add_run(actions.add_parser("run", help="run a pipeline, here or on Kubeflow Pipelines"))
        compiling = actions.add_parser("compile", help="write a pipeline as YAML for Kubeflow Pipelines")
        compiling.add_argument("pipeline", metavar="NAME", help=_NAME_HELP)
        compiling.add_argument("-o", "--output", metavar="FILE", required=True, help="file to write, *.yaml")
        compiling.add_argument("--image", metavar="IMAGE", help="container image of every step")
        listing = actions.add_parser("list", help="list the pipelines of this package")
        listing.add_argument("--json", action="store_true", help="print one JSON document")

    def run(self, arguments: argparse.Namespace) -> int:
        """Do what the sub-command says."""
        if arguments.action == "list":
            return _list(arguments)
        if arguments.action == "compile":
            return _compile(arguments)
        return _run_local(arguments) if arguments.local else _run_remote(arguments)

    def _add_run(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("pipeline", metavar="NAME", help=_NAME_HELP)
        where = parser.add_mutually_exclusive_group(required=True)
        where.add_argument("--local", action="store_true", help="run on this machine")
        where.add_argument("--host", metavar="URL", help="submit to the Kubeflow Pipelines API at URL")
        parser.add_argument(
            "-p", "--parameter", metavar="KEY=VALUE", action="append", default=[], help="a pipeline parameter"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
        local = parser.add_argument_group("with --local")
        local.add_argument(
            "--kill-worker", action="store_true", help="kill one training worker in the middle of an epoch"
        )
        local.add_argument("--keep-serving", action="store_true", help="leave the model server running")
        local.add_argument("--runs-dir", metavar="DIR", help="folder of the runs (default ./runs)")
        remote = parser.add_argument_group("with --host")
        remote.add_argument("--namespace", help="namespace of the run, where there are several users")
        remote.add_argument("--experiment", help="experiment to add the run to (default: Default)")
        remote.add_argument(
            "--token-file", metavar="FILE", help="file with a bearer token (default: KFP_ELASTIC_TOKEN)"
        )
        remote.add_argument("--image", metavar="IMAGE", help="container image of every step")


def _list(arguments: argparse.Namespace) -> int:
    if arguments.json:
        print_json({"pipelines": [{"name": e.name, "description": e.description} for e in REGISTRY.values()]})
    else:
        width = max(map(len, REGISTRY))
        sys.stdout.writelines(f"{e.name:<{width}}  {e.description}\n" for e in REGISTRY.values())
    return EXIT_OK


def _compile(arguments: argparse.Namespace) -> int:
    lookup(arguments.pipeline)
    from kfp_elastic.pipelines.compiling import compile_pipeline

    path = compile_pipeline(arguments.pipeline, Path(arguments.output), image=arguments.image)
    sys.stderr.write(f"wrote {path}\n")
    return EXIT_OK


def _run_local(arguments: argparse.Namespace) -> int:
    _refuse(arguments, "--local", ("namespace", "experiment", "token_file", "image"))
    lookup(arguments.pipeline)
    from kfp_elastic.pipelines.local import run_local
    from kfp_elastic.pipelines.parameters import split_assignments
    from kfp_elastic.pipelines.summary import show

    result = run_local(
        arguments.pipeline,
        split_assignments(arguments.parameter),
        runs_dir="./runs" if arguments.runs_dir is None else arguments.runs_dir,
        kill_worker=arguments.kill_worker,
        keep_serving=arguments.keep_serving,
    )
    if arguments.json:
        print_json(result.document())
    else:
        show(result)
    return result.exit_code


def _run_remote(arguments: argparse.Namespace) -> int:
    _refuse(arguments, "--host", ("kill_worker", "keep_serving", "runs_dir"))
    lookup(arguments.pipeline)
    from kfp_elastic.pipelines.parameters import split_assignments
    from kfp_elastic.pipelines.remote import submit

    submitted = submit(
        arguments.pipeline,
        split_assignments(arguments.parameter),
        host=arguments.host,
        namespace=arguments.namespace,
        experiment=arguments.experiment,
        token_file=arguments.token_file,
        image=arguments.image,
    )
    if arguments.json:
        print_json(submitted.document())
    else:
        sys.stdout.write(f"submitted run {submitted.run_id}\n{submitted.url}\n")
    return EXIT_OK


def _refuse(arguments: argparse.Namespace, mode: str, options: tuple[str, ...]) -> None:
    for option in options:
        if getattr(arguments, option) not in (None, False):
            raise InputError(
                f"--{option.replace('_', '-')} has no meaning with {mode}: leave one of them out"
            )
