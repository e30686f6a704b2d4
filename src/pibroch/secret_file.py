"""A file with a secret: who may read it, and how it is read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pibroch.errors import ConfigError

MAX_SECRET_BYTES = 4096
OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""What the group and everybody may do."""


def read_secret_file(path: Path, what: str, forbidden_mode: int = OTHERS) -> bytes:
    """The first bytes of a file, without the white space around them.

    More than a secret may have, if it is that long.

    Args:
        path: of the file.
        what: it is for.
        forbidden_mode: bits that its mode must not have.

    Raises:
        ConfigError: when it is no regular file of this user or of root, cannot be read, or has such
            a bit.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise ConfigError(
            f"{what}: {path} cannot be read ({error.strerror})", "a file with the secret"
        ) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{what}: {path} is no regular file", "a file with the secret")
        has_owners = hasattr(os, "getuid")  # not on every system
        if has_owners and (
            status.st_mode & forbidden_mode or status.st_uid not in (os.getuid(), 0)
        ):
            raise ConfigError(
                f"{what}: {path} with mode {stat.S_IMODE(status.st_mode):o}, owner {status.st_uid}",
                "a file that only this user can read",
                f"chmod 600 {path}",
            )
        return os.read(descriptor, MAX_SECRET_BYTES + 1).strip()
    finally:
        os.close(descriptor)
