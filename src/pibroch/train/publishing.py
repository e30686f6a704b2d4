"""Versions for servers, published while a run trains: an export, then what changed since.

They are written beside training (:mod:`pibroch.train.beside`), without a checkpoint in between. All
ranks write files of the rows that they hold; where a plan cuts tables by columns these are brought
together. After so many deltas they become a whole export, which is made of files alone.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from torch import Tensor

from pibroch.collectives import Channel
from pibroch.collectives.agreement import on_first, together
from pibroch.config import RunConfig
from pibroch.data.vocabularies import Vocabularies
from pibroch.embedding import Shard
from pibroch.embedding.row_index import LearningIndex, must_be_rows
from pibroch.embedding.row_marks import PUBLISHED
from pibroch.errors import CheckpointError, ConfigError, RankFailedError, TrainingError
from pibroch.kernels.arrays import Ints
from pibroch.models.losses import logit_labels
from pibroch.overlap import refuse_overlap
from pibroch.state.checkpoint import begin_folder, must_be_shared
from pibroch.state.delta_format import (
    DeltaBase,
    DeltaManifest,
    DeltaRows,
    checksum_in,
    is_exported,
    read_delta,
)
from pibroch.state.delta_rows import files_of_rank, opened_rows, write_rows
from pibroch.state.dense import gather_weights
from pibroch.state.event_time import write_event_time
from pibroch.state.export_files import (
    Layers,
    content_version,
    shards_of,
    tables_of,
    write_vocabularies,
)
from pibroch.state.export_format import (
    DENSE,
    EXPORT,
    IDS,
    VOCABULARIES,
    WRITE_AGAIN,
    ExportManifest,
    RowShard,
    read_export,
)
from pibroch.state.exported_ids import TableIds, read_ids, write_ids
from pibroch.state.exported_rows import RowVersions, written_as
from pibroch.state.files import FileDigest, explained_refusal, verify_file
from pibroch.state.manifest import Progress
from pibroch.state.tables import FOLDER
from pibroch.state.tensor_file import Stream, write_tensors
from pibroch.storage import flush_to_disk, give_name, link_or_copy
from pibroch.train.beside import BesideTraining
from pibroch.train.published import UNFINISHED, PublishedFolder, Version
from pibroch.train.run_directory import RunDirectory
from pibroch.train.session import Session
from pibroch.version import __version__

logger = logging.getLogger(__name__)
Digests = dict[str, FileDigest]
NO_ROWS = np.empty(0, np.int64)


def check_publishing(config: RunConfig, run: RunDirectory) -> None:
    """Raise ConfigError for a folder that is another's, and a run with versions not exact."""
    if config.train.publish_to is None:
        return
    folder = Path(config.train.publish_to)
    others = [config.data.dir, run.checkpoints_path, run.recovery_path]
    refuse_overlap(folder, others, "train.publish_to")
    if is_exported(folder):
        raise ConfigError(
            f"train.publish_to {folder}, which is an export itself",
            "a folder for numbered ones",
            "choose another one, or the folder above",
        )
    if config.train.average is not None:
        raise ConfigError(
            f"train.publish_to = {config.train.publish_to!r} with train.average ="
            f" {config.train.average:g}: averages of rows move while the rows rest, so that no"
            " delta has all that changes",
            "one of the two",
            "leave train.average out, or export checkpoints by `pibroch export`",
        )


@dataclass(frozen=True, slots=True)
class _Copied:
    """What a version has besides rows.

    Attributes:
        dense: the dense layers, on rank 0.
        time: when they were so.
        event_time: until which they were trained, where records have some.
        entries: of tables of raw ids the rows in use, and the id of each.
    """

    dense: dict[str, Tensor]
    time: float
    event_time: int | None
    entries: dict[str, tuple[Ints, Ints]]


@dataclass(frozen=True, slots=True)
class _Draft:
    """A version that is being written.

    Attributes:
        folder: under a name of its own.
        step: of training.
        copied: what it has besides rows.
        rows: files of the rows of all ranks.
        files: the same by name.
        base: the version before; ``None`` where rows are all rows.
        ids: of tables of raw ids.
    """

    folder: Path
    step: int
    copied: _Copied
    rows: Sequence[DeltaRows]
    files: Digests
    base: Version | None
    ids: Mapping[str, TableIds]

    def write_dense(self) -> FileDigest:
        """Write the dense layers."""
        dense = {name: Stream.of(tensor.numpy()) for name, tensor in self.copied.dense.items()}
        return write_tensors(self.folder / DENSE, dense)


class Publishing(BesideTraining[_Copied, Version]):
    """Every so many seconds a version. All ranks write it of the same step; rank 0's clock counts.

    Args:
        session: what is trained; rows count as changed from now on.
        run: its directory.
        since: the step since which rows are marked; ``None`` for the last version's or an earlier
            one, as where marks come from memory.

    Raises:
        StorageError: (on all ranks) when the disk refuses.
    """

    marks = PUBLISHED
    kind = "new version"
    with_state = False

    def __init__(self, session: Session, run: RunDirectory, since: int | None) -> None:
        settings = session.config.train
        assert settings.publish_to is not None, "else there is nothing to do"
        tables = session.embeddings.tables
        self._indices = {
            name: index
            for name, index in session.embeddings.row_indices.items()
            if isinstance(index, LearningIndex)
        }
        must_be_rows(
            {each.name: each.rows.described() for each in tables if each.name not in self._indices},
            "train.publish_to",
            "leave it out, and serve checkpoints",
        )
        self._dtype = settings.publish_dtype
        self._most_deltas = settings.publish_compact_every
        folder = PublishedFolder(
            Path(settings.publish_to), run, self._dtype, settings.publish_keep_seconds
        )
        self._folder = folder
        known = on_first(session.world.control, lambda: _plain(folder.go_on(since)))
        # the newest version; None where the next one has to have all rows
        self._last = None if known is None else Version(**known)
        self._dim = tables[0].dim
        self._tables = tables_of(
            {table.name: table.num_rows for table in tables},
            self._indices,
            [name for name, index in self._indices.items() if index.has_unknown_row],
        )
        self._num_rows = sum(table.num_rows for table in self._tables)
        super().__init__(session, settings.publish_every_seconds)

    def after_step(self, step: int, progress: Callable[[], Progress]) -> bool:
        """See :meth:`BesideTraining.after_step`; none of a step before the last version's."""
        return self._is_new(step) and super().after_step(step, progress)

    def finish(self, progress: Progress) -> None:
        """Publish the last step, and wait until it is on the disk; every rank calls it."""
        self.drain()
        if self._is_new(progress.step):
            self.write_now(progress)
            self.drain()

    def _is_new(self, step: int) -> bool:
        """A run that goes on from an earlier step trains some steps again."""
        return self._last is None or step > self._last.step

    @property
    def wants_all(self) -> bool:
        """See :attr:`BesideTraining.wants_all`."""
        return self._last is None

    def copy(self, progress: Progress) -> _Copied:
        """See :meth:`BesideTraining.copy`."""
        dense = gather_weights(self._session, self._control)
        return _Copied(
            {name: tensor.detach().cpu().clone() for name, tensor in dense.items()},
            time.time(),
            progress.event_time,
            {name: index.entries() for name, index in self._indices.items()},
        )

    def write(
        self, cuts: Sequence[Shard], copied: _Copied, step: int, channel: Channel
    ) -> Version | None:
        """See :meth:`BesideTraining.write`."""
        try:
            return self._publish(cuts, copied, step, channel)
        except RankFailedError:
            raise
        except (CheckpointError, TrainingError) as error:
            logger.warning("no %s at step %d: %s", self.kind, step, error)
            if isinstance(error, CheckpointError):  # what it was to begin at is gone or damaged
                self._last = None
            return None

    def note_written(self, written: Version) -> None:
        """See :meth:`BesideTraining.note_written`."""
        self._last = written

    def _publish(
        self, cuts: Sequence[Shard], copied: _Copied, step: int, channel: Channel
    ) -> Version:
        base = self._last
        number = on_first(channel, lambda: self._next_number(base))
        temporary = self._folder.folder / f".{number}{UNFINISHED}"
        try:
            on_first(channel, lambda: begin_folder(temporary, self._folder.path(number)))
            rows, files = self._write_rows(temporary, cuts, channel)
            ids = {name: TableIds.of(*entries) for name, entries in copied.entries.items()}
            draft = _Draft(temporary, step, copied, rows, files, base, ids)
            if base is not None and len(base.chain) <= self._most_deltas:
                shards: list[Digests] = []
                chain = (*base.chain, number)
            else:
                shards = self._write_whole(draft, channel)
                chain = (number,)
            named = on_first(channel, lambda: self._name(draft, chain, shards))
            return Version(**named)
        except Exception:
            if channel.ranks.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _next_number(self, base: Version | None) -> int:
        if base is not None and not self._folder.has(base):
            raise CheckpointError(
                f"no version {base.version} any more in {self._folder.path(base.chain[-1])}, at"
                " which the next delta was to begin",
                "a folder that this run alone writes to",
                "nothing: the next version is a whole export",
            )
        return self._folder.next_number()

    def _write_rows(
        self, folder: Path, cuts: Sequence[Shard], channel: Channel
    ) -> tuple[list[DeltaRows], Digests]:
        """Files of the rows of all ranks, as a delta has them."""
        views = [view for cut in cuts for view in cut.views()]
        tables = {table.name: table for table in self._tables}
        parts = files_of_rank(views, tables, channel)

        def write() -> list[dict[str, Any]]:
            written = []
            with explained_refusal(folder, "export", WRITE_AGAIN):
                must_be_shared(folder, "train.publish_to")
                for number, part in enumerate(parts):
                    name = f"rows-{channel.ranks.rank:05}-{number}.safetensors"
                    digest = write_rows(folder / name, part, self._dim, self._dtype, NO_ROWS)
                    flush_to_disk(folder / name)
                    count = sum(len(each.row_ids) for each in part)
                    written.append({"file": name, "num_rows": count, "digest": asdict(digest)})
            return written

        rows = []
        files: Digests = {}
        for each in (each for rank in together(channel, write) for each in rank):
            files[each["file"]] = FileDigest(**each.pop("digest"))
            rows.append(DeltaRows(**each))
        return rows, files

    def _write_whole(self, draft: _Draft, channel: Channel) -> list[Digests]:
        """Files of all rows, of what the draft begins at and its own; each rank writes some."""
        own = self._shards_of(draft)[channel.ranks.rank :: channel.ranks.world_size]

        def write() -> dict[str, dict[str, Any]]:
            if not own:
                return {}
            with explained_refusal(draft.folder, "export", WRITE_AGAIN):
                layers = self._layers(draft)
                return {shard.file: asdict(layers.write(draft.folder, shard)) for shard in own}

        return TypeAdapter(list[Digests]).validate_python(together(channel, write))

    def _shards_of(self, draft: _Draft) -> tuple[RowShard, ...]:
        """The files of a whole export."""
        return shards_of(self._tables, self._dim, self._dtype, draft.ids)

    def _layers(self, draft: _Draft) -> Layers:
        """The rows of a chain, all bytes of which are verified, below those of the draft."""
        how = self._num_rows, self._dim, self._dtype
        versions: list[RowVersions] = []
        below = None
        if draft.base is not None:
            (root, *deltas) = (self._folder.path(number) for number in draft.base.chain)
            below = root, read_export(root)
            for delta in deltas:
                manifest, _ = read_delta(delta)
                for each in manifest.rows:
                    verify_file(delta, each.file, manifest.files[each.file], EXPORT)
                versions += opened_rows(delta, manifest.rows, *how)
        versions += opened_rows(draft.folder, draft.rows, *how)
        kind, width = written_as(self._dim, self._dtype)
        for table in self._tables:
            if table.has_ids:
                ids = draft.ids[table.name]
                free = np.flatnonzero(~ids.used(table.num_rows, table.has_unknown_row))
                zeros = np.broadcast_to(np.zeros(width, kind), (len(free), width))
                versions.append(RowVersions(table.first_row + free, zeros))
        return Layers(self._dim, self._dtype, versions, below)

    def _delta(self, draft: _Draft, base: Version) -> DeltaManifest:
        """Complete a delta's files; on rank 0."""
        (draft.folder / FOLDER).rmdir()  # whole exports alone have it
        files = {**draft.files, DENSE: draft.write_dense()}
        if draft.ids:
            layers = self._ids_of(base)
            changes = {name: ids.changes_since(layers[name]) for name, ids in draft.ids.items()}
            files[IDS] = write_ids(draft.folder / IDS, changes)
        return DeltaManifest(
            version=content_version(draft.step, self._dtype, files, base.sha256),
            base=DeltaBase(version=base.version, sha256=base.sha256),
            step=draft.step,
            time=draft.copied.time,
            made_by=__version__,
            rows=tuple(draft.rows),
            bf16=self._session.config.train.bf16,
            files=files,
        )

    def _ids_of(self, version: Version) -> dict[str, list[TableIds]]:
        """Of tables of raw ids the ids of a chain's export and of its deltas, verified."""
        layers: dict[str, list[TableIds]] = {name: [] for name in self._indices}
        for number in version.chain:
            folder = self._folder.path(number)
            is_delta = number != version.chain[0]
            files = read_delta(folder)[0].files if is_delta else read_export(folder).files
            verify_file(folder, IDS, files[IDS], EXPORT)
            for name, ids in read_ids(folder, self._tables, is_delta).items():
                layers[name].append(ids)
        return layers

    def _whole(self, draft: _Draft, shards: Sequence[Digests]) -> ExportManifest:
        """Complete a whole export's files; on rank 0."""
        digests = {name: digest for each in shards for name, digest in each.items()}
        files = {shard.file: digests[shard.file] for shard in self._shards_of(draft)}
        for name in draft.files:
            (draft.folder / name).unlink()
        if draft.ids:
            files[IDS] = write_ids(draft.folder / IDS, draft.ids)
        files[DENSE] = draft.write_dense()
        files |= self._vocabularies(draft)
        dataset = self._session.dataset
        config = self._session.config
        return ExportManifest(
            format_version=2 if draft.ids else 1,
            version=content_version(draft.step, self._dtype, files),
            step=draft.step,
            made_by=__version__,
            dtype=self._dtype,
            dim=self._dim,
            tables=self._tables,
            shards=self._shards_of(draft),
            schema=dataset.schema,
            fingerprint=dataset.fingerprint,
            model=config.model,
            bf16=config.train.bf16,
            logit_labels=logit_labels(config, dataset.schema),
            files=files,
        )

    def _vocabularies(self, draft: _Draft) -> Digests:
        if draft.base is not None:
            root = self._folder.path(draft.base.chain[0])
            known = read_export(root).files.get(VOCABULARIES)
            if known is None:
                return {}
            link_or_copy(root / VOCABULARIES, draft.folder / VOCABULARIES)
            return {VOCABULARIES: known}
        vocabularies = Vocabularies.of_dataset(self._session.dataset)
        if not vocabularies.codes:
            return {}
        return {VOCABULARIES: write_vocabularies(draft.folder / VOCABULARIES, vocabularies)}

    def _name(
        self, draft: _Draft, chain: tuple[int, ...], shards: Sequence[Digests]
    ) -> dict[str, Any]:
        """Complete a folder, and give it its number; on rank 0."""
        with explained_refusal(self._folder.folder, "export", WRITE_AGAIN):
            manifest: DeltaManifest | ExportManifest
            if draft.base is not None and len(chain) > 1:
                manifest = self._delta(draft, draft.base)
            else:
                manifest = self._whole(draft, shards)
            manifest.write(draft.folder)
            write_event_time(draft.folder, draft.copied.event_time)
            sha256 = checksum_in(draft.folder)
            assert sha256 is not None, "its manifest was just written"
            for path in [*draft.folder.rglob("*"), draft.folder]:
                flush_to_disk(path)
            give_name(draft.folder, self._folder.path(chain[-1]))
        version = Version(chain=chain, version=manifest.version, sha256=sha256, step=draft.step)
        self._folder.note(version)
        return version.model_dump(mode="json")


def _plain(version: Version | None) -> dict[str, Any] | None:
    return None if version is None else version.model_dump(mode="json")
