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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pibroch.collectives import Channel
from pibroch.collectives.agreement import on_first
from pibroch.embedding import Shard
from pibroch.embedding.row_marks import TIMED
from pibroch.state.checkpoint import Base, Content, content_of, save_changes
from pibroch.state.files import explained_refusal
from pibroch.state.manifest import Progress
from pibroch.train.beside import BesideTraining

if TYPE_CHECKING:
    from pibroch.train.session import Session

KEEP = 2


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
    with_state = True
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
        folder = self.folder / f"step-{step:08d}"
        views = [view for cut in cuts for view in cut.views()]
        embeddings = self._session.embeddings
        manifest = save_changes(folder, embeddings, views, copied, channel, self.base)
        on_first(channel, lambda: _remove(self.folder, KEEP))
        return Base(folder, manifest)

    def settled(self, written: Base) -> None:
        self.base = written


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
