"""Files that are either whole or absent: checksums, flushing, and links instead of copies."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from pibroch.errors import DamagedCheckpointError
from pibroch.storage import storage_errors
from pibroch.untrusted import Refusal, open_file

CHECKPOINT = Refusal(DamagedCheckpointError, "use another checkpoint or export")
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
    """As :func:`~pibroch.storage.storage_errors`, while a ``kind`` of thing is saved."""
    return storage_errors(path, f"a disk with room for the {kind}", do)


def saved_steps(folder: Path) -> list[int]:
    """Steps of which a folder has checkpoints, rising; what else lies there is left alone."""
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step-{step:08d}"


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
