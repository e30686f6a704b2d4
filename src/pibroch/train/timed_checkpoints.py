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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pibroch.collectives import Channel
from pibroch.collectives.agreement import on_first
from pibroch.embedding import Shard
from pibroch.embedding.row_marks import TIMED
from pibroch.state.checkpoint import Base, Content, content_of, save_changes
from pibroch.state.files import explained_refusal, saved_steps, step_path
from pibroch.state.manifest import Progress
from pibroch.train.beside import BesideTraining

if TYPE_CHECKING:
    from pibroch.train.session import Session

KEEP = 2


class TimedCheckpoints(BesideTraining[Content, Base]):
    """Every so many seconds one. All ranks make it of the same step; rank 0's clock counts.

    Args:
        folder: where they lie; ranks share it.
        seconds: between two; 0 for none.
        session: what is trained; rows count as changed from now on.
        base: where the session is; ``None`` for a fresh one.
    """

    marks = TIMED
    kind = "checkpoint beside training"
    with_state = True

    def __init__(self, folder: Path, seconds: float, session: Session, base: Base | None) -> None:
        super().__init__(session, seconds)
        self._folder = folder
        self._base = base

    @property
    def base_step(self) -> int | None:
        """Of the checkpoint since which rows are marked; ``None`` for where the run began."""
        return None if self._base is None else self._base.manifest.progress.step

    def rest_on(self, base: Base) -> None:
        """A checkpoint of the run's own has all that these had.

        They go, and the next ones rest on it. After :meth:`drain`.
        """
        if self._is_on:
            self._base = base
            self.restart()
            on_first(self._control, lambda: _remove(self._folder, 0))

    def copy(self, progress: Progress) -> Content:
        """See :meth:`BesideTraining.copy`."""
        content = content_of(self._session, progress, self._control)
        copied = {
            file: {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
            for file, tensors in content.dense.items()
        }
        return replace(content, dense=copied)

    def write(self, cuts: Sequence[Shard], copied: Content, step: int, channel: Channel) -> Base:
        """See :meth:`BesideTraining.write`."""
        folder = step_path(self._folder, step)
        views = [view for cut in cuts for view in cut.views()]
        embeddings = self._session.embeddings
        manifest = save_changes(folder, embeddings, views, copied, channel, self._base)
        on_first(channel, lambda: _remove(self._folder, KEEP))
        return Base(folder, manifest)

    def note_written(self, written: Base) -> None:
        """See :meth:`BesideTraining.note_written`."""
        self._base = written


def _remove(folder: Path, keep: int) -> None:
    """All but the newest; the folder too when nothing is left."""
    with explained_refusal(folder):
        steps = saved_steps(folder)
        for step in steps[: len(steps) - keep]:
            shutil.rmtree(step_path(folder, step))
        if not keep and folder.exists() and not any(folder.iterdir()):
            folder.rmdir()
