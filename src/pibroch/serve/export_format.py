"""What an export says of itself: ``export.json``, which also holds its own checksum. The layout: docs/export.md."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError

from pibroch.config.base import Section
from pibroch.config.model import ModelConfig
from pibroch.data.schema import SavedSchema
from pibroch.embedding.storage import FileDigest
from pibroch.errors import CheckpointError, DamagedCheckpointError

FORMAT = "pibroch-export"
FORMAT_VERSION = 1
MANIFEST = "export.json"
DENSE, VOCABULARIES = "dense.safetensors", "vocabularies.safetensors"
ROWS = "rows"
"""The tensor in a shard's file."""

WRITE_AGAIN = (
    "free some space, or choose another place, and export again; what was there before is untouched"
)
"""What to do when the disk refuses."""

VERSION_NAME = "[A-Za-z0-9._-]{1,80}"
ExportDtype = Literal["float32", "float16", "int8"]
AnyManifest = TypeVar("AnyManifest", bound=Section)


class ExportedTable(Section):
    """Where a table's rows lie among those of all tables.

    Attributes:
        name: the feature that reads it.
        first_row: of the table.
        num_rows: of the table.
    """

    name: str
    first_row: int = Field(ge=0)
    num_rows: int = Field(ge=1)


class RowShard(Section):
    """A file of consecutive rows.

    Attributes:
        file: inside the export.
        first_row: of the file.
        num_rows: in the file.
    """

    file: str
    first_row: int = Field(ge=0)
    num_rows: int = Field(ge=1)


class ExportManifest(Section):
    """What is in an export.

    Attributes:
        format: always ``pibroch-export``.
        format_version: of the layout.
        version: a name of these weights, different for others.
        step: of training, after which they were saved.
        made_by: version of pibroch.
        dtype: of the rows.
        dim: weights in a row.
        tables: in the order of their rows and of the model's features.
        shards: in the order of their rows.
        schema_: ``schema`` in the file: of the data that the model was trained on.
        fingerprint: of that data.
        model: the dense model's configuration.
        bf16: whether the dense model computes in bfloat16.
        files: every other file with its size and checksum.
    """

    format: Literal["pibroch-export"] = "pibroch-export"
    format_version: Literal[1] = 1
    version: str = Field(pattern=f"^{VERSION_NAME}$")
    step: int
    made_by: str
    dtype: ExportDtype
    dim: int = Field(ge=1)
    tables: tuple[ExportedTable, ...]
    shards: tuple[RowShard, ...]
    schema_: SavedSchema = Field(alias="schema")
    fingerprint: str
    model: ModelConfig
    bf16: bool
    files: dict[str, FileDigest]

    def write(self, folder: Path) -> None:
        """Write ``export.json``.

        Raises:
            OSError: when the disk refuses.
        """
        write_checked(folder / MANIFEST, self)


def is_export(path: Path) -> bool:
    """Whether a folder is an export, whole or not."""
    return (path / MANIFEST).is_file()


def checksum(content: Mapping[str, Any]) -> str:
    """Of a manifest without its checksum."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_checked(path: Path, section: Section) -> None:
    """Write a manifest with its checksum.

    Raises:
        OSError: when the disk refuses.
    """
    content = section.model_dump(mode="json", by_alias=True)
    content["sha256"] = checksum(content)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_checked(path: Path, of_format: str, kind: type[AnyManifest]) -> tuple[AnyManifest, str]:
    """A manifest, itself checked, and its checksum.

    Raises:
        DamagedCheckpointError: when there is none, or when it is damaged.
        CheckpointError: when it is of another layout.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        expected = content.pop("sha256")
        if expected != checksum(content):
            raise ValueError("its checksum does not match its content")
        if content.get("format") != of_format or content.get("format_version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{path.parent} of format {content.get('format')} {content.get('format_version')}",
                f"{of_format} {FORMAT_VERSION}",
                "export the checkpoint again with this version of pibroch",
            )
        return kind.model_validate(content), expected
    except FileNotFoundError as error:
        raise DamagedCheckpointError(
            f"no {path}", "a folder that `pibroch export` wrote", "check the path"
        ) from error
    except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise DamagedCheckpointError(
            f"{path}, which is damaged: {problem}",
            "an undamaged file",
            "export the checkpoint again",
        ) from error


def read_export(folder: Path) -> ExportManifest:
    """The manifest of an export, itself checked.

    Raises:
        DamagedCheckpointError: when there is none, or when it is damaged.
        CheckpointError: when it is of another layout.
    """
    return read_checked(folder / MANIFEST, FORMAT, ExportManifest)[0]
