"""A checkpoint to an export: all that serving needs in one folder, there whole or not at all.

Tables pass through in bounded memory, whatever their size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pibroch.embedding import SGD
from pibroch.embedding.piece import Piece
from pibroch.embedding.row_set import ListedRows, RowSet, ids_of
from pibroch.embedding.shard import MemoryShard
from pibroch.errors import CheckpointError, ConfigError
from pibroch.kernels.arrays import Ints, Records
from pibroch.models.losses import logit_labels
from pibroch.overlap import refuse_overlap
from pibroch.serve.from_checkpoint import (
    plain_table,
    read_verified,
    saved_indices,
    vocabularies_of,
)
from pibroch.state.checkpoint import dense_weights, load_rows
from pibroch.state.checkpoint_folder import find_checkpoint
from pibroch.state.delta_format import ORIGIN, Origin, checksum_in, is_exported
from pibroch.state.event_time import write_event_time
from pibroch.state.export_files import (
    SHARD_BYTES,
    content_version,
    publish,
    shards_of,
    tables_of,
    write_vocabularies,
)
from pibroch.state.export_format import (
    DENSE,
    IDS,
    ROWS,
    VERSION_NAME,
    VOCABULARIES,
    ExportDtype,
    ExportedTable,
    ExportManifest,
    RowShard,
    write_checked,
)
from pibroch.state.exported_ids import TableIds, write_ids
from pibroch.state.exported_rows import row_stream
from pibroch.state.files import FileDigest
from pibroch.state.manifest import Manifest, schema_of
from pibroch.state.tensor_file import rows_that_fit, write_tensors
from pibroch.version import __version__

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """How to export.

    Attributes:
        dtype: of the rows.
        data: the dataset that the model was trained on, for its dictionaries; where the run found
            it when absent.
        version: a name for these weights; one of the step and a checksum when absent.
        overwrite: replace an export that is there already.
        shard_bytes: rows of all tables are cut into files of at most about this size.
        min_count: of tables of raw ids, leave out ids that training counted less often; no delta
            can begin at such an export, whose rows are numbered anew.
    """

    dtype: ExportDtype = "float32"
    data: Path | None = None
    version: str | None = None
    overwrite: bool = False
    shard_bytes: int = SHARD_BYTES
    min_count: int = 1


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    options: ExportOptions = ExportOptions(),
    advance: Advance = lambda _: None,
) -> ExportManifest:
    """Write an export of a checkpoint, or of a run directory's best one.

    All bytes of the checkpoint are verified first.

    Args:
        checkpoint: its folder, or a run directory.
        out: the folder to write.
        options: how.
        advance: told how many more rows are done.

    Raises:
        CheckpointError: for a checkpoint that is missing or damaged, or whose dictionaries are not
            to be found.
        ConfigError: for an ``out`` that is taken.
        StorageError: when the disk refuses.
        TrainingError: for weights that the type cannot hold.
    """
    check_options(out, options)
    folder = find_checkpoint(checkpoint)
    refuse_overlap(out, [folder, options.data])
    manifest = read_verified(folder)
    rows = SavedRows.of(folder, manifest, options.min_count)
    vocabularies = vocabularies_of(manifest, options.data)
    if vocabularies is None:
        raise CheckpointError(
            f"{folder}, whose data set is not at {manifest.config.data.dir}",
            "the data set that it was trained on, which has the dictionaries of its features",
            "pass --data DIR",
        )

    (dim,) = {saved.dim for saved in manifest.tables.values()}  # tables of a run are of one width
    dtype = options.dtype
    tables = tables_of(rows.num_rows, rows.ids, rows.with_unknown_row)
    shards = shards_of(tables, dim, dtype, rows.ids, options.shard_bytes)

    def write(temporary: Path) -> ExportManifest:
        (temporary / "tables").mkdir()
        files = {}
        for shard in shards:
            chunks = _chunks(rows, tables, shard, advance)
            stream = row_stream(dim, dtype, shard.num_rows, chunks)
            files[shard.file] = write_tensors(temporary / shard.file, {ROWS: stream})
        if rows.ids:
            files[IDS] = write_ids(temporary / IDS, rows.ids)
        files[DENSE] = write_dense(temporary, folder, manifest)
        if vocabularies.codes:
            files[VOCABULARIES] = write_vocabularies(temporary / VOCABULARIES, vocabularies)
        written = ExportManifest(
            format_version=2 if rows.ids else 1,
            version=options.version or content_version(manifest.progress.step, dtype, files),
            step=manifest.progress.step,
            made_by=__version__,
            dtype=dtype,
            dim=dim,
            tables=tables,
            shards=shards,
            schema=schema_of(manifest),
            fingerprint=manifest.dataset_fingerprint,
            model=manifest.config.model,
            bf16=manifest.config.train.bf16,
            logit_labels=logit_labels(manifest.config, schema_of(manifest)),
            files=files,
        )
        written.write(temporary)
        write_event_time(temporary, manifest.progress.event_time)
        if not rows.packed:
            _write_origin(temporary, manifest)
        return written

    return publish(out, write)


def check_options(out: Path, options: ExportOptions) -> None:
    """Raise ConfigError unless ``out`` and the version's name can be had."""
    refuse_taken(out, options.overwrite)
    if options.version is not None and not re.fullmatch(VERSION_NAME, options.version):
        raise ConfigError(
            f"version {options.version!r}",
            "up to 80 letters, digits, dots, - and _",
            "choose another",
        )


def refuse_taken(out: Path, overwrite: bool) -> None:
    """Raise ConfigError unless ``out`` is free, or an export that may be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not is_exported(out):
        raise ConfigError(
            f"{out}, which exists and is no export", "a new folder", "choose another --out"
        )
    if not overwrite:
        raise ConfigError(
            f"{out}, which holds an export", "a new folder", "pass --overwrite to replace it"
        )


@dataclass(frozen=True, slots=True)
class SavedRows:
    """The rows of a checkpoint as an export has them; those of tables of raw ids that are read.

    Attributes:
        folder: of the checkpoint.
        manifest: its own.
        ids: of tables of raw ids, with their rows in the export.
        with_unknown_row: those of them whose first row is read for all other ids.
        used: of these, which of the checkpoint's rows are read.
        packed: of these, the checkpoint's row of each row of the export, where it is another.
    """

    folder: Path
    manifest: Manifest
    ids: Mapping[str, TableIds]
    with_unknown_row: frozenset[str]
    used: Mapping[str, NDArray[np.bool_]]
    packed: Mapping[str, Ints]

    @classmethod
    def of(cls, folder: Path, manifest: Manifest, min_count: int = 1) -> Self:
        """Of a verified checkpoint.

        Args:
            folder: of it.
            manifest: its own.
            min_count: ids of tables of raw ids that were counted less often are left out, and
                rows are numbered anew.

        Raises:
            ConfigError: for a table whose ids are neither its rows nor raw ones, and for a count
                where no table has raw ids.
        """
        indices = saved_indices(folder, manifest)
        ids = {name: TableIds.in_index(index, min_count) for name, index in indices.items()}
        unknown = frozenset(name for name, index in indices.items() if index.has_unknown_row)
        if min_count == 1:
            used = {
                name: each.used(manifest.tables[name].num_rows, name in unknown)
                for name, each in ids.items()
            }
            return cls(folder, manifest, ids, unknown, used, {})
        if not ids:
            raise ConfigError(
                f"ids counted at least {min_count} times, of tables without raw ids",
                'a table of raw ids, as [embedding.rows] name = "hashed" gives',
                "leave --min-count out",
            )
        packed = {
            name: np.sort(np.append(each.rows, [0][: name in unknown]))
            for name, each in ids.items()
        }
        anew = {
            name: TableIds(each.ids, packed[name].searchsorted(each.rows))
            for name, each in ids.items()
        }
        return cls(folder, manifest, anew, unknown, {}, packed)

    @property
    def num_rows(self) -> dict[str, int]:
        """Of each table in the export, one at least."""
        return {
            name: max(1, len(self.packed[name])) if name in self.packed else saved.num_rows
            for name, saved in self.manifest.tables.items()
        }

    def weights(self, name: str, rows: RowSet) -> Records:
        """Weights of some rows, or averages where the run kept them, float32 ``[r, D]``.

        Those of rows that are not read are zeros.
        """
        if name in self.packed:
            if not len(self.packed[name]):
                return np.zeros((len(rows), self.manifest.tables[name].dim), np.float32)
            rows = ListedRows.of(self.packed[name][ids_of(rows)])
        saved = self.manifest.tables[name]
        plain = plain_table(name, saved.num_rows, saved.dim, self.manifest.config)
        here = MemoryShard(
            [Piece(plain, rows, range(saved.dim))], saved.dim, SGD(lr=1.0), 0, dtype=plain.dtype
        )
        (view,) = here.views()
        load_rows(self.folder, self.manifest, [view])
        weights = np.asarray(view.weights)
        if name in self.used:
            weights[~self.used[name][ids_of(rows)]] = 0
        return weights

    def chunks(
        self, name: str, rows: RowSet, advance: Advance = lambda _: None
    ) -> Iterator[Records]:
        """As :meth:`weights`, as many rows at a time as fit a buffer."""
        step = rows_that_fit(4 * self.manifest.tables[name].dim)
        for start in range(0, len(rows), step):
            weights = self.weights(name, rows[start : start + step])
            yield weights
            advance(len(weights))


def _chunks(
    rows: SavedRows, tables: Sequence[ExportedTable], shard: RowShard, advance: Advance
) -> Iterator[Records]:
    """Weights or averages of a shard's rows, float32 ``[r, D]``, in chunks of bounded size."""
    end = shard.first_row + shard.num_rows
    for table in tables:
        first = max(shard.first_row, table.first_row)
        after = min(end, table.first_row + table.num_rows)
        some = range(first - table.first_row, after - table.first_row)
        yield from rows.chunks(table.name, some, advance)


def write_dense(out: Path, folder: Path, manifest: Manifest) -> FileDigest:
    """The dense layers' file."""
    weights = dense_weights(folder, manifest)
    return write_tensors(out / DENSE, {name: each.numpy() for name, each in weights.items()})


def _write_origin(out: Path, manifest: Manifest) -> None:
    sha256 = checksum_in(out)
    assert sha256 is not None, "its manifest was just written"
    files = {part.file for table in manifest.tables.values() for part in table.parts}
    write_checked(
        out / ORIGIN,
        Origin(
            export_sha256=sha256,
            tables={file: manifest.files[file].sha256 for file in sorted(files)},
        ),
    )
