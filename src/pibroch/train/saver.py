"""All that a run writes: checkpoints of its own, those by time, cuts in memory, versions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pibroch.state.checkpoint_folder import CheckpointFolder
from pibroch.state.manifest import Progress
from pibroch.train.lost_ids import LostIds
from pibroch.train.memory_cuts import MemoryCuts
from pibroch.train.publishing import Publishing
from pibroch.train.session import Session
from pibroch.train.timed_checkpoints import TimedCheckpoints


@dataclass(frozen=True, slots=True)
class Saver:
    """What a run writes between two steps, or begins to write.

    Attributes:
        checkpoints: of its own.
        timed: by time.
        cuts: in memory.
        publishing: of versions for servers; ``None`` where the run publishes none.
        lost_ids: written before any of these; ``None`` where the run keeps none, and on all ranks
            but the first.
    """

    checkpoints: CheckpointFolder
    timed: TimedCheckpoints
    cuts: MemoryCuts
    publishing: Publishing | None = None
    lost_ids: LostIds | None = None

    def save(self, session: Session, progress: Progress) -> None:
        """A checkpoint of the run's own, see :meth:`CheckpointFolder.save`."""
        self._write_lost_ids()
        self.timed.drain()
        self.checkpoints.save(session, progress)
        if self.checkpoints.last is not None:
            self.timed.rest_on(self.checkpoints.last)
        # so that no checkpoint is newer for long
        self.cuts.after_step(progress.step, lambda: progress, self.timed.base_step, is_wanted=True)
        if self.publishing is not None:
            self.publishing.after_step(progress.step, lambda: progress)

    def after_step(self, step: int, progress: Callable[[], Progress]) -> None:
        """Make what is due after a step."""

        def logged() -> Progress:
            self._write_lost_ids()
            return progress()

        was_made = self.timed.after_step(step, logged)
        self.cuts.after_step(step, logged, self.timed.base_step, is_wanted=was_made)
        if self.publishing is not None:
            self.publishing.after_step(step, logged)

    def finish(self, progress: Progress) -> None:
        """The run has trained its last step, or none."""
        if self.publishing is not None:
            self.publishing.finish(progress)

    def _write_lost_ids(self) -> None:
        if self.lost_ids is not None:
            self.lost_ids.write()
