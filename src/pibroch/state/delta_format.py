"""What a delta says of itself: ``delta.json``, which also holds its own checksum.

The layout: docs/export.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from pibroch.config.base import Section
from pibroch.errors import CheckpointError
from pibroch.state.export_format import (
    DENSE,
    EXPORT,
    MOST_ROWS,
    VERSION_NAME,
    is_export,
    read_checked,
    write_checked,
)
from pibroch.state.export_format import MANIFEST as EXPORT_MANIFEST
from pibroch.state.files import FileDigest
from pibroch.untrusted import InnerPath, read_manifest

FORMAT = "pibroch-delta"
MANIFEST = "delta.json"
FORMAT_VERSION = 2
CHANGED = "rows.safetensors"
"""The file of rows, where there is one."""
ROW_IDS = "row_ids"
ROWS = "rows"
DELETED = "deleted"
"""Tensors in a file of rows."""

ORIGIN = "origin.json"


class DeltaBase(Section):
    """What a delta begins at.

    Attributes:
        version: of it.
        sha256: the checksum in its manifest.
    """

    version: str
    sha256: str


class DeltaRows(Section):
    """A file of rows; no row is in two of them.

    Attributes:
        file: inside the delta.
        num_rows: that changed.
        num_deleted: that are no more: lookups find zeros.
    """

    file: InnerPath
    num_rows: int = Field(ge=0, le=MOST_ROWS)
    num_deleted: int = Field(default=0, ge=0, le=MOST_ROWS)


class DeltaManifest(Section):
    """What is in a delta.

    Attributes:
        format: always ``pibroch-delta``.
        format_version: of the layout; 1, which had one file of rows, is read too.
        version: a name of the weights that base and delta are together.
        base: an export, or another delta.
        step: of training, after which the weights were saved.
        time: seconds since 1970 when they were as they are here; ``None`` where nobody knows.
        made_by: version of pibroch.
        rows: files of rows.
        bf16: whether the dense model computes in bfloat16.
        files: every other file with its size and checksum.
    """

    format: Literal["pibroch-delta"] = "pibroch-delta"
    format_version: Literal[2] = 2
    version: str = Field(pattern=f"^{VERSION_NAME}$")
    base: DeltaBase
    step: int = Field(ge=0)
    time: float | None = Field(default=None, ge=0)
    made_by: str
    rows: tuple[DeltaRows, ...]
    bf16: bool
    files: dict[InnerPath, FileDigest]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        names = [each.file for each in self.rows]
        if len(set(names)) < len(names) or not {DENSE, *names} <= self.files.keys():
            raise ValueError("dense layers and rows in files of the delta, each named once")
        return self

    @property
    def num_rows(self) -> int:
        """That changed."""
        return sum(each.num_rows for each in self.rows)

    @property
    def num_deleted(self) -> int:
        """That are no more."""
        return sum(each.num_deleted for each in self.rows)

    def write(self, folder: Path) -> None:
        """Write ``delta.json``.

        Raises:
            OSError: when the disk refuses.
        """
        write_checked(folder / MANIFEST, self)


class Origin(Section):
    """From which files of a full checkpoint an export was made; lies beside the export.

    With it a delta need not compare all rows.

    Attributes:
        export_sha256: the checksum in the export's manifest.
        tables: checksums of the checkpoint's files of tables, by name.
    """

    format: Literal["pibroch-origin"] = "pibroch-origin"
    format_version: Literal[1] = 1
    export_sha256: str
    tables: dict[str, str]


def is_delta(path: Path) -> bool:
    """Whether a folder is a delta, whole or not."""
    return (path / MANIFEST).is_file()


def is_exported(path: Path) -> bool:
    """Whether a folder is an export or a delta, whole or not."""
    return is_export(path) or is_delta(path)


def read_delta(folder: Path) -> tuple[DeltaManifest, str]:
    """The manifest of a delta, itself checked, and its checksum.

    Raises:
        DamagedCheckpointError: when there is none, or when it is damaged.
        CheckpointError: when it is of another layout.
    """
    return read_checked(folder, MANIFEST, FORMAT, DeltaManifest, {1: _of_first, 2: dict})


def _of_first(content: dict[str, Any]) -> dict[str, Any]:
    """A manifest of the first layout as one of today's."""
    rows = [{"file": CHANGED, "num_rows": content.get("num_rows")}]
    kept = {key: value for key, value in content.items() if key != "num_rows"}
    return {**kept, "format_version": FORMAT_VERSION, "rows": rows}


def checksum_in(folder: Path) -> str | None:
    """The checksum of an export's or a delta's manifest; ``None`` where it is not whole."""
    for name in (EXPORT_MANIFEST, MANIFEST):
        try:
            return read_manifest(folder, name, EXPORT)[1]
        except CheckpointError:
            continue
    return None


def read_origin(folder: Path, export_sha256: str) -> dict[str, str]:
    """The files that an export was made from, by name with their checksums.

    None where that is not known.
    """
    try:
        origin, _ = read_checked(folder, ORIGIN, "pibroch-origin", Origin)
    except CheckpointError:  # whatever is wrong with it: all rows are compared then
        return {}
    return origin.tables if origin.export_sha256 == export_sha256 else {}
