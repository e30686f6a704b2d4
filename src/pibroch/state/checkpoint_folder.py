"""The checkpoints of a run: the newest few, and the best one behind a link."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

from pibroch.collectives import Channel, Ranks
from pibroch.collectives.agreement import agreed, on_first, together
from pibroch.config import RunConfig
from pibroch.embedding.row_marks import SAVED
from pibroch.errors import CheckpointError, DamagedCheckpointError
from pibroch.state.checkpoint import (
    Base,
    Content,
    content_of,
    restore_checkpoint,
    restore_weights,
    save_changes,
    save_checkpoint,
)
from pibroch.state.cuts import cut_all
from pibroch.state.files import explained_refusal, saved_steps, step_path
from pibroch.state.manifest import MANIFEST, Manifest, Progress, read_manifest
from pibroch.state.resumption import warn_of_settings
from pibroch.state.tables import mark_changes
from pibroch.state.trained import TablesOfRanks, Trained
from pibroch.storage import remove_leftovers, storage_errors

logger = logging.getLogger(__name__)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means.

    Itself, or a run's or folder's best one, or the latest when no evaluation chose one.

    Raises:
        CheckpointError: when there is none.
    """
    if (path / MANIFEST).exists():
        return path
    run = CheckpointFolder(path / "checkpoints", keep=1)
    program = CheckpointFolder(path, keep=1)
    folder = run.best() or run.latest() or program.best() or program.latest()
    if folder is None:
        raise CheckpointError(
            f"no checkpoint in {path}",
            "a checkpoint, a folder of some, or a run directory",
            "name one that pibroch train or pibroch.save wrote",
        )
    return folder


def newest_config(checkpoints: Path) -> RunConfig | None:
    """The configuration in a run's newest checkpoint whose manifest is not damaged.

    ``None`` when there is none.

    Raises:
        CheckpointError: when it is of another format.
    """
    folder = CheckpointFolder(checkpoints, keep=1)
    for step in reversed(folder.steps()):
        with suppress(DamagedCheckpointError):
            return read_manifest(folder.path(step)).config
    return None


class CheckpointFolder:
    """Folders ``step-XXXXXXXX``, and ``best``, a link to one of them.

    Where there are no links, ``best`` is a file with the step.

    With several ranks all call `save`, `resume` and `restore_best` at the same point, on a folder
    that all see.

    Args:
        folder: made when needed.
        keep: newest checkpoints to keep, besides the best one.
        full_every: every how many-th checkpoint is full; the others hold only rows that changed
            since the one before.
        channel: between the ranks of the run; one process when absent.
        beside: a folder of checkpoints that were written beside training, see
            :mod:`pibroch.train.timed_checkpoints`.

    Attributes:
        resumed: where :meth:`resume` has brought the session; ``None`` for a fresh start.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        full_every: int = 1,
        channel: Channel | None = None,
        beside: Path | None = None,
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.full_every = full_every
        self.beside = beside
        self.channel = channel or Ranks.alone().open_channel()
        self._last: Base | None = None
        self.resumed: Base | None = None

    @property
    def last(self) -> Base | None:
        """The newest one in the folder that the session has passed."""
        return self._last

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return step_path(self.folder, step)

    def steps(self) -> list[int]:
        """Steps with a checkpoint, rising; what else lies in the folder is left alone."""
        return saved_steps(self.folder)

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

    def save(self, session: Trained, progress: Progress) -> None:
        """Save, link the best, and remove what is no longer kept. Blocks until all ranks are done.

        Raises:
            StorageError: (on all ranks) when the disk refuses; what was saved before stays.
            TrainingError: (on all ranks) when a parameter is NaN or infinite.
            RankFailedError: when a rank was lost.
        """
        path = self.path(progress.step)
        if not on_first(self.channel, path.exists):
            content = content_of(session, progress, self.channel)
            self._last = Base(path, self._write(path, session.embeddings, content))
        on_first(self.channel, lambda: self._tidy(progress.monitor.best_step))

    def _write(self, path: Path, embeddings: TablesOfRanks, content: Content) -> Manifest:
        """The rows that changed since the last one, or all of them."""
        base = self._next_base()
        cuts = None
        if base is not None:
            shards = embeddings.shards()
            cuts = cut_all(shards, SAVED, self.channel, lambda shard: shard.cut_in_place(SAVED))
        if cuts is None:
            manifest = save_checkpoint(path, embeddings, content, self.channel)
            if self.full_every > 1:
                embeddings.start_marks(SAVED)
            return manifest
        is_saved = False
        try:
            manifest = save_changes(
                path, embeddings, list(chain(*cuts)), content, self.channel, base
            )
            is_saved = True
        finally:
            for shard in embeddings.shards():
                shard.end_cut(SAVED, is_saved)
        return manifest

    def resume(self, session: Trained) -> Progress:
        """Bring a session to the newest undamaged checkpoint, clean up after a killed run.

        A fresh start where there is none.

        Damaged ones are named in a warning and set aside under another name, for the run will write
        those steps again.

        Raises:
            CheckpointError: (on all ranks) when all checkpoints are damaged, or one is of other
                settings, tables or data.
        """
        self.resumed = self._restore_newest(session)
        progress = Progress() if self.resumed is None else self.resumed.manifest.progress
        self._last = self._base_at(progress.step)
        if self.full_every > 1:
            session.embeddings.start_marks(SAVED)
            self._mark_since(self._last, session.embeddings)
        on_first(self.channel, lambda: self._prepare_resume(progress.monitor.best_step))
        return progress

    def _mark_since(self, last: Base | None, embeddings: TablesOfRanks) -> None:
        """Mark what a checkpoint beside training, on which the run goes on, has newer than ours."""
        resumed = self.resumed
        if resumed is None or last is None or resumed.folder == last.folder:
            return
        known = [part.file for table in last.manifest.tables.values() for part in table.parts]
        views = embeddings.pieces()
        tables = resumed.manifest.tables
        together(self.channel, lambda: mark_changes(resumed.folder, tables, views, SAVED, known))

    def newest_step(self) -> int:
        """Of all checkpoints that the run can go on from, 0 for none; every rank calls it."""
        return on_first(
            self.channel, lambda: max((step_of(path) for path in self._newest_first()), default=0)
        )

    def newest_before(self, step: int) -> Base | None:
        """The newest undamaged one of a step or before it; every rank calls it."""

        def find() -> str:
            for path in self._newest_first():
                with suppress(DamagedCheckpointError):
                    if step_of(path) <= step:
                        read_manifest(path, to_go_on=True)
                        return str(path)
            return ""

        folder = on_first(self.channel, find)
        if not folder:
            return None
        manifest = agreed(self.channel, partial(read_manifest, Path(folder), True))
        return Base(Path(folder), manifest)

    def pass_by(self, progress: Progress) -> None:
        """The session was brought to a step of an earlier process without a checkpoint."""
        self._last = self._base_at(progress.step)
        on_first(self.channel, lambda: self._prepare_resume(progress.monitor.best_step))

    def restore_best(self, session: Trained) -> None:
        """Load what predictions depend on from the best checkpoint, if there is one.

        Raises:
            CheckpointError: (on all ranks) when the checkpoint is damaged.
        """
        name = on_first(self.channel, lambda: "" if (best := self.best()) is None else best.name)
        if name:
            path = self.folder / name
            restore_weights(path, read_manifest(path), session, self.channel)

    def link_best(self, step: int | None) -> None:
        """Point ``best`` at the checkpoint of a step, in one rename.

        A file with the step where the disk takes no links.
        """
        link = self.folder / "best"
        temporary = self.folder / "best.new"
        with storage_errors(link, "a disk that takes links", "free some space"):
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

    def _restore_newest(self, session: Trained) -> Base | None:
        """Where the session is from now on; every rank tries the same checkpoints."""

        def restore(path: Path, manifest: Manifest) -> None:
            restore_checkpoint(path, manifest, session, self.channel)

        paths = [
            Path(path)
            for path in on_first(self.channel, lambda: list(map(str, self._newest_first())))
        ]
        base, damaged = newest_whole(self.channel, paths, restore, to_go_on=True)
        if base is None:
            must_have_none(damaged, "put back a copy of one, or start anew in another --run-dir")
            return None
        for other, problem in damaged.items():
            logger.warning(
                "the checkpoint of step %d is damaged (%s) and is set aside as %s; the run goes on"
                " from step %d",
                step_of(other),
                problem.got,
                _aside(other).name,
                step_of(base.folder),
            )
        on_first(self.channel, lambda: set_aside(damaged, _aside))
        logger.info("resumed from %s", base.folder)
        warn_of_settings(base.manifest, session.config)
        return base

    def _newest_first(self) -> list[Path]:
        """All that the run can go on from.

        Of one step the whole one before that which was written beside training.
        """
        folders = [(step, 1, self.path(step)) for step in self.steps()]
        if self.beside is not None:
            folders += [
                (step, 0, step_path(self.beside, step)) for step in saved_steps(self.beside)
            ]
        return [path for *_, path in sorted(folders, reverse=True)]

    def _base_at(self, step: int) -> Base | None:
        """The newest one in the folder of a step that the session has passed.

        ``None`` when it is damaged, or there is none.
        """
        if self.resumed is not None and self.resumed.folder.parent == self.folder:
            return self.resumed
        steps = [other for other in on_first(self.channel, self.steps) if other <= step]
        if not steps:
            return None
        path = self.path(steps[-1])
        with suppress(DamagedCheckpointError):
            return Base(path, agreed(self.channel, partial(read_manifest, path)))
        return None

    def _next_base(self) -> Base | None:
        """What the next checkpoint builds on.

        ``None`` when a full one is due, or when the last one was removed.
        """
        last = self._last
        if last is None or last.manifest.increments + 1 >= self.full_every:
            return None
        if not on_first(self.channel, last.folder.exists):
            logger.warning("%s is gone; the next checkpoint is a full one", last.folder)
            return None
        return last

    def _tidy(self, best_step: int | None) -> None:
        self.link_best(best_step)
        self.remove_old()

    def remove_old(self) -> None:
        """Remove what is no longer kept; on rank 0."""
        best = self.best()
        with explained_refusal(self.folder):
            for step in self.steps()[: -self.keep]:
                if self.path(step).resolve() != best:
                    shutil.rmtree(self.path(step))

    def _prepare_resume(self, best_step: int | None) -> None:
        """Remove what a killed run left, and link the best checkpoint of the resumed one."""
        remove_leftovers(self.folder)
        if self.beside is not None:
            remove_leftovers(self.beside)
        if best_step is not None and not self.path(best_step).exists():
            logger.warning(
                "the best checkpoint, of step %d, is gone; the last one will stand in for it",
                best_step,
            )
        self.link_best(best_step)


def newest_whole(
    channel: Channel,
    paths: Sequence[Path],
    restore: Callable[[Path, Manifest], None],
    to_go_on: bool = False,
) -> tuple[Base | None, dict[Path, DamagedCheckpointError]]:
    """Restore the first checkpoint that is not damaged; every rank calls it.

    Args:
        channel: between the ranks.
        paths: newest first, the same on all ranks.
        restore: changes nothing when it finds damage, which it raises on all ranks.
        to_go_on: whether they may lack rows, see :func:`pibroch.state.manifest.read_manifest`.

    Returns:
        The checkpoint, ``None`` when there is none, and what is wrong with the newer ones.

    Raises:
        CheckpointError: what ``restore`` raises but for damage.
    """
    damaged: dict[Path, DamagedCheckpointError] = {}
    for path in paths:
        try:
            manifest = agreed(channel, partial(read_manifest, path, to_go_on))
            restore(path, manifest)
        except DamagedCheckpointError as error:
            damaged[path] = error
            continue
        return Base(path, manifest), damaged
    return None, damaged


def must_have_none(damaged: Mapping[Path, DamagedCheckpointError], do: str) -> None:
    """Raise CheckpointError when checkpoints, all of them damaged, were found."""
    if damaged:
        newest = next(iter(damaged))
        raise CheckpointError(
            f"no undamaged checkpoint in {newest.parent}: of step {step_of(newest)}"
            f" {damaged[newest].got}"
            + (f", and {len(damaged) - 1} older" if len(damaged) > 1 else ""),
            "one that is whole",
            do,
        ) from damaged[newest]


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("step-").partition(".")[0])


def set_aside(paths: Iterable[Path], name: Callable[[Path], Path]) -> None:
    """Keep checkpoints beside the others under names by which none is found.

    Raises:
        StorageError: when the disk refuses.
    """
    for path in paths:
        with explained_refusal(path):
            shutil.rmtree(name(path), ignore_errors=True)
            path.rename(name(path))


def _aside(path: Path) -> Path:
    """Where a damaged checkpoint is kept: beside the others, and none of them."""
    return path.with_name(f"{path.name}.damaged")
