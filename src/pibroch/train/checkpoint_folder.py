"""The checkpoints of a run: the newest few, and the best one behind a link."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from pibroch.embedding.storage import remove_leftovers
from pibroch.errors import StorageError
from pibroch.train.checkpoint import Progress, save_checkpoint
from pibroch.train.session import Session

logger = logging.getLogger(__name__)


class CheckpointFolder:
    """Folders ``step-XXXXXXXX``, and ``best``, a link to one of them.

    Args:
        folder: made when needed.
        keep: newest checkpoints to keep, besides the best one.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps with a checkpoint, rising."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*"))

    def latest(self) -> Path | None:
        """The newest checkpoint."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def best(self) -> Path | None:
        """The checkpoint of the best evaluation."""
        link = self.folder / "best"
        return link.resolve() if link.exists() else None

    def save(self, session: Session, progress: Progress) -> None:
        """Save, link the best, and remove what is no longer kept.

        Raises:
            StorageError: when the disk refuses; what was saved before stays.
            TrainingError: when a parameter is NaN or infinite.
        """
        if not self.path(progress.step).exists():
            save_checkpoint(self.path(progress.step), session, progress)
        self.link_best(progress.monitor.best_step)
        best = self.best()
        for step in self.steps()[: -self.keep]:
            if self.path(step) != best:
                shutil.rmtree(self.path(step))

    def link_best(self, step: int | None) -> None:
        """Point ``best`` at the checkpoint of a step, in one rename."""
        link, temporary = self.folder / "best", self.folder / "best.new"
        try:
            if step is None or not self.path(step).exists():
                link.unlink(missing_ok=True)
                return
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(self.path(step).name)
            os.replace(temporary, link)
        except OSError as error:
            raise StorageError(
                f"{error.strerror} while linking {link}", "a disk that takes links", "free some space"
            ) from error

    def prepare_resume(self, best_step: int | None) -> None:
        """Clean up after a killed run and restore the link to the best checkpoint as of the one resumed from."""
        remove_leftovers(self.folder)
        if best_step is not None and not self.path(best_step).exists():
            logger.warning("the best checkpoint, of step %d, is gone; the last one will stand in for it", best_step)
        self.link_best(best_step)
