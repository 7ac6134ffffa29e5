"""torchrun's backend `elastic`: its options, and what torch finds in the entry point."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_runtime.errors import InputError, MissingFileError
from elastic_runtime.membership.rendezvous import SECRET_VARIABLE, RendezvousConfig
from elastic_runtime.membership.rendezvous_host import is_loopback, is_this_machine


def parse(given: dict[str, Any], environment: dict[str, str] | None = None) -> RendezvousConfig:
    return RendezvousConfig.parse(
        given, host="localhost", port=29400, run_id="job", minimum=2, maximum=3, environment=environment or {}
    )


def test_options_are_read_as_torchrun_passes_them() -> None:
    config = parse(
        {"secret_file": "/s", "is_host": "true", "join_timeout": "60", "last_call_timeout": "0.5",
         "heartbeat": "2", "read_timeout": "30", "timeout": 900}
    )  # fmt: skip
    assert config == RendezvousConfig(
        host="localhost", port=29400, run_id="job", minimum=2, maximum=3, secret_file=Path("/s"), is_host=True,
        join_timeout=60, last_call_timeout=0.5, heartbeat=2, read_timeout=30,
    )  # fmt: skip


def test_the_secret_may_be_named_by_the_environment() -> None:
    assert parse({}, {SECRET_VARIABLE: "/from-env"}).secret_file == Path("/from-env")
    assert parse({"secret_file": "/given"}, {SECRET_VARIABLE: "/from-env"}).secret_file == Path("/given")


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, ("secret_file", "missing", SECRET_VARIABLE)),
        ({"secret_file": ""}, ("secret_file", "missing")),
        ({"secret_file": "/s", "is_host": "perhaps"}, ("is_host=perhaps", "true or false")),
        ({"secret_file": "/s", "heartbeat": "0"}, ("heartbeat=0", "above 0")),
        ({"secret_file": "/s", "join_timeout": "soon"}, ("join_timeout=soon", "seconds")),
        ({"secret_file": "/s", "last_call_timeout": "nan"}, ("last_call_timeout=nan",)),
        ({"secret_file": "/s", "last_cal": "1"}, ("last_cal", "last_call_timeout")),
    ],
)
def test_a_bad_option_is_named(given: dict[str, Any], names: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as error:
        parse(given)
    for name in names:
        assert name in str(error.value)


def test_what_only_the_c10d_backend_takes_is_no_error() -> None:
    assert parse({"secret_file": "/s", "store_type": "tcp", "keep_alive_interval": "5"}).heartbeat == 5


@pytest.mark.parametrize(
    ("host", "loopback", "here"),
    [
        ("localhost", True, True),
        ("127.0.0.1", True, True),
        ("::1", True, True),
        ("192.0.2.1", False, False),
        ("no-such-host.invalid", False, False),
    ],
)
def test_which_hosts_are_this_machine(host: str, loopback: bool, here: bool) -> None:
    assert is_loopback(host) is loopback
    assert is_this_machine(host) is here


def test_torch_finds_the_backend_by_its_entry_point(tmp_path: Path) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    with pytest.raises(MissingFileError, match="no such file"):
        get_rendezvous_handler(
            RendezvousParameters(
                "elastic", "localhost:29400", "job", 1, 2, secret_file=str(tmp_path / "none")
            )
        )


def test_the_entry_point_imports_next_to_nothing() -> None:
    """torch loads it in every program that imports torch.distributed.elastic."""
    code = (
        "import sys; import elastic_runtime.membership.rendezvous; "
        "print(*[name for name in sys.modules if name.partition('.')[0] in ('torch', 'asyncio', 'kfp', 'numpy')])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.split() == []
