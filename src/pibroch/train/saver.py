"""All that a run saves: checkpoints of its own, those by time, and cuts in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pibroch.state.checkpoint_folder import CheckpointFolder
from pibroch.state.manifest import Progress
from pibroch.train.memory_cuts import MemoryCuts
from pibroch.train.session import Session
from pibroch.train.timed_checkpoints import TimedCheckpoints


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
