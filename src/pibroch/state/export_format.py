"""What an export says of itself: ``export.json``, which also holds its own checksum.

The layout: docs/export.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from pibroch import untrusted
from pibroch.config.base import Section
from pibroch.config.model import ModelConfig
from pibroch.data.schema import SavedSchema
from pibroch.errors import CheckpointError, DamagedCheckpointError
from pibroch.state.files import FileDigest

FORMAT = "pibroch-export"
Layouts = Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]]
FORMAT_VERSIONS: Layouts = {1: dict, 2: dict}
"""Layouts that are read; the second one is that of exports with tables of raw ids."""
MANIFEST = "export.json"
DENSE = "dense.safetensors"
VOCABULARIES = "vocabularies.safetensors"
IDS = "ids.safetensors"
"""Which row an id has, where tables have raw ids; see :mod:`pibroch.state.exported_ids`."""
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
        has_ids: whether its ids have rows by :data:`IDS`; else they are rows. Only then may files
            lack some of its rows.
        has_unknown_row: whether ids without a row read its first one; else they are absent.
    """

    name: str
    first_row: int = Field(ge=0, le=MOST_ROWS)
    num_rows: int = Field(ge=1, le=MOST_ROWS)
    has_ids: bool = False
    has_unknown_row: bool = False

    @model_serializer(mode="wrap")
    def _of_its_layout(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = fields(self)
        for name in ("has_ids", "has_unknown_row"):
            if not content[name]:
                del content[name]
        return content


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
        format_version: of the layout: 2 with tables of raw ids, else 1.
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
        logit_labels: labels whose loss gives no probabilities, so that scores are logits.
        files: every other file with its size and checksum.
    """

    format: Literal["pibroch-export"] = "pibroch-export"
    format_version: Literal[1, 2] = 1
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
    logit_labels: tuple[str, ...] = ()
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
            if table.has_unknown_row and not table.has_ids:
                raise ValueError(f"ids of table {feature.name!r}, which has a row for unknown ones")
            if not table.has_ids and feature.fixed_num_rows not in (None, table.num_rows):
                raise ValueError(f"{feature.fixed_num_rows} rows of table {feature.name!r}")
        has_ids = any(table.has_ids for table in self.tables)
        if has_ids != (self.format_version == 2) or (has_ids and IDS not in self.files):
            raise ValueError("layout 2 and a file of ids where tables have raw ids")
        ends = [table.first_row + table.num_rows for table in self.tables]
        if [table.first_row for table in self.tables] != [0, *ends[:-1]]:
            raise ValueError("tables end to end")
        if not self._has_all_rows():
            raise ValueError("shards with the tables' rows, end to end")
        if odd := [shard.file for shard in self.shards if shard.file not in self.files]:
            raise ValueError(f"shards in files of the export, not {odd[0]!r}")
        return self

    def _has_all_rows(self) -> bool:
        """Whether the rows of files rise, and none lacks but of tables of raw ids."""
        num_rows = sum(table.num_rows for table in self.tables)
        ends = [0, *(shard.first_row + shard.num_rows for shard in self.shards)]
        starts = [*(shard.first_row for shard in self.shards), num_rows]
        gaps = list(zip(ends, starts, strict=True))
        return all(end <= start for end, start in gaps) and not any(
            end < table.first_row + table.num_rows and table.first_row < start
            for end, start in gaps
            if end < start
            for table in self.tables
            if not table.has_ids
        )

    def write(self, folder: Path) -> None:
        """Write ``export.json``.

        Raises:
            OSError: when the disk refuses.
        """
        write_checked(folder / MANIFEST, self)


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
    layouts: Layouts | None = None,
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
    layouts = FORMAT_VERSIONS if layouts is None else layouts
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
