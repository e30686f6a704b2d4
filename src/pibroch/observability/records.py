"""What a run reports while it goes on, and who may listen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """The state of training after a step.

    Attributes:
        step: updates so far.
        epoch: passes over the data that are complete.
        loss: mean over the steps since the last record.
        samples_per_second: over the same steps.
        learning_rate: of the dense layers.
        seconds: spent in training steps so far.
        rss_bytes: memory of this process now.
    """

    step: int
    epoch: int
    loss: float
    samples_per_second: float
    learning_rate: float
    seconds: float
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """One evaluation; figures that are undefined are ``None``."""

    step: int
    split: str
    auc: float | None
    logloss: float | None
    normalized_entropy: float | None
    calibration: float | None
    num_samples: int
    is_best: bool


class Sink(Protocol):
    """Takes records as they come, on the training thread: must not block for long."""

    def training(self, record: TrainingRecord) -> None:
        """Take a training record."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """Take an evaluation."""

    def close(self) -> None:
        """Flush and let go of everything; called once, also after an error."""


class FanOut:
    """Passes records on to several sinks."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def training(self, record: TrainingRecord) -> None:
        """See `Sink`."""
        for sink in self._sinks:
            sink.training(record)

    def evaluation(self, record: EvaluationRecord) -> None:
        """See `Sink`."""
        for sink in self._sinks:
            sink.evaluation(record)

    def close(self) -> None:
        """See `Sink`."""
        for sink in self._sinks:
            sink.close()
