"""The file with the job's secret."""

from __future__ import annotations

import os
import stat

import pytest

from elastic_runtime.errors import InputError, MissingFileError, NameInUseError
from elastic_runtime.membership.secret import create_secret, read_secret


def test_a_secret_is_made_once_for_its_owner_alone(tmp_path):
    path = tmp_path / "secret"
    old = os.umask(0)
    try:
        secret = create_secret(path)
    finally:
        os.umask(old)
    assert len(secret) == 32
    assert read_secret(path) == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == secret.hex() + "\n"
    with pytest.raises(NameInUseError, match="there is one already"):
        create_secret(path)
    assert read_secret(path) == secret
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]
    assert create_secret(tmp_path / "other") != secret


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o602, 0o620])
def test_a_secret_that_others_can_get_at_is_refused(tmp_path, mode):
    path = tmp_path / "secret"
    create_secret(path)
    path.chmod(mode)
    with pytest.raises(InputError, match=f"mode {mode:04o} lets others at it: replace it, with mode 0600"):
        read_secret(path)


@pytest.mark.parametrize("content", ["", "abc", "0" * 63 + "\n", "g" * 64, "0" * 65, "0" * 64 + "\n\n"])
def test_a_file_that_holds_no_secret_is_refused(tmp_path, content):
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text(content)
    with pytest.raises(InputError, match="does not hold 64 hex digits"):
        read_secret(path)


def test_what_is_no_file_is_named(tmp_path):
    with pytest.raises(MissingFileError, match="no such file"):
        read_secret(tmp_path / "none")
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(InputError, match="is not a file"):
        read_secret(tmp_path / "fifo")
    with pytest.raises(InputError, match="choose a folder that can be written"):
        create_secret(tmp_path / "none" / "secret")
