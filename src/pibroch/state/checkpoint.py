"""Whole checkpoints: a folder of tensors, and a manifest with their checksums.

Tensors are tables, dense weights, optimizer state and random state.

``step-00000123/``: ``manifest.json``, ``dense.safetensors``, ``dense_optimizer.safetensors``,
``random.safetensors``, ``tables/<name>.safetensors`` or, from several ranks,
``tables/<name>@0-of-4.safetensors``; in an incremental one also deltas, such as
``tables/<name>@step-123-0-0.safetensors``; with averages ``dense_average.safetensors``. Every rank
writes the parts of tables that it holds, rank 0 the rest. Nothing in it depends on time or place:
equal runs on as many ranks write equal bytes. Any number of ranks reads them. Programs of one's own
(`program.py`) write the same, with files for their parts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor

from pibroch.collectives import Channel
from pibroch.collectives.agreement import on_first, together
from pibroch.embedding import PieceView
from pibroch.errors import CheckpointError, StorageError
from pibroch.state.deltas import Chain, chains, merge, write_deltas
from pibroch.state.dense import (
    AVERAGES,
    WEIGHTS,
    DenseState,
    gather_session,
    load_dense_optimizer,
    load_dense_weights,
    load_row_indices,
    load_windows,
    save_dense,
    tensors_in,
)
from pibroch.state.files import FileDigest, explained_refusal, verify_file
from pibroch.state.manifest import FORMAT_VERSION, MANIFEST, Manifest, Progress
from pibroch.state.parts import WrittenPart
from pibroch.state.resumption import check_settings
from pibroch.state.tables import (
    FOLDER,
    Extent,
    SavedTable,
    check_tables_match,
    load_averages,
    load_tables,
    part_names,
    save_tables,
    saved_tables,
)
from pibroch.state.tensor_file import load_tensors
from pibroch.state.trained import TablesOfRanks, Trained
from pibroch.storage import flush_to_disk, give_name, link_or_copy, temporary_name

LONGEST_CHAIN = 8
"""Deltas of a table, one on the other, before they become one."""


@dataclass(frozen=True, slots=True)
class Base:
    """A checkpoint on which an incremental one builds."""

    folder: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class _Written:
    """What one rank wrote: parts of rows, deltas that became one, and files besides."""

    parts: list[WrittenPart]
    merged: list[WrittenPart]
    files: dict[str, FileDigest]


@dataclass(frozen=True, slots=True)
class Content:
    """What a checkpoint holds besides rows.

    Attributes:
        dense: tensors to write, on rank 0.
        about: what the manifest says of the run or program, by the manifest's fields.
        unchecked: of files, the tensors that may have infinite numbers.
    """

    dense: DenseState
    about: Mapping[str, Any]
    unchecked: Mapping[str, Collection[str]] = field(default_factory=dict)


def content_of(session: Trained, progress: Progress, channel: Channel) -> Content:
    """What a run's checkpoint holds besides rows; every rank calls it."""
    rates = {
        "dense": session.optimizer.param_groups[0]["lr"],
        "embedding": session.embeddings.learning_rate,
    }
    about = {
        "dataset_fingerprint": session.dataset.fingerprint,
        "dataset_digest": session.dataset.digest,
        "data_schema": session.dataset.schema.model_dump(mode="json"),
        "config": session.config,
        "progress": progress,
        "learning_rates": rates,
    }
    return Content(gather_session(session, channel), about)


def save_checkpoint(
    folder: Path, embeddings: TablesOfRanks, content: Content, channel: Channel
) -> Manifest:
    """Write a checkpoint of all rows with all ranks at once; it is there whole or not at all.

    Blocks until it is on the disk.

    Args:
        folder: on a disk that all ranks see; one that exists is replaced once the new one is whole.
        embeddings: pieces of tables are written by the rank that holds them.
        content: all else.
        channel: between the ranks.

    Raises:
        StorageError: (on all ranks) when the disk refuses.
        TrainingError: (on all ranks) when a parameter is NaN or infinite.
        RankFailedError: when a rank was lost.
    """
    views = embeddings.pieces()
    shapes = saved_tables(embeddings.tables, embeddings.optimizers)
    own = [Extent.of(view.piece) for view in views if view.piece.is_primary]
    extents = TypeAdapter(list[list[Extent]]).validate_python(channel.gather(own))
    names = part_names([extent for rank in extents for extent in rank], shapes)

    def write(temporary: Path) -> _Written:
        return _Written(save_tables(temporary, views, names), [], {})

    return _save(folder, channel, content, shapes, write)


def save_changes(
    folder: Path,
    embeddings: TablesOfRanks,
    views: Sequence[PieceView],
    content: Content,
    channel: Channel,
    base: Base | None,
) -> Manifest:
    """As :func:`save_checkpoint`, of a base and the rows that changed since.

    The base's files are linked, so that the folder is complete in itself. Where a table has had
    :data:`LONGEST_CHAIN` deltas of every rank, they become one.

    Args:
        folder: as above.
        embeddings: whose tables they are; nothing else is read of them.
        views: this rank's rows that changed, of cuts.
        content: all else.
        channel: between the ranks.
        base: ``None`` for where the seed began; then only the run can go on from it.
    """
    rank = channel.ranks.rank
    size = channel.ranks.world_size
    step = content.about["progress"].step
    shapes = saved_tables(embeddings.tables, embeddings.optimizers)
    tables = {} if base is None else base.manifest.tables
    long = [chain for chain in chains(tables) if len(chain.parts) >= LONGEST_CHAIN * size]

    def write(temporary: Path) -> _Written:
        parts = write_deltas(temporary, f"step-{step}-{rank}", views)
        merged = []
        for number in range(rank, len(long), size):
            assert base is not None, "that has them"
            name = f"{FOLDER}/@merged-{step}-{number}.safetensors"
            merged.append(merge(long[number], base.folder, temporary, name))
        return _Written(parts, merged, {})

    return _save(folder, channel, content, shapes, write, base, long)


def _save(
    folder: Path,
    channel: Channel,
    content: Content,
    shapes: Mapping[str, SavedTable],
    write: Callable[[Path], _Written],
    base: Base | None = None,
    merged: Sequence[Chain] = (),
) -> Manifest:
    """Have all ranks write their rows and rank 0 the rest, and give the whole its name."""
    temporary = folder.with_name(channel.gather(temporary_name(folder))[0])

    def write_all() -> dict[str, Any]:
        with explained_refusal(folder):
            must_be_shared(temporary)
            files = save_dense(temporary, content.dense, content.unchecked)
            written = replace(write(temporary), files=files)
            parts = [each.part.file for each in written.parts + written.merged]
            for file in [*files, *parts]:
                flush_to_disk(temporary / file)
            return asdict(written)

    try:
        on_first(channel, lambda: begin_folder(temporary, folder))
        written = TypeAdapter(list[_Written]).validate_python(together(channel, write_all))
        manifest = _manifest(content, shapes, written, base, merged)
        shared = {} if base is None else _shared(manifest, base)
        on_first(channel, lambda: finish_folder(temporary, folder, manifest, shared))
    except BaseException:
        if channel.ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return manifest


def restore_checkpoint(
    folder: Path, manifest: Manifest, session: Trained, channel: Channel
) -> None:
    """Bring a session, on any number of ranks, to exactly where the checkpoint was saved.

    Raises:
        DamagedCheckpointError: (on all ranks) when a file is damaged; the session is then as it
            was.
        CheckpointError: (on all ranks) when settings, tables or data are not those of the session.
    """
    check_settings(manifest, session.config)
    check_tables(manifest, session.embeddings, same_state=True)
    if manifest.dataset_fingerprint != session.dataset.fingerprint:
        raise CheckpointError(
            f"a checkpoint of dataset {manifest.dataset_fingerprint[:12]}",
            f"one of dataset {session.dataset.fingerprint[:12]}, which this run reads",
            "resume with the data that the run began with",
        )
    if manifest.dataset_digest not in (None, session.dataset.digest):
        raise CheckpointError(
            f"{session.dataset.path}, which has the checkpoint's vocabularies and other samples or"
            " labels",
            "the data that the run began with, byte for byte",
            "resume with that data, or start anew",
        )
    verify_files(folder, manifest, channel)

    def load() -> None:
        if manifest.rests_on_seed:
            session.fill_rows()
        _load_weights(folder, manifest, session)
        session.has_rows = True
        load_dense_optimizer(tensors_in(folder), session)
        load_windows(tensors_in(folder), manifest.files, session)

    together(channel, load)


def restore_weights(folder: Path, manifest: Manifest, session: Trained, channel: Channel) -> None:
    """Load what predictions depend on, into tables of any optimizer.

    Its tables keep averages where the run kept them.

    Raises:
        CheckpointError: as `restore_checkpoint`, but for another dataset of equal table sizes.
    """
    check_tables(manifest, session.embeddings, same_state=False)
    verify_files(folder, manifest, channel)
    together(channel, lambda: _load_weights(folder, manifest, session))


def begin_folder(temporary: Path, folder: Path) -> None:
    """Make the folder in which a checkpoint is prepared; on rank 0."""
    with explained_refusal(folder):
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / FOLDER).mkdir(parents=True)


def must_be_shared(folder: Path, option: str = "--run-dir") -> None:
    """Raise StorageError where this rank does not see what :func:`begin_folder` made on rank 0.

    Args:
        folder: that it made.
        option: that chooses the place.
    """
    if not (folder / FOLDER).is_dir():
        raise StorageError(
            f"{folder.parent}, in which rank 0 began a folder that this rank does not see",
            "a folder that all ranks share",
            f"choose one on a shared file system ({option})",
        )


def _manifest(
    content: Content,
    shapes: Mapping[str, SavedTable],
    written: Sequence[_Written],
    base: Base | None,
    merged: Sequence[Chain],
) -> Manifest:
    """The base's parts, but those that became one; then those ones, then the new ones."""
    new = [part for rank in written for part in rank.merged]
    new += [part for rank in written for part in rank.parts]
    left_out = {part.file for chain in merged for part in chain.parts}
    tables: dict[str, SavedTable] = {}
    files = {name: digest for rank in written for name, digest in rank.files.items()}
    for name, shape in shapes.items():
        old = [] if base is None else base.manifest.tables[name].parts
        kept = [part for part in old if part.file not in left_out]
        tables[name] = replace(
            shape, parts=(*kept, *(each.part for each in new if each.table == name))
        )
        files |= {part.file: base.manifest.files[part.file] for part in kept if base is not None}
    files |= {each.part.file: each.digest for each in new}
    is_whole = {part.file for table in tables.values() for part in table.parts if not part.is_delta}
    return Manifest(
        format_version=FORMAT_VERSION,
        increments=0 if base is None else base.manifest.increments + 1,
        tables=tables,
        files=files,
        rests_on_seed=not is_whole or (base is not None and base.manifest.rests_on_seed),
        **content.about,
    )


def _shared(manifest: Manifest, base: Base) -> dict[str, Path]:
    """Files of the base's tables that the manifest still names, with their paths."""
    names = {part.file for table in manifest.tables.values() for part in table.parts}
    before = [part.file for table in base.manifest.tables.values() for part in table.parts]
    return {file: base.folder / file for file in before if file in names}


def finish_folder(
    temporary: Path, folder: Path, manifest: Manifest, shared: Mapping[str, Path]
) -> None:
    """Complete the temporary folder, with files that other checkpoints have, and give it its name.

    On rank 0.
    """
    with explained_refusal(folder):
        for file, path in shared.items():
            link_or_copy(path, temporary / file)
            flush_to_disk(temporary / file)
        manifest.write(temporary)
        for path in (temporary / MANIFEST, temporary / FOLDER, temporary):
            flush_to_disk(path)
        give_name(temporary, folder)


def _load_weights(folder: Path, manifest: Manifest, session: Trained) -> None:
    load_row_indices(tensors_in(folder), session.embeddings)
    load_tables(folder, manifest.tables, session.embeddings.pieces())
    session.embeddings.step = manifest.progress.step
    load_dense_weights(tensors_in(folder), session)


def load_rows(folder: Path, manifest: Manifest, views: Sequence[PieceView]) -> None:
    """Fill pieces without optimizer state for predictions: by averages where the run kept them.

    Raises:
        CheckpointError: when a tensor is missing or of another shape.
    """
    average = manifest.config.train.average
    if average is None:
        load_tables(folder, manifest.tables, views)
    else:
        load_averages(folder, manifest.tables, views, average, manifest.progress.step)


def dense_weights(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The dense layers' weights and buffers by name: their averages where the run kept them."""
    state = load_tensors(folder, WEIGHTS)
    if manifest.config.train.average is None:
        return state
    averages = load_tensors(folder, AVERAGES)
    return {name: averages[f"module.{name}"] for name in state if f"module.{name}" in averages}


def check_tables(
    manifest: Manifest, embeddings: TablesOfRanks, *, same_state: bool, weights_alone: bool = False
) -> None:
    """Raise CheckpointError unless a checkpoint's tables are those of ``embeddings``."""
    wanted = saved_tables(embeddings.tables, embeddings.optimizers)
    if weights_alone:
        wanted = {name: replace(table, state={}) for name, table in wanted.items()}
    check_tables_match(manifest.tables, wanted, same_state=same_state)


def verify_files(folder: Path, manifest: Manifest, channel: Channel) -> None:
    """Read all files once, each rank its share, and compare their checksums.

    Raises:
        DamagedCheckpointError: (on all ranks) when one is missing, cut short, changed or
            unreadable.
    """

    def verify() -> None:
        for file in share_of_files(manifest.files, channel.ranks.rank, channel.ranks.world_size):
            verify_file(folder, file, manifest.files[file])

    together(channel, verify)


def share_of_files(files: Mapping[str, FileDigest], rank: int, world_size: int) -> list[str]:
    """The files that a rank verifies, so that all have about as many bytes to read.

    >>> files = {name: FileDigest(size, "") for name, size in (("a", 5), ("b", 9), ("c", 3))}
    >>> share_of_files(files, 0, 2), share_of_files(files, 1, 2)
    (['b'], ['a', 'c'])
    """
    loads = [0] * world_size
    own = []
    for name in sorted(files, key=lambda name: (-files[name].size_bytes, name)):
        taker = min(range(world_size), key=lambda other: (loads[other], other))
        loads[taker] += files[name].size_bytes
        if taker == rank:
            own.append(name)
    return own
