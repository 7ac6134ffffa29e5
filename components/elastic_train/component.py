"""The elastic training step."""

from pathlib import Path
from typing import Any

from kfp.dsl import HTML, Artifact, Dataset, Input, Metrics, Model, Output

from elastic_runtime.errors import InputError
from kfp_elastic.components.authoring import component
from kfp_elastic.components.checks import check_nodes

__all__ = ["elastic_train"]


def _with_checksum(arguments: dict[str, Any]) -> dict[str, Any]:
    """Add the checksum of a program that is on the author's machine, unless one is given."""
    from elastic_runtime.jobs.spec import Program

    script, module = arguments.get("script") or None, arguments.get("module") or None
    if arguments.get("script_sha256") or bool(script) == bool(module):
        return arguments
    if not isinstance(script or module, str) or (script and not Path(script).is_file()):
        return arguments
    return {**arguments, "script_sha256": Program(script=script, module=module).sha256()}


def _check(constants: dict[str, Any]) -> None:
    """Refuse what no job can have."""
    workers, restarts = constants.get("nproc_per_node", 1), constants.get("max_restarts", 0)
    if isinstance(workers, int) and workers < 1:
        raise InputError(f"nproc_per_node={workers} is below 1: give the workers of a node")
    if isinstance(restarts, int) and restarts < 0:
        raise InputError(f"max_restarts={restarts} is below 0: give the failures that the job survives")
    if "nodes" in constants:
        check_nodes("nodes", constants["nodes"], workers if isinstance(workers, int) else 1)


@component(completed=_with_checksum, checked=_check)
def elastic_train(
    dataset: Input[Dataset],
    model: Output[Model],
    metrics: Output[Metrics],
    report: Output[HTML],
    job_record: Output[Artifact],
    script: str = "",
    module: str = "",
    script_sha256: str = "",
    arguments: list[Any] = [],  # noqa: B006 - kfp compiles the default into the YAML
    hyperparameters: dict[str, Any] = {},  # noqa: B006 - as above
    nodes: str = "1:2",
    nproc_per_node: int = 1,
    max_restarts: int = 10,
    preload: str = "",
    scheduler: str = "local_cwd",
    scheduler_args: dict[str, Any] = {},  # noqa: B006 - as above
    env: dict[str, Any] = {},  # noqa: B006 - as above
) -> None:
    """Train a model as an elastic PyTorch DDP job that goes on when a worker or node is lost.

    The job is launched through torchx. Its log lines stream into the step's log, prefixed by rank, with a progress
    line. The script finds the dataset and the folder for the model in its arguments (`{dataset}`, `{model}`) or in
    ELASTIC_DATASET_DIR and ELASTIC_OUTPUT_DIR.

    Args:
        dataset: Dataset folder of the preprocess step.
        model: Model folder: safetensors weights, torch.export program, config.
        metrics: Steps, seconds, restarts, recovery time, last training loss.
        report: Run report: loss, throughput, world size and every failure on one time axis.
        job_record: JSON record of the job: state, steps, restarts, recoveries, events.
        script: Python file to run, in the step's image. Give this or module.
        module: Module to run, as python -m. Give this or script.
        script_sha256: Checksum of the program, for the cache key and a check at the start. Empty: taken when compiled.
        arguments: Command line of the program. {dataset}, {model} and {checkpoints} become paths.
        hyperparameters: Appended as --name=value; lists and objects as JSON, true as --name, null and false left out.
        nodes: Nodes as MIN:MAX, one number, or a list of allowed sizes such as 1,2,4.
        nproc_per_node: Workers of a node.
        max_restarts: Worker failures over the whole job after which it stops.
        preload: Modules to import once, before workers are forked, separated by commas: faster starts and recoveries.
        scheduler: torchx scheduler.
        scheduler_args: Options of the scheduler.
        env: Environment of the workers.
    """
    from pathlib import Path

    from elastic_runtime.launching.step import TrainOutputs, TrainRequest, train

    request = TrainRequest(
        script=script,
        module=module,
        script_sha256=script_sha256,
        arguments=arguments or [],
        hyperparameters=hyperparameters or {},
        nodes=nodes,
        nproc_per_node=nproc_per_node,
        max_restarts=max_restarts,
        preload=preload,
        scheduler=scheduler,
        scheduler_args=scheduler_args or {},
        env=env or {},
    )
    outputs = TrainOutputs(
        model=Path(model.path),
        report=Path(report.path),
        job_record=Path(job_record.path),
        work_dir=Path(model.path).parent / "job",
    )
    for name, value in train(request, outputs, dataset=dataset.path).items():
        metrics.log_metric(name, value)
