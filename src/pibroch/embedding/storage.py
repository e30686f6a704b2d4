"""Files that are either whole or absent: checksums, flushing, and links instead of copies."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pibroch.errors import DamagedCheckpointError, StorageError

GO_ON = "free some space and go on from the last checkpoint (--resume); earlier ones are untouched"


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What a file must look like."""

    size_bytes: int
    sha256: str


@contextmanager
def explained_refusal(path: Path, kind: str = "checkpoint", do: str = GO_ON) -> Iterator[None]:
    """Turns what the disk refuses while ``path`` is saved into an error that says what to do.

    Args:
        path: a folder or a file.
        kind: what it is to be, as users call it.
        do: what they can do.

    Raises:
        StorageError: instead of any OSError.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{error.strerror or error} while saving {path}", f"a disk with room for the {kind}", do
        ) from error


def temporary_name(folder: Path) -> str:
    """Name of the folder, beside ``folder``, in which this process prepares it before it is renamed."""
    return f".{folder.name}.{os.getpid()}.tmp"


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders of killed processes inside ``folder``."""
    for path in folder.glob(".*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def link_or_copy(source: Path, target: Path) -> None:
    """Make ``target`` the same file as ``source``, or a copy where the file system takes no links.

    Raises:
        OSError: when the disk refuses.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def verify_file(path: Path, digest: FileDigest) -> None:
    """Read a file once and compare.

    Raises:
        DamagedCheckpointError: when it is missing, cut short, changed or unreadable; names the file.
    """
    do = "use another checkpoint or export"
    if not path.is_file():
        raise DamagedCheckpointError(f"no {path}", "the file that the manifest names", do)
    try:
        size = path.stat().st_size
        if size != digest.size_bytes:
            need = f"{digest.size_bytes} bytes, as its manifest says"
            raise DamagedCheckpointError(f"{path} of {size} bytes", need, do)
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DamagedCheckpointError(
            f"{path}, unreadable: {error.strerror}", "a readable file", do
        ) from error
    if sha256 != digest.sha256:
        raise DamagedCheckpointError(
            f"{path}, whose bytes changed since it was saved", "an undamaged file", do
        )


def flush_to_disk(path: Path) -> None:
    """Block until a file's bytes, or a folder's names, are on the disk; Windows has no such thing for folders."""
    is_windows = sys.platform == "win32"
    if is_windows and path.is_dir():
        return
    descriptor = os.open(
        path, os.O_RDWR if is_windows else os.O_RDONLY
    )  # Windows flushes what may be written to
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
