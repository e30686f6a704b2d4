"""Sinks that keep metrics: JSON lines always, TensorBoard when asked for."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pibroch.errors import MissingDependencyError, StorageError
from pibroch.observability.records import EvaluationRecord, TrainingRecord


class JsonLines:
    """Appends each record as one line; a reader may follow the file while it grows.

    Raises:
        StorageError: when the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def training(self, record: TrainingRecord) -> None:
        """See `Sink`."""
        self._write({"kind": "training", **asdict(record)})

    def evaluation(self, record: EvaluationRecord) -> None:
        """See `Sink`."""
        self._write({"kind": "evaluation", **asdict(record)})

    def close(self) -> None:
        """See `Sink`."""
        with suppress(OSError):  # of a line that could not be written, which was reported then
            self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise StorageError(
                f"{error.strerror} while writing {self._path}",
                "a disk with room",
                "free some space, then use --resume",
            ) from error


class TensorBoard:
    """Writes scalars for TensorBoard.

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
        self._writer = SummaryWriter(str(folder))

    def training(self, record: TrainingRecord) -> None:
        """See `Sink`."""
        for name in (
            "loss",
            "samples_per_second",
            "learning_rate",
            "rss_bytes",
            "cache_hit_rate",
            "lookahead",
        ):
            self._add(f"training/{name}", getattr(record, name), record.step)

    def evaluation(self, record: EvaluationRecord) -> None:
        """See `Sink`."""
        for name in ("auc", "logloss", "normalized_entropy", "calibration"):
            self._add(f"{record.split}/{name}", getattr(record, name), record.step)

    def close(self) -> None:
        """See `Sink`."""
        self._writer.close()

    def _add(self, name: str, value: float | None, step: int) -> None:
        if value is not None:
            self._writer.add_scalar(name, value, step)
