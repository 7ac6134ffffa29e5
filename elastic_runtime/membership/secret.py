"""The job's secret: 32 random bytes as hex in a file that only its owner can read.

It never stands in a command line or an environment: processes are given the path of the file.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path

from elastic_runtime.errors import InputError, MissingFileError, NameInUseError

__all__ = ["SECRET_BYTES", "create_secret", "read_secret"]

SECRET_BYTES = 32
_HEX = re.compile(rb"[0-9a-f]{64}\n?")


def create_secret(path: Path) -> bytes:
    """Make a new secret, store it at `path` with mode 0600 and return its 32 bytes.

    The file appears whole or not at all. Raises `NameInUseError` if there is one already, and `InputError` if the
    folder cannot be written.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, secret.hex().encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        # A link, unlike a rename, fails when the name is taken, and unlike O_EXCL alone never shows half a file.
        os.link(temporary, path)
    except FileExistsError:
        raise NameInUseError(f"secret {str(path)!r}: there is one already: read it, or remove it") from None
    except OSError as error:
        raise InputError(
            f"secret {str(path)!r}: {error.strerror}: choose a folder that can be written"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return secret


def read_secret(path: Path) -> bytes:
    """Return the 32 bytes of the secret at `path`.

    Raises `MissingFileError` if there is none, and `InputError` if it is no secret of ours or if other users may
    read it: then it is none any more. The group may read a file of root's, which is how Kubernetes mounts a Secret.
    """
    where = f"secret {str(path)!r}"
    try:
        # Not blocking: a FIFO in its place must not hold us up.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise MissingFileError(f"{where}: no such file: give the secret file of the job") from None
    except OSError as error:
        raise InputError(f"{where}: {error.strerror}: the user of the job must be able to read it") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise InputError(f"{where}: is not a file: give the secret file of the job")
        if found.st_uid not in (0, os.geteuid()):
            raise InputError(
                f"{where}: belongs to user {found.st_uid}, not to {os.geteuid()}: run as the job's owner"
            )
        forbidden = 0o037 if found.st_uid == 0 and os.geteuid() != 0 else 0o077
        if found.st_mode & forbidden:
            raise InputError(
                f"{where}: mode {stat.S_IMODE(found.st_mode):04o} lets others at it: replace it, with mode 0600 "
                "(Kubernetes Secret: defaultMode: 0400)"
            )
        content = os.read(descriptor, 4 * SECRET_BYTES)
    finally:
        os.close(descriptor)
    if not _HEX.fullmatch(content):
        raise InputError(
            f"{where}: does not hold {2 * SECRET_BYTES} hex digits: remove it and start the job again"
        )
    return bytes.fromhex(content.decode().strip())
