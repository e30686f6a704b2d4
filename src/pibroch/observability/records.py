"""What a run reports while it goes on, and who may listen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RawIdsRecord:
    """A table of raw ids, or several together.

    Attributes:
        capacity: rows.
        used: of these now.
        candidates: ids without a row that are remembered one by one now.
        lookups: ids in the steps since the last record, as often as they stood there.
        hits: of these, the ones that had a row before their step.
        admissions: ids that were given a row since the last record.
        evictions: that lost it to others.
        expiries: that lost it by age.
        ahead: samples since the last record whose event times were not believed, where ids expire
            by these.
    """

    capacity: int = 0
    used: int = 0
    candidates: int = 0
    lookups: int = 0
    hits: int = 0
    admissions: int = 0
    evictions: int = 0
    expiries: int = 0
    ahead: int = 0

    @property
    def fill(self) -> float:
        """The share of rows that are used."""
        return self.used / max(1, self.capacity)

    @property
    def hit_rate(self) -> float | None:
        """The share of looked up ids that had a row; ``None`` when none was looked up."""
        return self.hits / self.lookups if self.lookups else None

    @classmethod
    def between(cls, before: Mapping[str, int], now: Mapping[str, int]) -> RawIdsRecord:
        """From the counters of a row index at two times; what it does not count is 0."""
        totals = {each.name: now.get(each.name, 0) for each in fields(cls)}
        for name in totals.keys() - {"capacity", "used", "candidates"}:
            totals[name] -= before.get(name, 0)
        return cls(**totals)

    @classmethod
    def together(cls, records: Iterable[RawIdsRecord]) -> RawIdsRecord:
        """Of all these tables."""
        records = list(records)
        return cls(
            **{
                each.name: sum(getattr(record, each.name) for record in records)
                for each in fields(cls)
            }
        )


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """The state of training after a step.

    Attributes:
        step: updates so far.
        epoch: passes over the data that are complete.
        loss: mean over the samples of all ranks since the last record.
        samples_per_second: over the same steps; of all ranks on rank 0, of their own on the others.
        learning_rate: of the dense layers.
        seconds: spent in training steps so far.
        rss_bytes: memory of this process now.
        waiting_seconds: in which this process waited for other ranks since the last record,
            evaluation included.
        bytes_sent, bytes_received: between this process and other ranks, since the last record.
        cache_hit_rate: of the rows that this process read since the last record, the share that was
            in its memory already; ``None`` where the exchange does not look ahead.
        lookahead: steps in force, ``None`` likewise.
        transfers_spared: of the vectors that would cross between ranks with samples as they are
            given, the share that did not have to since the last record, as expected by who assigned
            samples to ranks; ``None`` where nobody did.
        raw_ids: tables of raw ids by name, the same on all ranks; ``None`` without such tables.
        event_time: until when events were trained on, of all ranks, in milliseconds since 1970;
            ``None`` where records have none.
    """

    step: int
    epoch: int
    loss: float
    samples_per_second: float
    learning_rate: float
    seconds: float
    rss_bytes: int
    waiting_seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    cache_hit_rate: float | None = None
    lookahead: int | None = None
    transfers_spared: float | None = None
    raw_ids: Mapping[str, RawIdsRecord] | None = None
    event_time: int | None = None


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """One evaluation; figures that are undefined are ``None``.

    Attributes:
        step: after which it was.
        split: over which.
        auc, logloss, normalized_entropy, calibration: of the first label, of 0 and 1.
        num_samples: of the split.
        is_best: whether the model is the best so far.
        tasks: all figures by label and name.
    """

    step: int
    split: str
    auc: float | None
    logloss: float | None
    normalized_entropy: float | None
    calibration: float | None
    num_samples: int
    is_best: bool
    tasks: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WindowRecord:
    """What predictions before training were worth in a window of event time that has closed.

    Undefined figures are ``None``.

    Attributes:
        step: after which it closed.
        begin_ms, end_ms: its event times, milliseconds since 1970; the end is not in it.
        num_samples: in it.
        num_late: samples of the run so far that came after their window had closed.
        num_ahead: of the run so far whose times were too far ahead to be believed.
        auc, logloss, normalized_entropy, calibration: of the first label of 0 and 1.
        alarms: which figures are outside the recipe's bands, in words.
        tasks: all figures by label and name.
    """

    step: int
    begin_ms: int
    end_ms: int
    num_samples: int
    num_late: int
    auc: float | None
    logloss: float | None
    normalized_entropy: float | None
    calibration: float | None
    alarms: tuple[str, ...] = ()
    tasks: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    num_ahead: int = 0


class Sink(Protocol):
    """Takes records as they come, on the training thread: must not block for long."""

    def training(self, record: TrainingRecord) -> None:
        """Take a training record."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """Take an evaluation."""

    def window(self, record: WindowRecord) -> None:
        """Take a window that has closed."""

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

    def window(self, record: WindowRecord) -> None:
        """See `Sink`."""
        for sink in self._sinks:
            sink.window(record)

    def close(self) -> None:
        """See `Sink`."""
        for sink in self._sinks:
            sink.close()


def figure(value: float | None, digits: int = 4) -> str:
    """A figure of an evaluation as people read it.

    >>> figure(0.75), figure(math.nan), figure(None)
    ('0.7500', 'undefined', 'undefined')
    """
    return "undefined" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def shown_time(event_time: int) -> str:
    """An event time, milliseconds since 1970, as people read it.

    >>> shown_time(1_700_000_000_123)
    '2023-11-14T22:13:20.123Z'
    """
    try:
        moment = datetime.fromtimestamp(event_time / 1000, UTC)
    except (OverflowError, ValueError, OSError):  # beyond the calendar
        return f"{event_time} ms"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


UNWEIGHTED = "_unweighted"
"""What the name of a figure ends with that counts each sample once, whatever it weighs."""


def has_more_than_clicks(tasks: Mapping[str, Mapping[str, float | None]]) -> bool:
    """Whether figures are of several labels, of numbers or of groups."""
    return len(tasks) > 1 or any(
        "auc" not in figures or "gauc" in figures for figures in tasks.values()
    )


def task_figures(tasks: Mapping[str, Mapping[str, float | None]]) -> str:
    """The figures of all labels on a line, where samples have weights the weighted ones.

    >>> task_figures({"click": {"auc": 0.75}, "seconds": {"rmse": 2.0, "mae": None}})
    'click auc 0.7500; seconds rmse 2.0000, mae undefined'
    """
    return "; ".join(
        f"{label} "
        + ", ".join(
            f"{name} {figure(value)}"
            for name, value in figures.items()
            if not name.endswith(UNWEIGHTED)
        )
        for label, figures in tasks.items()
    )
