"""Files that are either whole or absent: checksums, flushing, and links instead of copies."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from pibroch.data.storage import storage_errors
from pibroch.errors import DamagedCheckpointError
from pibroch.untrusted import Refusal, open_file

CHECKPOINT = Refusal(
    DamagedCheckpointError,
    "use another checkpoint or export",
)
"""How damaged files of checkpoints are refused."""
GO_ON = "free some space and go on from the last checkpoint (--resume); earlier ones are untouched"


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What a file must look like."""

    size_bytes: int
    sha256: str


def explained_refusal(
    path: Path, kind: str = "checkpoint", do: str = GO_ON
) -> AbstractContextManager[None]:
    """As :func:`~pibroch.data.storage.storage_errors`, while a ``kind`` of thing is saved."""
    return storage_errors(path, f"a disk with room for the {kind}", do)


def temporary_name(folder: Path) -> str:
    """The name, beside ``folder``, under which this process prepares it."""
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


def verify_file(folder: Path, name: str, digest: FileDigest, refusal: Refusal = CHECKPOINT) -> None:
    """Read a file of a folder once and compare.

    Raises:
        DamagedCheckpointError: (or the refusal) when it is missing, cut short, changed or
            unreadable; names the file.
    """
    path = folder / name
    with open_file(folder, name, refusal) as file:
        _check_size(path, file, digest, refusal)
        try:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise refusal(f"{path}, unreadable: {error.strerror}", "a readable file") from error
    if sha256 != digest.sha256:
        raise refusal(f"{path}, whose bytes changed since it was saved", "an undamaged file")


def verify_files(folder: Path, files: Mapping[str, FileDigest]) -> None:
    """Verify some files of a checkpoint.

    Raises:
        DamagedCheckpointError: as :func:`verify_file`.
    """
    check_sizes(folder, files)
    for name, digest in files.items():
        verify_file(folder, name, digest)


def check_sizes(
    folder: Path, files: Mapping[str, FileDigest], refusal: Refusal = CHECKPOINT
) -> None:
    """Look whether files are there in their sizes, before any of them is read.

    Raises:
        DamagedCheckpointError: (or the refusal) when one is missing, or of another size.
    """
    for name, digest in files.items():
        with open_file(folder, name, refusal) as file:
            _check_size(folder / name, file, digest, refusal)


def _check_size(path: Path, file: BufferedReader, digest: FileDigest, refusal: Refusal) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != digest.size_bytes:
        raise refusal(f"{path} of {size} bytes", f"{digest.size_bytes} bytes, as its manifest says")


def flush_to_disk(path: Path) -> None:
    """Block until a file's bytes, or a folder's names, are on the disk.

    Windows has no such thing for folders.
    """
    is_windows = sys.platform == "win32"
    if is_windows and path.is_dir():
        return
    # Windows flushes what may be written to
    descriptor = os.open(path, os.O_RDWR if is_windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
