"""Checkpoints by time, written beside training.

What a run goes on from that ended between two checkpoints of its own.

They are written beside training (:mod:`pibroch.train.beside`). Each is a folder like all
checkpoints, with the files of the one before by links, and so complete in itself; rows that never
changed are where the run began: in the checkpoint that it went on from, or in its seed. With the
next checkpoint of the run's own they go.
``docs/design/0019-recovery.md`` explains.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from pibroch.collectives import Channel
from pibroch.collectives.agreement import on_first, together
from pibroch.embedding import Shard
from pibroch.embedding.row_marks import TIMED
from pibroch.errors import StorageError
from pibroch.state.checkpoint import (
    Base,
    Content,
    begin_folder,
    content_of,
    finish_folder,
    must_be_shared,
)
from pibroch.state.deltas import Chain, chains, merge, write_deltas
from pibroch.state.dense import save_dense
from pibroch.state.files import FileDigest, explained_refusal
from pibroch.state.manifest import FORMAT_VERSION, Manifest, Progress
from pibroch.state.parts import WrittenPart
from pibroch.state.tables import SavedTable, saved_tables
from pibroch.storage import flush_to_disk, temporary_name
from pibroch.train.beside import BesideTraining

if TYPE_CHECKING:
    from pibroch.train.session import Session

KEEP = 2
LONGEST_CHAIN = 8
"""Deltas of a table, one on the other, before they become one."""


class TimedCheckpoints:
    """Every so many seconds one. All ranks make it of the same step; rank 0's clock counts.

    Args:
        folder: where they lie; ranks share it.
        seconds: between two; 0 for none.
        session: what is trained; rows count as changed from now on.
        base: where the session is; ``None`` for a fresh one.
    """

    def __init__(self, folder: Path, seconds: float, session: Session, base: Base | None) -> None:
        self._sink = _CheckpointSink(folder, session, base)
        self._control = session.world.control
        self._beside = BesideTraining(self._sink, seconds, session) if seconds else None

    @property
    def count(self) -> int:
        """Made so far by this process."""
        return 0 if self._beside is None else self._beside.count

    @property
    def seconds_taken(self) -> float:
        """From the thread that trains."""
        return 0.0 if self._beside is None else self._beside.seconds_taken

    @property
    def base_step(self) -> int | None:
        """Of the checkpoint since which rows are marked; ``None`` for where the run began."""
        base = self._sink.base
        return None if base is None else base.manifest.progress.step

    def mark_all(self) -> None:
        """See :meth:`BesideTraining.mark_all`."""
        if self._beside is not None:
            self._beside.mark_all()

    def after_step(self, step: int, progress: Callable[[], Progress]) -> bool:
        """See :meth:`BesideTraining.after_step`."""
        return self._beside is not None and self._beside.after_step(step, progress)

    def drain(self) -> None:
        """Wait until what was begun is on the disk.

        Every rank calls it, before files are removed on which it rests.
        """
        if self._beside is not None:
            self._beside.drain()

    def rest_on(self, base: Base) -> None:
        """A checkpoint of the run's own has all that these had.

        They go, and the next ones rest on it. After :meth:`drain`.
        """
        if self._beside is not None:
            self._sink.base = base
            self._beside.restart()
            on_first(self._control, lambda: _remove(self._sink.folder, 0))


class _CheckpointSink:
    """Writes a checkpoint of each copy, see :class:`pibroch.train.beside.Sink`.

    Attributes:
        base: the last one.
    """

    marks = TIMED
    kind = "checkpoint beside training"
    wants_all = False

    def __init__(self, folder: Path, session: Session, base: Base | None) -> None:
        self.folder = folder
        self.base = base
        self._session = session

    def copied(self, progress: Progress) -> Content:
        content = content_of(self._session, progress, self._session.world.control)
        copied = {
            file: {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
            for file, tensors in content.dense.items()
        }
        return replace(content, dense=copied)

    def write(self, cuts: Sequence[Shard], copied: Content, step: int, channel: Channel) -> Base:
        base = self.base
        folder = self.folder / f"step-{step:08d}"
        try:
            temporary = self.folder / on_first(channel, lambda: self._begin_folder(folder))
            manifest = _write(temporary, channel, self._session, cuts, copied, base)
            shared = (
                {}
                if base is None
                else {file: base.folder / file for file in _shared(manifest, base)}
            )
            on_first(channel, lambda: finish_folder(temporary, folder, manifest, shared))
            on_first(channel, lambda: _remove(self.folder, KEEP))
        except StorageError:
            on_first(
                channel,
                lambda: shutil.rmtree(self.folder / temporary_name(folder), ignore_errors=True),
            )
            raise
        return Base(folder, manifest)

    def settled(self, written: Base) -> None:
        self.base = written

    def _begin_folder(self, folder: Path) -> str:
        temporary = self.folder / temporary_name(folder)
        with explained_refusal(folder):
            self.folder.mkdir(exist_ok=True)
        begin_folder(temporary, folder)
        return temporary.name


def _write(
    temporary: Path,
    channel: Channel,
    session: Session,
    cuts: Sequence[Shard],
    content: Content,
    base: Base | None,
) -> Manifest:
    """The files of all ranks, and what their manifest says."""
    rank = channel.ranks.rank
    size = channel.ranks.world_size
    step = content.about["progress"].step
    tables = {} if base is None else base.manifest.tables
    long = [chain for chain in chains(tables) if len(chain.parts) >= LONGEST_CHAIN * size]

    def write() -> dict[str, Any]:
        with explained_refusal(temporary):
            must_be_shared(temporary)
            files = save_dense(temporary, content.dense, content.unchecked)
            views = [view for cut in cuts for view in cut.views()]
            parts = write_deltas(temporary, f"step-{step}-{rank}", views)
            merged = []
            for number in range(rank, len(long), size):
                assert base is not None, "that has them"
                name = f"tables/@merged-{step}-{number}.safetensors"
                merged.append(merge(long[number], base.folder, temporary, name))
            for file in [*files, *(written.part.file for written in parts + merged)]:
                flush_to_disk(temporary / file)
        return {
            "files": _plain(files),
            "parts": list(map(asdict, parts)),
            "merged": list(map(asdict, merged)),
        }

    written = together(channel, write)
    files = {name: digest for each in written for name, digest in each["files"].items()}
    parts, merged = (
        TypeAdapter(list[WrittenPart]).validate_python(
            [part for each in written for part in each[kind]]
        )
        for kind in ("parts", "merged")
    )
    return _manifest(session, content, base, files, parts, merged, long)


def _manifest(
    session: Session,
    content: Content,
    base: Base | None,
    files: Mapping[str, Any],
    parts: Sequence[WrittenPart],
    merged: Sequence[WrittenPart],
    gone: Sequence[Chain],
) -> Manifest:
    """The base's parts, but those that became one; that one; what changed since."""
    left_out = {part.file for chain in gone for part in chain.parts}
    tables: dict[str, SavedTable] = {}
    named: dict[str, FileDigest] = {}
    for name, shape in saved_tables(
        session.embeddings.tables, session.embeddings.optimizers
    ).items():
        old = (
            []
            if base is None
            else [part for part in base.manifest.tables[name].parts if part.file not in left_out]
        )
        new = [written.part for written in (*merged, *parts) if written.table == name]
        tables[name] = replace(shape, parts=(*old, *new))
        named |= {part.file: base.manifest.files[part.file] for part in old if base is not None}
    named |= {written.part.file: written.digest for written in (*merged, *parts)}
    return Manifest(
        format_version=FORMAT_VERSION,
        increments=0 if base is None else base.manifest.increments + 1,
        tables=tables,
        files={**named, **files},
        rests_on_seed=base is None or base.manifest.rests_on_seed,
        **content.about,
    )


def _shared(manifest: Manifest, base: Base) -> list[str]:
    """Files of the base's tables that the manifest still names."""
    before = {part.file for table in base.manifest.tables.values() for part in table.parts}
    return [
        part.file
        for table in manifest.tables.values()
        for part in table.parts
        if part.file in before
    ]


def _plain(files: Mapping[str, FileDigest]) -> dict[str, Any]:
    return {name: asdict(digest) for name, digest in files.items()}


def _remove(folder: Path, keep: int) -> None:
    """All but the newest; the folder too when nothing is left."""
    with explained_refusal(folder):
        written = sorted(
            path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()
        )
        for path in written[: len(written) - keep]:
            shutil.rmtree(path)
        if not keep and folder.exists() and not any(folder.iterdir()):
            folder.rmdir()
