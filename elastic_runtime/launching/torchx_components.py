"""torchx components: `torchx run -s SCHEDULER elastic.ddp -j [MIN:]MAXxK --script SCRIPT [-- ARGS …]`.

torchx reads these signatures and docstrings to make the command line, so they use its argument types.
"""

import torchx.specs as specs
from torchx.specs.finder import ComponentValidationException

from elastic_runtime.errors import InputError
from elastic_runtime.jobs.nodes import parse_j
from elastic_runtime.jobs.spec import JobSpec, environment_of, preload_of, program_of
from elastic_runtime.launching.appdef import build_appdef

__all__ = ["ddp"]


class _ComponentInputError(InputError, ComponentValidationException):  # type: ignore[misc]  # torchx has no types
    """An `InputError` that the torchx command line prints as one message instead of a traceback."""


def ddp(
    *script_args: str,
    script: str | None = None,
    m: str | None = None,
    j: str = "1x1",
    name: str = "",
    image: str = "",
    max_restarts: int = 10,
    grace: float = 3.0,
    heartbeat: float = 5.0,
    wait_limit: float = 600.0,
    state_dir: str = "",
    preload: str = "",
    cpu: int = 1,
    gpu: int = 0,
    memMB: int = 1024,
    h: str | None = None,
    env: dict[str, str] | None = None,
    metadata: dict[str, str] | None = None,
    mounts: list[str] | None = None,
) -> specs.AppDef:
    """Elastic PyTorch DDP: keeps training while workers come and go, restarts on failure.

    Args:
        script_args: arguments of the script or module
        script: Python file to run
        m: module to run, as python -m
        j: [MIN:]MAXxK, nodes and workers of each; the job goes on while MIN nodes are left
        name: job name, by default the script's; any text, made valid
        image: container image that has kfp-elastic and the script (not used by local_cwd)
        max_restarts: worker failures over the whole job after which it stops
        grace: seconds between SIGTERM and SIGKILL when workers are stopped
        heartbeat: seconds after which an agent that says nothing is taken for lost
        wait_limit: seconds for which a job below its minimum waits for workers; then it fails
        state_dir: folder for logs, events, checkpoints and the record
        preload: modules to import once, before workers are forked (A,B)
        cpu: processors of a node
        gpu: GPUs of a node
        memMB: memory of a node in MB
        h: a registered named resource, instead of cpu, gpu and memMB
        env: environment of the workers (NAME1=value1,NAME2=value2)
        metadata: metadata for the scheduler (KEY1=value1,KEY2=value2)
        mounts: mounts in torchx's notation
    """
    try:
        # With an image the program may be only in there.
        spec = JobSpec(
            nodes=parse_j(j),
            program=program_of(script, m, present=not image),
            arguments=script_args,
            max_restarts=max_restarts,
            grace=grace,
            heartbeat=heartbeat,
            wait_limit=wait_limit,
            state_dir=state_dir or None,
            environment=environment_of(env),
            preload=preload_of(preload),
        )
    except InputError as error:
        raise _ComponentInputError(str(error)) from error
    return build_appdef(
        spec,
        name=name or None,
        image=image or None,
        resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memMB, h=h),
        metadata=metadata,
        mounts=specs.parse_mounts(mounts) if mounts else None,
    )
