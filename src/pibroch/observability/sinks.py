"""Sinks that keep metrics: JSON lines always, TensorBoard when asked for.

A run goes on where the disk refuses them.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pibroch.errors import MissingDependencyError, StorageError
from pibroch.observability.records import EvaluationRecord, TrainingRecord, WindowRecord

MOST_WAITING_LINES = 10_000
"""Lines that wait for a disk with room, some 400 bytes each, and 130 for each table of raw ids.

Of more the oldest are lost.
"""
logger = logging.getLogger(__name__)


class JsonLines:
    """Appends each record as one line; a reader may follow the file while it grows.

    What the disk refuses waits in memory, and is written once there is room; that it waits, and
    what was lost, is said once.

    Raises:
        StorageError: when the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise StorageError(
                f"{error.strerror} while opening {path}", "a disk with room", "free some space"
            ) from error
        self._waiting: deque[bytes] = deque()
        self._is_refused = False
        self._num_lost = 0

    def training(self, record: TrainingRecord) -> None:
        """See `Sink`."""
        self._write({"kind": "training", **asdict(record)})

    def evaluation(self, record: EvaluationRecord) -> None:
        """See `Sink`."""
        self._write({"kind": "evaluation", **asdict(record)})

    def window(self, record: WindowRecord) -> None:
        """See `Sink`."""
        self._write({"kind": "window", **asdict(record)})

    def close(self) -> None:
        """See `Sink`."""
        self._catch_up()
        lost = self._num_lost + len(self._waiting)
        if lost:
            logger.warning("%d lines of %s are lost", lost, self._path)
        with suppress(OSError):
            self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._waiting.append(json.dumps(record).encode() + b"\n")
        if len(self._waiting) > MOST_WAITING_LINES:
            del self._waiting[1]  # of the first a part may be in the file
            self._num_lost += 1
        self._catch_up()

    def _catch_up(self) -> None:
        try:
            while self._waiting:
                line = self._waiting[0]
                num_written = self._file.write(line)
                if num_written == len(line):
                    self._waiting.popleft()
                else:
                    self._waiting[0] = line[num_written:]
        except OSError as error:
            if not self._is_refused:
                self._is_refused = True
                logger.warning(
                    "%s while writing %s: the run goes on, and its lines wait for room",
                    error.strerror,
                    self._path,
                )
            return
        if self._is_refused:
            self._is_refused = False
            logger.info("%s is written again", self._path)


class TensorBoard:
    """Writes scalars for TensorBoard, up to the first that the disk refuses.

    Then it says once what is lost.

    Raises:
        MissingDependencyError: when the extra is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingDependencyError(
                "--tensorboard without tensorboard",
                "the extra `tensorboard`",
                "pip install 'pibroch[tensorboard]'",
            ) from error
        self._folder = folder
        self._num_lost = 0
        self._writer: SummaryWriter | None = SummaryWriter(str(folder))

    def training(self, record: TrainingRecord) -> None:
        """See `Sink`."""
        for name in (
            "loss",
            "samples_per_second",
            "learning_rate",
            "rss_bytes",
            "cache_hit_rate",
            "lookahead",
            "transfers_spared",
        ):
            self._add(f"training/{name}", getattr(record, name), record.step)
        for table, figures in (record.raw_ids or {}).items():
            for name in ("fill", "hit_rate", "candidates", "admissions", "evictions", "expiries"):
                self._add(f"raw_ids/{table}/{name}", getattr(figures, name), record.step)

    def evaluation(self, record: EvaluationRecord) -> None:
        """See `Sink`."""
        for name in ("auc", "logloss", "normalized_entropy", "calibration"):
            self._add(f"{record.split}/{name}", getattr(record, name), record.step)
        for label, figures in record.tasks.items():
            for name, value in figures.items():
                self._add(f"{record.split}/{label}/{name}", value, record.step)

    def window(self, record: WindowRecord) -> None:
        """See `Sink`."""
        for label, figures in record.tasks.items():
            for name in ("auc", "logloss", "normalized_entropy", "calibration", "num_samples"):
                self._add(f"windows/{label}/{name}", figures[name], record.step)
        self._add("windows/num_late", record.num_late, record.step)
        self._add("windows/num_ahead", record.num_ahead, record.step)

    def close(self) -> None:
        """See `Sink`."""
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as error:
                self._give_up(error)
        if self._num_lost:
            logger.warning("%d values for TensorBoard are lost", self._num_lost)

    def _add(self, name: str, value: float | None, step: int) -> None:
        if value is None:
            return
        if self._writer is not None:
            try:
                self._writer.add_scalar(name, value, step)
                return
            except OSError as error:  # of one before: a thread writes them
                self._give_up(error)
        self._num_lost += 1

    def _give_up(self, error: OSError) -> None:
        self._writer = None
        logger.warning(
            "%s while writing %s: the run goes on without it", error.strerror, self._folder
        )
