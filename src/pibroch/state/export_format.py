"""What an export says of itself: ``export.json``, which also holds its own checksum.

The layout: docs/export.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from pibroch import untrusted
from pibroch.config.base import Section
from pibroch.config.model import ModelConfig
from pibroch.data.schema import SavedSchema
from pibroch.errors import CheckpointError, DamagedCheckpointError
from pibroch.state.files import FileDigest

FORMAT = "pibroch-export"
FORMAT_VERSION = 1
MANIFEST = "export.json"
DENSE = "dense.safetensors"
VOCABULARIES = "vocabularies.safetensors"
ROWS = "rows"
"""The tensor in a shard's file."""

WRITE_AGAIN = (
    "free some space, or choose another place, and export again; what was there before is untouched"
)
"""What to do when the disk refuses."""
EXPORT = untrusted.Refusal(DamagedCheckpointError, "export the checkpoint again")
"""How damaged exports and deltas are refused."""

MOST_ROWS = 1 << 48
MOST_DIM = 1 << 20
VERSION_NAME = "[A-Za-z0-9._-]{1,80}"
ExportDtype = Literal["float32", "float16", "int8"]
AnyManifest = TypeVar("AnyManifest", bound=Section)


class ExportedTable(Section):
    """Where a table's rows lie among those of all tables.

    Attributes:
        name: the feature that reads it, alone or with those that share it.
        first_row: of the table.
        num_rows: of the table.
    """

    name: str
    first_row: int = Field(ge=0, le=MOST_ROWS)
    num_rows: int = Field(ge=1, le=MOST_ROWS)


class RowShard(Section):
    """A file of consecutive rows.

    Attributes:
        file: inside the export.
        first_row: of the file.
        num_rows: in the file.
    """

    file: str
    first_row: int = Field(ge=0, le=MOST_ROWS)
    num_rows: int = Field(ge=1, le=MOST_ROWS)

    def meets(self, rows: range) -> bool:
        """Whether some of these rows are in it."""
        return self.first_row < rows.stop and rows.start < self.first_row + self.num_rows


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
    step: int = Field(ge=0)
    made_by: str
    dtype: ExportDtype
    dim: int = Field(ge=1, le=MOST_DIM)
    tables: tuple[ExportedTable, ...]
    shards: tuple[RowShard, ...]
    schema_: SavedSchema = Field(alias="schema")
    fingerprint: str
    model: ModelConfig
    bf16: bool
    files: dict[untrusted.InnerPath, FileDigest]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        names = [table.name for table in self.tables]
        if sorted(names) != sorted(self.schema_.readers):
            raise ValueError(
                f"a table for each of the features {', '.join(self.schema_.readers)[:200]}"
            )
        for feature in self.schema_.owners:
            table = self.tables[names.index(feature.name)]
            if feature.fixed_num_rows not in (None, table.num_rows):
                raise ValueError(f"{feature.fixed_num_rows} rows of table {feature.name!r}")
        if _end(self.tables) is None or _end(self.tables) != _end(self.shards):
            raise ValueError("tables and shards with the same rows, both end to end")
        if odd := [shard.file for shard in self.shards if shard.file not in self.files]:
            raise ValueError(f"shards in files of the export, not {odd[0]!r}")
        return self

    def write(self, folder: Path) -> None:
        """Write ``export.json``.

        Raises:
            OSError: when the disk refuses.
        """
        write_checked(folder / MANIFEST, self)


def _end(parts: Sequence[ExportedTable | RowShard]) -> int | None:
    """Rows of parts that lie end to end; ``None`` for others."""
    end = 0
    for part in parts:
        if part.first_row != end:
            return None
        end += part.num_rows
    return end


def is_export(path: Path) -> bool:
    """Whether a folder is an export, whole or not."""
    return (path / MANIFEST).is_file()


def write_checked(path: Path, section: Section) -> None:
    """Write a manifest with its checksum.

    Raises:
        OSError: when the disk refuses.
    """
    untrusted.write_manifest(path, section.model_dump(mode="json", by_alias=True))


def read_checked(
    folder: Path,
    name: str,
    of_format: str,
    kind: type[AnyManifest],
    layouts: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] | None = None,
) -> tuple[AnyManifest, str]:
    """A manifest, itself checked, and its checksum.

    Args:
        folder: that has it.
        name: of the file.
        of_format: which it must say.
        kind: of manifest.
        layouts: of each version that is understood, what makes today's of it.

    Raises:
        DamagedCheckpointError: when there is none, or when it is damaged.
        CheckpointError: when it is of another layout.
    """
    content, sha256 = untrusted.read_manifest(folder, name, EXPORT)
    layouts = layouts or {FORMAT_VERSION: dict}
    version = content.get("format_version")
    if content.get("format") != of_format or type(version) is not int or version not in layouts:
        got = f"{content.get('format')} {version}"
        raise CheckpointError(
            f"{folder} of format {got[:80]}",
            f"{of_format} {' or '.join(map(str, layouts))}",
            "export the checkpoint again with this version of pibroch",
        )
    today = layouts[version](content)
    return untrusted.checked(kind, today, str(folder / name), EXPORT), sha256


def read_export(folder: Path) -> ExportManifest:
    """The manifest of an export, itself checked.

    Raises:
        DamagedCheckpointError: when there is none, or when it is damaged.
        CheckpointError: when it is of another layout.
    """
    return read_checked(folder, MANIFEST, FORMAT, ExportManifest)[0]
