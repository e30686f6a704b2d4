"""The checkpoints of a run: the newest few, and the best one behind a link."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pibroch.collectives import Channel, Ranks
from pibroch.config import RunConfig
from pibroch.embedding.storage import explained_refusal, remove_leftovers
from pibroch.errors import CheckpointError, DamagedCheckpointError, StorageError
from pibroch.train.agreement import on_first, together
from pibroch.train.checkpoint import Base, restore_checkpoint, restore_weights, save_checkpoint
from pibroch.train.manifest import MANIFEST, Manifest, Progress, read_manifest
from pibroch.train.resumption import warn_of_settings

if TYPE_CHECKING:
    from pibroch.train.session import Session

logger = logging.getLogger(__name__)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: itself, or a run's best one, or its latest when no evaluation chose one.

    Raises:
        CheckpointError: when there is none.
    """
    if (path / MANIFEST).exists():
        return path
    folder = CheckpointFolder(path / "checkpoints", keep=1)
    found = folder.best() or folder.latest()
    if found is None:
        raise CheckpointError(
            f"no checkpoint in {path}", "a checkpoint folder or a run directory", "name one that pibroch train wrote"
        )
    return found


def newest_config(checkpoints: Path) -> RunConfig | None:
    """The configuration in a run's newest checkpoint whose manifest is not damaged; ``None`` when there is none.

    Raises:
        CheckpointError: when it is of another format.
    """
    folder = CheckpointFolder(checkpoints, keep=1)
    for step in reversed(folder.steps()):
        with suppress(DamagedCheckpointError):
            return read_manifest(folder.path(step)).config
    return None


class CheckpointFolder:
    """Folders ``step-XXXXXXXX``, and ``best``, a link to one of them (where there are no links, a file with its step).

    With several ranks all call `save`, `resume` and `restore_best` at the same point, on a folder that all see.

    Args:
        folder: made when needed.
        keep: newest checkpoints to keep, besides the best one.
        full_every: every how many-th checkpoint is full; the others hold only rows touched since the last full one.
        channel: between the ranks of the run; one process when absent.
    """

    def __init__(self, folder: Path, keep: int, full_every: int = 1, channel: Channel | None = None) -> None:
        self.folder, self.keep, self.full_every = folder, keep, full_every
        self.channel = channel or Ranks.alone().open_channel()
        self._last: Base | None = None

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps with a checkpoint, rising; what else lies in the folder is left alone."""
        names = (path.name.removeprefix("step-") for path in self.folder.glob("step-*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def latest(self) -> Path | None:
        """The newest checkpoint."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def best(self) -> Path | None:
        """The checkpoint of the best evaluation."""
        link = self.folder / "best"
        if link.is_file():
            link = self.path(int(link.read_text(encoding="utf-8")))
        return link.resolve() if link.exists() else None

    def save(self, session: Session, progress: Progress) -> None:
        """Save, link the best, and remove what is no longer kept. Blocks until all ranks are done.

        Raises:
            StorageError: (on all ranks) when the disk refuses; what was saved before stays.
            TrainingError: (on all ranks) when a parameter is NaN or infinite.
            RankFailedError: when a rank was lost.
        """
        path = self.path(progress.step)
        if not on_first(self.channel, path.exists):
            base = self._next_base()
            self._last = Base(path, save_checkpoint(path, session, progress, self.channel, base))
            if self.full_every > 1 and base is None:
                session.embeddings.track_touched()
                for view in session.embeddings.pieces():
                    assert view.touched is not None
                    view.touched[:] = False
        on_first(self.channel, lambda: self._tidy(progress.monitor.best_step))

    def resume(self, session: Session) -> Progress:
        """Bring a session to the newest undamaged checkpoint, clean up after a killed run; a fresh start where there is none.

        Damaged ones are named in a warning and set aside under another name, for the run will write those steps again.

        Raises:
            CheckpointError: (on all ranks) when all checkpoints are damaged, or one is of other settings, tables or data.
        """
        if self.full_every > 1:
            session.embeddings.track_touched()
        self._last = self._restore_newest(session)
        progress = Progress() if self._last is None else self._last.manifest.progress
        on_first(self.channel, lambda: self._prepare_resume(progress.monitor.best_step))
        return progress

    def restore_best(self, session: Session) -> None:
        """Load what predictions depend on from the best checkpoint, if there is one.

        Raises:
            CheckpointError: (on all ranks) when the checkpoint is damaged.
        """
        path = self._as_first_sees(self.best)
        if path is not None:
            restore_weights(path, read_manifest(path), session, self.channel)

    def link_best(self, step: int | None) -> None:
        """Point ``best`` at the checkpoint of a step, in one rename; a file with the step where the disk takes no links."""
        link, temporary = self.folder / "best", self.folder / "best.new"
        try:
            if step is None or not self.path(step).exists():
                link.unlink(missing_ok=True)
                return
            temporary.unlink(missing_ok=True)
            try:
                temporary.symlink_to(self.path(step).name)
                os.replace(temporary, link)
            except OSError:  # Windows asks for rights to make links, and does not replace them
                temporary.unlink(missing_ok=True)
                temporary.write_text(f"{step}", encoding="utf-8")
                os.replace(temporary, link)
        except OSError as error:
            raise StorageError(
                f"{error.strerror} while linking {link}", "a disk that takes links", "free some space"
            ) from error

    def _restore_newest(self, session: Session) -> Base | None:
        """Where the session is from now on; every rank tries the same checkpoints."""
        damaged: dict[int, DamagedCheckpointError] = {}
        for step in reversed(on_first(self.channel, self.steps)):
            path = self.path(step)
            try:
                manifest = self._read(path)
                restore_checkpoint(path, manifest, session, self.channel)
            except DamagedCheckpointError as error:
                damaged[step] = error
                continue
            for other, problem in damaged.items():
                logger.warning(
                    "the checkpoint of step %d is damaged (%s) and is set aside as %s; the run goes on from step %d",
                    other, problem.got, _aside(self.path(other)).name, step,
                )  # fmt: skip
            on_first(self.channel, lambda: self._set_aside(damaged))
            logger.info("resumed from %s", path)
            warn_of_settings(manifest, session.config)
            return Base(path, manifest)
        if damaged:
            newest = max(damaged)
            raise CheckpointError(
                f"no undamaged checkpoint in {self.folder}: of step {newest} {damaged[newest].got}"
                + (f", and {len(damaged) - 1} older" if len(damaged) > 1 else ""),
                "one that is whole", "put back a copy of one, or start anew in another --run-dir",
            ) from damaged[newest]  # fmt: skip
        return None

    def _read(self, path: Path) -> Manifest:
        """A manifest, which all ranks have read or none."""
        manifests: list[Manifest] = []
        together(self.channel, lambda: manifests.append(read_manifest(path)))
        return manifests[0]

    def _set_aside(self, damaged: Iterable[int]) -> None:
        with explained_refusal(self.folder):
            for step in damaged:
                shutil.rmtree(_aside(self.path(step)), ignore_errors=True)
                self.path(step).rename(_aside(self.path(step)))

    def _next_base(self) -> Base | None:
        """What the next checkpoint builds on; ``None`` when a full one is due, or when the last one was removed."""
        last = self._last
        if last is None or last.manifest.increments + 1 >= self.full_every:
            return None
        if not on_first(self.channel, last.folder.exists):
            logger.warning("%s is gone; the next checkpoint is a full one", last.folder)
            return None
        return last

    def _as_first_sees(self, find: Callable[[], Path | None]) -> Path | None:
        """A checkpoint's path as rank 0 finds it, so that all ranks take the same one."""
        name = on_first(self.channel, lambda: "" if (path := find()) is None else path.name)
        return self.folder / name if name else None

    def _tidy(self, best_step: int | None) -> None:
        self.link_best(best_step)
        best = self.best()
        with explained_refusal(self.folder):
            for step in self.steps()[: -self.keep]:
                if self.path(step).resolve() != best:
                    shutil.rmtree(self.path(step))

    def _prepare_resume(self, best_step: int | None) -> None:
        """Remove what a killed run left, and restore the link to the best checkpoint as of the one resumed from."""
        remove_leftovers(self.folder)
        if best_step is not None and not self.path(best_step).exists():
            logger.warning("the best checkpoint, of step %d, is gone; the last one will stand in for it", best_step)
        self.link_best(best_step)


def _aside(path: Path) -> Path:
    """Where a damaged checkpoint is kept: beside the others, and none of them."""
    return path.with_name(f"{path.name}.damaged")
