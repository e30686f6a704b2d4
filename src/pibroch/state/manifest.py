"""What a checkpoint says of itself: ``manifest.json``, which also holds its own checksum."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from pibroch import untrusted
from pibroch.config import RunConfig
from pibroch.config.base import Section
from pibroch.data.schema import Schema
from pibroch.errors import CheckpointError, DamagedCheckpointError
from pibroch.state.files import CHECKPOINT, FileDigest
from pibroch.state.monitor import Monitor
from pibroch.state.tables import MIN_ITEM_BYTES, SavedTable

FORMAT_VERSION = 3
"""Of what is written; 2, which had no ``is_delta``, is read too."""
MANIFEST = "manifest.json"
_EITHER = ("config", "program")
"""Who wrote it: a run of the house's, or a program of one's own."""


class Progress(Section):
    """How far a run is.

    Attributes:
        step: the last one.
        loader: the loader's state after its batch.
        monitor: of evaluations.
        event_time: until when records were trained on, in milliseconds since 1970, see
            :mod:`pibroch.data.event_clock`; ``None`` where records have none.
    """

    step: int = Field(default=0, ge=0)
    loader: dict[str, object] | None = None
    monitor: Monitor = Monitor()
    event_time: int | None = None


class ProgramState(Section):
    """What a program of one's own has saved besides tables and tensors, see :func:`pibroch.save`.

    Attributes:
        embedding_step: updates of rows so far.
        num_ranks: that saved it, each its random state.
        rates: of each table, its group's settings in the rows' optimizer, such as ``lr``.
        parts: by name (``model``, ``optimizer@wide``, ...), plain values that name tensors in the
            part's file.
        extra: what the program wanted to keep.
    """

    embedding_step: int = Field(ge=0)
    num_ranks: int = Field(ge=1)
    rates: dict[str, dict[str, Any]]
    parts: dict[str, dict[str, Any] | None]
    extra: Any = None


class Manifest(Section):
    """What a checkpoint says of itself.

    Attributes:
        increments: incremental checkpoints since the last full one, this one included; 0 for a full
            one.
        dataset_fingerprint: of the data that it was trained on: schema and vocabularies; empty
            where nobody said.
        dataset_digest: of all its contents; ``None`` in checkpoints that do not have it.
        data_schema: the dataset's schema; serving encodes requests with it. Empty where nobody
            said.
        tables: by name, with their parts.
        run_config: ``config`` in the file: of a run of ``pibroch train``.
        program: of a program of one's own.
        rests_on_seed: whether rows that no part has are as the seed made them; then only the run
            can go on from it.
        learning_rates: in the last step, of ``dense`` layers and ``embedding`` rows.
        files: every other file with its size and checksum.
    """

    model_config = ConfigDict(serialize_by_alias=True)

    format_version: int
    increments: int
    dataset_fingerprint: str = ""
    dataset_digest: str | None = None
    data_schema: dict[str, Any] = Field(default_factory=dict)
    tables: dict[str, SavedTable]
    run_config: RunConfig | None = Field(None, alias="config")
    program: ProgramState | None = None
    progress: Progress
    rests_on_seed: bool = False
    learning_rates: dict[str, float]
    files: dict[untrusted.InnerPath, FileDigest]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name, table in self.tables.items():
            sizes = {}
            for part in table.parts:
                if part.file not in self.files:
                    raise ValueError(
                        f"table {name!r} in files of the checkpoint, not {part.file!r}"
                    )
                if not part.is_delta:
                    sizes[part.file] = self.files[part.file].size_bytes
            if not self.rests_on_seed and sum(sizes.values()) < MIN_ITEM_BYTES * table.num_cells:
                raise ValueError(f"table {name!r} with files as large as its {table}")
        rates = self.tables if self.program is None else self.program.rates
        if self.tables.keys() - rates.keys() or "embedding" not in self.learning_rates:
            raise ValueError("a learning rate of each table, and one called `embedding`")
        return self

    @property
    def config(self) -> RunConfig:
        """The configuration of the run.

        Raises:
            CheckpointError: for a checkpoint that a program of one's own saved.
        """
        if self.run_config is None:
            raise CheckpointError(
                "a checkpoint that pibroch.save wrote, which knows no recipe, model or data set",
                "one that pibroch train wrote",
                "load it by pibroch.load in the program that made it",
            )
        return self.run_config

    def write(self, folder: Path) -> None:
        """Write ``manifest.json``.

        Raises:
            ConfigError: for more in ``program`` than a manifest takes.
            OSError: when the disk refuses.
        """
        content = self.model_dump(mode="json")
        content = {
            key: value for key, value in content.items() if key not in _EITHER or value is not None
        }
        for table in content["tables"].values():
            if table["index"] is None:
                del table["index"]
        if not self.rests_on_seed:
            del content["rests_on_seed"]
        if self.progress.event_time is None:
            del content["progress"]["event_time"]
        untrusted.write_manifest(folder / MANIFEST, content)


def read_manifest(folder: Path, to_go_on: bool = False) -> Manifest:
    """The manifest of a checkpoint, itself checked.

    Args:
        folder: the checkpoint.
        to_go_on: whether the run is to go on from it, whose seed makes the rows that it does not
            have.

    Raises:
        DamagedCheckpointError: when there is none, or when it is damaged.
        CheckpointError: when it is of another format, or lacks rows.
    """
    manifest = _read(folder)
    if manifest.rests_on_seed and not to_go_on:
        raise CheckpointError(
            f"{folder}, which lacks all rows that were not updated before step"
            f" {manifest.progress.step}",
            "a whole checkpoint",
            "name one in the run's checkpoints/; pibroch train alone goes on from this one",
        )
    return manifest


def _read(folder: Path) -> Manifest:
    if not (folder / MANIFEST).exists():
        do = "name a folder that pibroch train or pibroch.save wrote"
        raise DamagedCheckpointError(f"no {folder / MANIFEST}", "a checkpoint folder", do)
    content, _ = untrusted.read_manifest(folder, MANIFEST, CHECKPOINT)
    if content.get("format_version") not in (2, FORMAT_VERSION):
        raise CheckpointError(
            f"{folder} of format {str(content.get('format_version'))[:20]}",
            f"format 2 or {FORMAT_VERSION}",
            "load it with the version of pibroch that wrote it",
        )
    if content["format_version"] == 2:
        _mark_deltas(content)
    manifest: Manifest = untrusted.checked(Manifest, content, str(folder / MANIFEST), CHECKPOINT)
    return manifest


def schema_of(manifest: Manifest) -> Schema:
    """The schema of the data that a checkpoint was trained on.

    Raises:
        CheckpointError: when this version does not understand it.
    """
    try:
        return Schema.of_manifest(manifest.data_schema)
    except ValidationError as error:
        raise CheckpointError(
            f"a checkpoint whose schema is not understood: {error.errors()[0]['msg']}",
            "a schema of this version",
            "load it with the version of pibroch that wrote it",
        ) from error


def _mark_deltas(content: dict[str, Any]) -> None:
    """Say of each part whether it is a delta, as format 3 does.

    In format 2 those are the parts that list their rows.
    """
    try:
        for table in content["tables"].values():
            for part in table["parts"]:
                part["is_delta"] = part["rows"] is None
    except (KeyError, TypeError, AttributeError) as error:
        raise CHECKPOINT("a manifest whose `tables` are none", "tables with parts") from error
