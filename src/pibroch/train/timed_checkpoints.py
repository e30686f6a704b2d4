"""Checkpoints by time, written beside training.

What a run goes on from that ended between two checkpoints of its own.

The thread that trains copies what changed since the last one, and goes on; another thread writes
the copy. Each is a folder like all checkpoints, with the files of the one before by links, and so
complete in itself; rows that never changed are where the run began: in the checkpoint that it went
on from, or in its seed. With the next checkpoint of the run's own they go.
``docs/design/0019-recovery.md`` explains.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from pibroch.collectives import Channel
from pibroch.collectives.agreement import on_first, together
from pibroch.collectives.task_thread import TaskThread
from pibroch.collectives.world import CONTROL_TIMEOUT_S
from pibroch.embedding import Shard
from pibroch.embedding.row_marks import TIMED
from pibroch.errors import StorageError
from pibroch.observability.trace import span
from pibroch.state.checkpoint import (
    Base,
    Content,
    begin_folder,
    content_of,
    finish_folder,
    must_be_shared,
)
from pibroch.state.checkpoint_folder import CheckpointFolder
from pibroch.state.deltas import Chain, chains, merge, write_deltas
from pibroch.state.dense import save_dense
from pibroch.state.files import FileDigest, explained_refusal, flush_to_disk, temporary_name
from pibroch.state.manifest import FORMAT_VERSION, Manifest, Progress
from pibroch.state.parts import WrittenPart
from pibroch.state.tables import SavedTable, saved_tables
from pibroch.train.memory_cuts import MemoryCuts
from pibroch.train.pace import Pace

if TYPE_CHECKING:
    from pibroch.train.session import Session

logger = logging.getLogger(__name__)
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

    Attributes:
        count: made so far by this process.
        seconds_taken: from the thread that trains.
    """

    def __init__(self, folder: Path, seconds: float, session: Session, base: Base | None) -> None:
        self.folder = folder
        self._interval_s = seconds
        self._session = session
        self._base = base
        self.count = 0
        self.seconds_taken = 0.0
        self._control = session.world.control
        self._channel: Channel | None = None
        self._thread: TaskThread | None = None
        self._writing: Future[Base | None] | None = None
        self._pace = Pace(self._control, seconds)
        if self._interval_s:
            self._start_marks()

    @property
    def base_step(self) -> int | None:
        """Of the checkpoint since which rows are marked; ``None`` for where the run began."""
        return None if self._base is None else self._base.manifest.progress.step

    def mark_all(self) -> None:
        """The next one has all rows: it is not known which of them are in the one before."""
        for shard in self._shards() if self._interval_s else ():
            shard.end_cut(TIMED, is_saved=True)
            shard.mark_all(TIMED)

    def after_step(self, step: int, progress: Callable[[], Progress]) -> bool:
        """Make one of this step, if it is due; every rank calls it after each step.

        Returns whether one was made.

        Args:
            step: that was trained.
            progress: gives where the run is.

        Raises:
            TrainingError: when a parameter is NaN or infinite.
            RankFailedError: when a rank was lost.
        """
        if not self._interval_s:
            return False
        start = time.perf_counter()
        is_idle = self._writing is None or self._writing.done()
        is_due = self._pace.is_due(step, is_idle)
        if is_due:
            with span("cut"):
                self._settle()
                self._begin(progress())
            self._pace.restart()
        self.seconds_taken += time.perf_counter() - start
        return is_due

    def drain(self) -> None:
        """Wait until what was begun is on the disk.

        Every rank calls it, before files are removed on which it rests.
        """
        if self._writing is not None:
            self._writing.exception()
            self._settle()

    def rest_on(self, base: Base) -> None:
        """A checkpoint of the run's own has all that these had.

        They go, and the next ones rest on it. After :meth:`drain`.
        """
        if not self._interval_s:
            return
        self._base = base
        self._pace.restart()
        self._start_marks()
        on_first(self._control, lambda: _remove(self.folder, 0))

    def _shards(self) -> Sequence[Shard]:
        exchange = self._session.embeddings.exchange
        exchange.flush()
        return exchange.shards

    def _start_marks(self) -> None:
        for shard in self._shards():
            shard.start_marks(TIMED)

    def _settle(self) -> None:
        """What became of the last one, which has ended."""
        if self._writing is None:
            return
        base = self._writing.result()
        self._writing = None
        for shard in self._session.embeddings.exchange.shards:
            shard.end_cut(TIMED, base is not None)
        self._base = base or self._base

    def _begin(self, progress: Progress) -> None:
        session = self._session
        cuts = [shard.cut(TIMED) for shard in self._shards()]
        there = [cut for cut in cuts if cut is not None]
        if not all(self._control.gather(len(there) == len(cuts))):
            logger.warning(
                "no checkpoint beside training at step %d: no memory for its rows", progress.step
            )
            for shard, cut in zip(session.embeddings.exchange.shards, cuts, strict=True):
                if cut is not None:
                    shard.end_cut(TIMED, is_saved=False)
            return
        content = content_of(session, progress, self._control)
        copied = {
            file: {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
            for file, tensors in content.dense.items()
        }
        if self._thread is None:
            self._thread = TaskThread("pibroch-checkpoint")
            self._channel = session.world.ranks.patient(CONTROL_TIMEOUT_S).open_channel()
        self.count += 1
        self._writing = self._thread.submit(
            partial(self._write, there, replace(content, dense=copied), progress.step)
        )

    def _write(self, cuts: Sequence[Shard], content: Content, step: int) -> Base | None:
        """Write a checkpoint with all ranks; ``None``, with a warning, where the disk refuses.

        On a thread of its own.
        """
        channel = self._channel
        base = self._base
        assert channel is not None
        folder = self.folder / f"step-{step:08d}"
        try:
            temporary = self.folder / on_first(channel, lambda: self._begin_folder(folder))
            manifest = _write(temporary, channel, self._session, cuts, content, base)
            shared = (
                {}
                if base is None
                else {file: base.folder / file for file in _shared(manifest, base)}
            )
            on_first(channel, lambda: finish_folder(temporary, folder, manifest, shared))
            on_first(channel, lambda: _remove(self.folder, KEEP))
        except StorageError as error:
            logger.warning("no checkpoint beside training at step %d: %s", step, error.got)
            on_first(
                channel,
                lambda: shutil.rmtree(self.folder / temporary_name(folder), ignore_errors=True),
            )
            return None
        return Base(folder, manifest)

    def _begin_folder(self, folder: Path) -> str:
        temporary = self.folder / temporary_name(folder)
        with explained_refusal(folder):
            self.folder.mkdir(exist_ok=True)
        begin_folder(temporary, folder)
        return temporary.name


@dataclass(frozen=True, slots=True)
class Saver:
    """A run's checkpoints: those of its own, and those by time between them.

    Attributes:
        checkpoints: of its own.
        timed: by time.
        cuts: in memory.
    """

    checkpoints: CheckpointFolder
    timed: TimedCheckpoints
    cuts: MemoryCuts

    def save(self, session: Session, progress: Progress) -> None:
        """A checkpoint of the run's own, see :meth:`CheckpointFolder.save`."""
        self.timed.drain()
        self.checkpoints.save(session, progress)
        if self.checkpoints.last is not None:
            self.timed.rest_on(self.checkpoints.last)
        self.cuts.after_step(
            progress.step, lambda: progress, self.timed.base_step, is_wanted=True
        )  # so that no checkpoint is newer for long

    def after_step(self, step: int, progress: Callable[[], Progress]) -> None:
        """Make what is due after a step."""
        was_made = self.timed.after_step(step, progress)
        self.cuts.after_step(step, progress, self.timed.base_step, is_wanted=was_made)


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
