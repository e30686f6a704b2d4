"""The model that is served now, and how a new version takes its place.

Whole, warm, and between two requests.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pibroch.data.mapped import FileIdentity
from pibroch.errors import CheckpointError, PibrochError, WorkerLostError
from pibroch.serve.predictor import Predictor
from pibroch.serve.raw_body import warm_parsers
from pibroch.serve.retrieval import Items, Retriever
from pibroch.serve.row_files import MappedRows
from pibroch.serve.split_rows import RowSplit
from pibroch.state.checkpoint_folder import find_checkpoint
from pibroch.state.delta_format import MANIFEST as DELTA_MANIFEST
from pibroch.state.delta_format import is_exported
from pibroch.state.export_format import MANIFEST as EXPORT_MANIFEST
from pibroch.state.manifest import MANIFEST as CHECKPOINT_MANIFEST
from pibroch.state.versions import chosen_version

logger = logging.getLogger(__name__)
WARM_ROWS = (1, 64, 1024)
FOLLOWER_ROWS = WARM_ROWS[:2]
"""Of a delta that follows a version which is warm: its layers have scored batches of all sizes."""
HELD_VERSIONS = 4
"""Newest versions whose rows other hosts can have, which may be at another than this one."""
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 300.0
"""Until something that could not be opened is looked at again: each time twice as long, up to this.
"""


@dataclass(frozen=True, slots=True)
class Target:
    """What a path means now, and what tells it from another that takes its place."""

    folder: Path
    manifest: FileIdentity


@dataclass(frozen=True, slots=True)
class _Refused:
    """What could not be opened, and when to look again: its files may still be on their way."""

    target: Target
    reason: str
    wait_s: float
    again_at: float

    @classmethod
    def of(cls, target: Target, reason: str, before: _Refused | None) -> _Refused:
        """After one more attempt."""
        wait_s = FIRST_RETRY_S
        if before is not None and before.target == target:
            wait_s = min(2 * before.wait_s, LONGEST_RETRY_S)
        return cls(target, reason, wait_s, time.monotonic() + wait_s)


def find_target(path: Path) -> Target:
    """An export or a delta; of a folder of numbered ones the highest, or where it was rolled back.

    Else a checkpoint, or a run's best one.

    Raises:
        CheckpointError: when there is none.
    """
    folder = path
    if not is_exported(path):
        folder = chosen_version(path) or find_checkpoint(path)
    names = (EXPORT_MANIFEST, DELTA_MANIFEST, CHECKPOINT_MANIFEST)
    manifest = next(
        (folder / name for name in names if (folder / name).is_file()), folder / CHECKPOINT_MANIFEST
    )
    identity = FileIdentity.of(manifest)
    if identity is None:  # it was replaced in between
        raise CheckpointError(f"no {manifest}", "an export or a checkpoint", "check the path")
    return Target(folder, identity)


def newest_run(runs: Path = Path("runs")) -> Path:
    """The run directory with the newest checkpoint.

    Raises:
        CheckpointError: when there is none.
    """
    candidates: list[tuple[int, Path]] = []
    for run in runs.glob("*"):
        try:
            candidates.append((find_target(run).manifest.changed_ns, run))
        except PibrochError:
            continue
    if not candidates:
        raise CheckpointError(
            f"no run with a checkpoint in {runs.absolute()}",
            "something to serve",
            "name an export, a checkpoint or a run, or begin with `pibroch train`",
        )
    return max(candidates)[1]


class ModelStore:
    """Holds the newest version of what lies at a path.

    Args:
        path: see :func:`find_target`.
        data: the dataset of a checkpoint, see :meth:`Predictor.open`.
        name: of the model; the path's by default.
        split: where the rows are.
        items: of which the best are retrieved.

    Attributes:
        current: what answers.
        retriever: what retrieves items, made of one version, the current one but for the moment in
            which another takes its place; ``None`` without items.
        is_warm: whether it has scored; false only while other hosts, which have some of its rows,
            do not answer.

    Raises:
        CheckpointError: when there is nothing that can be served.
    """

    def __init__(
        self,
        path: Path,
        data: Path | None = None,
        name: str | None = None,
        split: RowSplit | None = None,
        items: Items | None = None,
    ) -> None:
        self._path = path
        self._data = data
        self.split = split or RowSplit()
        self.name = name or re.sub(r"[^A-Za-z0-9._-]+", "-", path.absolute().name) or "model"
        self._refreshing = threading.Lock()
        self._refused: _Refused | None = None
        self._coming: tuple[Target, Predictor] | None = None
        self._held: tuple[Predictor, ...] = ()
        self._target = find_target(path)
        self._items = items
        self.current: Predictor = self._opened(self._target)
        self.retriever = self._retriever_of(self.current)
        self._coming = None
        self.num_loaded = 1
        self.num_failed = 0
        self.is_warm = False
        self.warm()

    def refresh(self) -> bool:
        """Open what has taken the place of the current version, if something has.

        Returns whether it did.

        Blocks for as long as that takes. What cannot be opened is logged, and looked at again later
        and later: the current version stays. It stays, too, until all hosts that have rows of the
        next one have opened that. Where its own files were changed it is opened again, too, which
        succeeds once they are whole.
        """
        with self._refreshing:
            try:
                target = find_target(self._path)
            except PibrochError:
                return False  # while one folder takes another's name there is none
            if target == self._target and self.current.is_intact:
                return False
            refused = self._refused
            if (
                refused is not None
                and refused.target == target
                and time.monotonic() < refused.again_at
            ):
                return False
            is_new = self._coming is None or self._coming[0] != target
            try:
                opened = self._opened(target)
                is_follower = self.is_warm and opened.follows(self.current)
                _warm(opened, self.split, FOLLOWER_ROWS if is_follower else WARM_ROWS)
                retriever = self._retriever_of(opened)
            except WorkerLostError as error:
                if is_new:
                    logger.warning(
                        "%s stays in service until all hosts have the next: %s",
                        self.current.version,
                        error,
                    )
                return False
            except PibrochError as error:
                self._refuse(target, error)
                return False
            before = self.current
            self.current = opened
            self.retriever = retriever
            self._target = target
            self._coming = None
            self._refused = None
            self.num_loaded += 1
            self.is_warm = True
            logger.info("serving version %s in place of %s", opened.version, before.version)
            return True

    def warm(self) -> None:
        """Score with the current version where it has not yet; blocks."""
        if self.is_warm:
            return
        try:
            _warm(self.current, self.split, WARM_ROWS)
        except WorkerLostError as error:
            logger.warning("not ready yet, as rows are elsewhere: %s", error)
        else:
            self.is_warm = True

    def rows_of(self, sha256: str) -> MappedRows | None:
        """The part of an export's rows that is here, by the checksum in its manifest.

        From any thread.
        """
        for predictor in (self.current, *reversed(self._held)):
            rows = predictor.exported_rows(sha256)
            if rows is not None and predictor.is_intact:
                return rows
        return None

    def _opened(self, target: Target) -> Predictor:
        """A predictor that shares files with the current one; others can read its rows."""
        if self._coming is not None and self._coming[0] == target:
            return self._coming[1]
        beside: Predictor | None = getattr(self, "current", None)
        if beside is not None and not beside.is_intact:
            beside = None
        opened = Predictor.open(target.folder, self._data, beside, self.split)
        self._coming = target, opened
        if self.split.part is not None:
            self._held = (*self._held, opened)[-HELD_VERSIONS:]
        return opened

    def _retriever_of(self, predictor: Predictor) -> Retriever | None:
        return None if self._items is None else Retriever(predictor, self._items)

    def _refuse(self, target: Target, error: PibrochError) -> None:
        """Leave what cannot be opened for a while, unless it was replaced meanwhile.

        Then it is looked at at once.
        """
        self._coming = None
        try:
            is_final = find_target(self._path) == target
        except PibrochError:
            is_final = False
        if not is_final:
            return
        before = self._refused
        self._refused = _Refused.of(target, str(error), before)
        if before is not None and (before.target, before.reason) == (target, str(error)):
            return
        self.num_failed += 1
        stays = "stays in service" if self.current.is_intact else "is not served any more"
        logger.error("%s %s: %s", self.current.version, stays, error)


def _warm(predictor: Predictor, split: RowSplit, counts: Iterable[int]) -> None:
    """Score missing and unknown values, so that kernels are compiled and files are in memory.

    Raises:
        CheckpointError: where a score is no number.
    """
    if not split.scores:
        return
    predictor.reach_rows()
    if predictor.takes_raw:
        warm_parsers(predictor.schema, predictor.columns)
        for count in counts:
            values = [None, *map(str, range(count - 1))]
            scores = predictor.score_raw(dict.fromkeys(predictor.columns, values))
            if not scores.isfinite().all():
                value = values[int(scores.isfinite().logical_not().nonzero()[0])]
                raise CheckpointError(
                    f"version {predictor.version}, which scores {value!r} with no number",
                    "finite scores",
                    "export another checkpoint",
                )
