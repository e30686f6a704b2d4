"""The job's secret: from an option, the environment or a file; made where one machine is enough."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pibroch.errors import ConfigError
from pibroch.secret_file import MAX_SECRET_BYTES, OTHERS, read_secret_file

SECRET_VARIABLE = "PIBROCH_RPC_SECRET"
SECRET_FILE_VARIABLE = "PIBROCH_RPC_SECRET_FILE"
MIN_SECRET_BYTES = 16


def new_secret() -> str:
    """A random secret, fit for the environment or a file."""
    return secrets.token_hex(32)


def find_secret(
    option: str | bytes | None, environ: Mapping[str, str], *, local: bool, key: str
) -> bytes:
    """The job's secret.

    Args:
        option: ``RpcBackendOptions.secret``.
        environ: the environment.
        local: whether the rendezvous shows that all workers run on this machine; only then may a
            secret be made.
        key: the rendezvous; jobs that meet elsewhere get another secret.

    Raises:
        ConfigError: when there is none and none can be made, or it is too short, or others can read
            it.
    """
    if option is not None:
        return _long_enough(
            option.encode() if isinstance(option, str) else bytes(option), "the option secret"
        )
    if environ.get(SECRET_VARIABLE):
        return _long_enough(environ[SECRET_VARIABLE].encode(), SECRET_VARIABLE)
    if environ.get(SECRET_FILE_VARIABLE):
        path = Path(environ[SECRET_FILE_VARIABLE])
        return _long_enough(
            read_secret_file(path, SECRET_FILE_VARIABLE), f"{SECRET_FILE_VARIABLE} ({path})"
        )
    if local:
        return hmac.digest(_users_secret(), key.encode(), "sha256")
    raise ConfigError(
        "no secret for workers on several machines",
        f"the same one at all of them, in {SECRET_VARIABLE}, {SECRET_FILE_VARIABLE} or"
        " RpcBackendOptions.secret",
        "make one with: python -c"
        " 'from pibroch.wire.secret import new_secret; print(new_secret())'",
    )


def _users_secret() -> bytes:
    """A random secret of this user on this machine, made by the first process that needs it."""
    directory = Path(tempfile.gettempdir()) / f"pibroch-{os.getuid()}"
    try:
        return _secret_in(directory)
    except OSError as error:
        raise ConfigError(
            f"no secret in {directory} ({error.strerror})",
            "a folder for temporary files, to make one in",
            f"set TMPDIR, or {SECRET_VARIABLE} in all workers",
        ) from error


def _secret_in(directory: Path) -> bytes:
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & OTHERS:
        raise ConfigError(
            f"{directory}, which is not a directory of this user alone",
            "a directory with mode 700 that belongs to this user",
            f"remove it, or set {SECRET_VARIABLE} in all workers",
        )
    path = directory / "secret"
    if not path.exists():
        # linked into place when complete: nobody reads half of it, and the first one wins
        complete = directory / f"secret.{os.getpid()}.{secrets.token_hex(4)}"
        with os.fdopen(os.open(complete, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(new_secret())
        with contextlib.suppress(FileExistsError):
            os.link(complete, path)
        complete.unlink()
    return _long_enough(read_secret_file(path, "this user's secret"), str(path))


def _long_enough(secret: bytes, where: str) -> bytes:
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"a secret of {len(secret)} bytes in {where}",
            f"{MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes",
            "make one with: python -c 'from pibroch.wire.secret import new_secret;"
            " print(new_secret())'",
        )
    return secret
