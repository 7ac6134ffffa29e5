"""The torchx AppDef of a job: the one code path behind the CLI, the torchx component and the pipeline step."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace

import torchx.specs as specs

from elastic_runtime import __version__
from elastic_runtime.errors import InputError
from elastic_runtime.jobs.spec import JobSpec, environment_of
from elastic_runtime.names import MAX_LENGTH, valid_name

__all__ = ["ORIGINAL_NAME", "ROLE", "build_appdef", "check_appdef"]

ROLE = "elastic"
"""Name of the only role of our jobs."""

ORIGINAL_NAME = "kfp-elastic/original-name"
"""Metadata key that keeps a name which had to be changed to be valid."""

_TORCHX_SUFFIX = 16
"""Room for the `-` and random id that torchx appends to an application's name."""

_PYTHON = "KFP_ELASTIC_PYTHON"
_PARENT = "KFP_ELASTIC_PARENT"
# On this machine the launcher's own interpreter runs the job, wherever PATH points; an image has its own python3.
# The parent's pid is only known, and only meaningful, on this machine too.
_START = (
    f'exec "$${{{_PYTHON}:-python3}}" -P -m elastic_runtime.processes.guard --grace 8 '
    f'--parent "$${{{_PARENT}:-0}}" -- "$${{{_PYTHON}:-python3}}" -P -m elastic_runtime.supervisor "$$@"'
)
_OTHER_DOLLAR = re.compile(r"\$(?!\{(?:img_root|app_id|replica_id|rank0_env|base_img_root)\})")
_PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?")


def build_appdef(
    spec: JobSpec,
    *,
    name: str | None = None,
    image: str | None = None,
    resource: specs.Resource | None = None,
    metadata: Mapping[str, str] | None = None,
    mounts: list[specs.BindMount | specs.VolumeMount | specs.DeviceMount] | None = None,
) -> specs.AppDef:
    """Return the AppDef of `spec`; nothing given is changed, and every call returns a new one.

    `name` is any text for the application's name; by default it is the job's name or the program's. Without a
    job name in `spec`, the job takes the unique id that torchx makes of the application's name.

    Its one replica supervises all nodes of the job on the machine where it runs. Macros such as `${app_id}` in
    the program's arguments are substituted by torchx; any other `$` arrives as it is.
    """
    os.environ[_PYTHON] = sys.executable
    os.environ[_PARENT] = str(os.getpid())
    wanted = name or spec.name or spec.program.label
    valid = valid_name(wanted, limit=MAX_LENGTH - _TORCHX_SUFFIX)
    details = dict(metadata or {})
    if valid != wanted:
        details.setdefault(ORIGINAL_NAME, wanted)
    options = [
        f"--name={spec.name or specs.macros.app_id}",
        f"--app-id={specs.macros.app_id}",
        f"--nodes={spec.nodes}",
        f"--nproc-per-node={spec.nodes.workers}",
        f"--max-restarts={spec.max_restarts}",
        f"--grace={spec.grace}",
        f"--heartbeat={spec.heartbeat}",
        f"--wait-limit={spec.wait_limit}",
    ]
    options += [f"--state-dir={_plain(spec.state_dir)}"] if spec.state_dir else []
    options += [f"--output-dir={_plain(spec.output_dir)}"] if spec.output_dir else []
    options += [f"--preload={','.join(spec.preload)}"] if spec.preload else []
    program = spec.program
    options += [f"--script={_plain(program.script)}"] if program.script else [f"--module={program.module}"]
    return specs.AppDef(
        name=valid,
        roles=[
            specs.Role(
                name=ROLE,
                image=image or f"kfp-elastic:{__version__}",
                entrypoint="/bin/sh",
                args=["-c", _START, "elastic", *options, "--", *(_plain(text) for text in spec.arguments)],
                env=dict(spec.environment),
                num_replicas=1,
                resource=resource or specs.Resource(cpu=1, gpu=0, memMB=1024),
                mounts=list(mounts or []),
            )
        ],
        metadata=details,
    )


def _plain(text: str | None) -> str:
    """Escape each `$` that does not start a torchx macro."""
    return _OTHER_DOLLAR.sub("$$", text or "")


def check_appdef(app: specs.AppDef) -> specs.AppDef:
    """Return a checked copy of `app`, also one that another component built: environment values become text.

    Raises `InputError` that names the role for a duplicate role name, an environment value that is no text or
    number, or a port name over 15 characters.
    """
    seen: set[str] = set()
    roles = []
    for role in app.roles:
        if role.name in seen:
            raise InputError(f"role {role.name!r} is there twice: each role of a job needs its own name")
        seen.add(role.name)
        try:
            environment = environment_of(role.env)
        except InputError as error:
            raise InputError(f"role {role.name!r}: {error}") from error
        for port in role.port_map:
            if not _PORT_NAME.fullmatch(port):
                raise InputError(
                    f"role {role.name!r}: port name {port!r}: at most 15 lower-case letters, digits and '-'"
                )
        roles.append(replace(role, env=environment, args=list(role.args), port_map=dict(role.port_map)))
    if not roles:
        raise InputError(f"application {app.name!r} has no role")
    return replace(app, roles=roles, metadata=dict(app.metadata))
