"""The model that is served now, and how a new version takes its place: whole, warm, and between two requests."""

from __future__ import annotations

import logging
import re
import threading
from dataclasses import dataclass
from pathlib import Path

from pibroch.errors import CheckpointError, PibrochError
from pibroch.serve.delta_format import MANIFEST as DELTA_MANIFEST
from pibroch.serve.delta_format import is_delta
from pibroch.serve.export_format import MANIFEST as EXPORT_MANIFEST
from pibroch.serve.export_format import is_export
from pibroch.serve.predictor import Predictor
from pibroch.train.checkpoint_folder import find_checkpoint
from pibroch.train.manifest import MANIFEST as CHECKPOINT_MANIFEST

logger = logging.getLogger(__name__)
WARM_ROWS = (1, 64, 1024)
Identity = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class Target:
    """What a path means now, and what tells it from another that takes its place."""

    folder: Path
    identity: Identity


def find_target(path: Path) -> Target:
    """An export or a delta; of a folder of numbered ones the highest; else a checkpoint, or a run's best one.

    Raises:
        CheckpointError: when there is none.
    """
    folder = path
    if not _is_exported(path):
        numbered = [each for each in path.glob("*") if each.name.isdecimal() and _is_exported(each)]
        folder = max(numbered, key=lambda each: int(each.name)) if numbered else find_checkpoint(path)
    names = (EXPORT_MANIFEST, DELTA_MANIFEST, CHECKPOINT_MANIFEST)
    manifest = next((folder / name for name in names if (folder / name).is_file()), folder / CHECKPOINT_MANIFEST)
    try:
        found = manifest.stat()
    except OSError as error:  # it was replaced in between
        raise CheckpointError(
            f"no {manifest}: {error.strerror}", "an export or a checkpoint", "check the path"
        ) from error
    return Target(folder, (str(folder), found.st_ino, found.st_mtime_ns, found.st_size))


def _is_exported(path: Path) -> bool:
    return is_export(path) or is_delta(path)


def newest_run(runs: Path = Path("runs")) -> Path:
    """The run directory with the newest checkpoint.

    Raises:
        CheckpointError: when there is none.
    """
    found: list[tuple[int, Path]] = []
    for run in runs.glob("*"):
        try:
            found.append((find_target(run).identity[2], run))
        except PibrochError:
            continue
    if not found:
        raise CheckpointError(
            f"no run with a checkpoint in {runs.absolute()}", "something to serve",
            "name an export, a checkpoint or a run, or begin with `pibroch train`",
        )  # fmt: skip
    return max(found)[1]


class ModelStore:
    """Holds the newest version of what lies at a path.

    Args:
        path: see :func:`find_target`.
        data: the dataset of a checkpoint, see :meth:`Predictor.open`.
        name: of the model; the path's by default.

    Raises:
        CheckpointError: when there is nothing that can be served.
    """

    def __init__(self, path: Path, data: Path | None = None, name: str | None = None) -> None:
        self._path, self._data = path, data
        self.name = name or re.sub(r"[^A-Za-z0-9._-]+", "-", path.absolute().name) or "model"
        self._refreshing = threading.Lock()
        self._refused: Target | None = None
        self._target = find_target(path)
        self.current: Predictor = _opened(self._target, data)
        self.num_loaded, self.num_failed = 1, 0

    def refresh(self) -> bool:
        """Open what has taken the place of the current version, if something has; returns whether it did.

        Blocks for as long as that takes. What cannot be opened is logged once and left: the current version stays.
        """
        with self._refreshing:
            try:
                target = find_target(self._path)
            except PibrochError:
                return False  # while one folder takes another's name there is none
            if target in (self._target, self._refused):
                return False
            try:
                opened = _opened(target, self._data, self.current)
            except PibrochError as error:
                try:
                    is_final = find_target(self._path) == target  # else it was replaced meanwhile: look again
                except PibrochError:
                    is_final = False
                if is_final:
                    self._refused = target
                    self.num_failed += 1
                    logger.error("%s stays in service: %s", self.current.version, error)
                return False
            before, self.current, self._target = self.current, opened, target
            self.num_loaded += 1
            logger.info("serving version %s in place of %s", opened.version, before.version)
            return True


def _opened(target: Target, data: Path | None, current: Predictor | None = None) -> Predictor:
    """A predictor that has scored, so that kernels are compiled and files are in memory; it shares what it can."""
    predictor = Predictor.open(target.folder, data, current)
    if predictor.takes_raw:
        for count in WARM_ROWS:
            predictor.score_raw({column: [None] * count for column in predictor.columns})
    return predictor
