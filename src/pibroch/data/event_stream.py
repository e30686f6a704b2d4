"""A stream of events with a planted truth that drifts: ids go and come, preferences turn.

The samples are those of :mod:`pibroch.data.synthetic` with raw ids, one after the other in event
time. Since the true probability of each is known, so is the best AUC of each window of event time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pibroch.data.event_windows import NO_TIME, WindowRule
from pibroch.data.kernels.sampling import stream_keys, uniform
from pibroch.data.planted import TruthMeter, sigmoid
from pibroch.data.synthetic import Generator, SyntheticOptions
from pibroch.errors import ConfigError

ID = "event_id"
TIME = "time"
_LATE_STREAM = 0x57AE  # another stream of random numbers than the samples'


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What to generate.

    Attributes:
        start_ms: the first event time.
        seconds: of event time.
        rate: events a second of event time.
        seed: the same options give the same events.
        table_rows: ids of the largest tables at a time.
        drift: share of each table's hot ids that is replaced by new ones every so often.
        drift_every_s: seconds between two such times.
        turn_s: seconds in which preferences make a quarter turn; 0 for none.
        late: share of events that stand behind younger ones in the stream.
        late_by_s: by at most so many seconds.
    """

    start_ms: int
    seconds: float
    rate: float
    seed: int = 0
    table_rows: int = 10_000
    drift: float = 0.01
    drift_every_s: float = 60.0
    turn_s: float = 3600.0
    late: float = 0.0
    late_by_s: float = 30.0

    @property
    def num_events(self) -> int:
        """In all."""
        return round(self.seconds * self.rate)


class EventStream:
    """Events by number; event ``i`` is the same however they are cut into chunks.

    Raises:
        ConfigError: when an option makes no sense.
    """

    def __init__(self, options: StreamOptions) -> None:
        if not (options.rate > 0 and options.num_events >= 1 and 0 <= options.late <= 1):
            raise ConfigError(
                f"{options.seconds:g} seconds of {options.rate:g} events, a share of"
                f" {options.late:g} of them late",
                "at least one event, a share from 0 to 1",
            )
        self.options = options
        drawn = SyntheticOptions(
            num_samples=options.num_events,
            seed=options.seed,
            max_table_rows=options.table_rows,
            raw=True,
            drift=options.drift,
            drift_every=max(1, round(options.drift_every_s * options.rate)),
            turn=round(options.turn_s * options.rate),
        )
        self._generator = Generator(drawn)
        self.schema = self._generator.schema.model_copy(update={"time": TIME, "time_unit": "ms"})
        self._late_keys = stream_keys(options.seed ^ _LATE_STREAM, 2)

    def frames(self, first: int, count: int) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Events ``first`` to ``first + count``, and of each its truth.

        The first has the columns ``event_id``, ``time``, the label, dense values and ids; the
        second ``event_id``, ``time``, the label, and ``logit`` and ``probability``, the true ones.
        """
        events = self._generator.events(first, count)
        schema = self.schema
        assert schema.label is not None, "it has one"
        about = {
            ID: np.arange(first, first + count),
            TIME: self._times(first, count),
            schema.label: events.labels,
        }
        dense = {each.column: events.counts[:, i] for i, each in enumerate(schema.dense)}
        ids = {each.column: events.ids[:, i] for i, each in enumerate(schema.categorical)}
        truth = {"logit": events.logits, "probability": sigmoid(events.logits)}
        return pl.DataFrame({**about, **dense, **ids}), pl.DataFrame({**about, **truth})

    def _times(self, first: int, count: int) -> NDArray[np.int64]:
        options = self.options
        places = np.arange(first, first + count)
        after = np.floor(places * (1000 / options.rate)).astype(np.int64)
        times: NDArray[np.int64] = options.start_ms + after
        if options.late:
            who, by = self._late_keys
            is_late = uniform(who, first, count) < options.late
            delays = np.floor(uniform(by, first, count) * (1000 * options.late_by_s))
            times -= np.where(is_late, delays, 0).astype(np.int64)
        return times


class BestWindows:
    """What the best possible model does in each window of event time.

    Args:
        rule: of windows.
    """

    def __init__(self, rule: WindowRule) -> None:
        self._rule = rule
        self._watermark = NO_TIME
        self._open: dict[int, TruthMeter] = {}

    def add(self, truth: pl.DataFrame, label: str) -> list[dict[str, float]]:
        """Count events by their truth; the windows that are over now, see :meth:`finish`.

        Events whose window is over already count in none.
        """
        times, logits, labels = (truth[name].to_numpy() for name in (TIME, "logit", label))
        begins = self._rule.begins(times)
        for begin in np.unique(begins).tolist():
            if not self._rule.is_over(begin, self._watermark):
                places = begins == begin
                self._open.setdefault(begin, TruthMeter()).add(logits[places], labels[places])
        self._watermark = max(self._watermark, int(times.max()))
        return [
            self._closed(begin)
            for begin in sorted(self._open)
            if self._rule.is_over(begin, self._watermark)
        ]

    def finish(self) -> list[dict[str, float]]:
        """The windows that are left.

        Each has ``begin_ms``, ``end_ms``, ``num_samples`` and what :meth:`TruthMeter.metrics` says.
        """
        return [self._closed(begin) for begin in sorted(self._open)]

    def _closed(self, begin: int) -> dict[str, float]:
        meter = self._open.pop(begin)
        end = begin + self._rule.width_ms
        about = {"begin_ms": begin, "end_ms": end, "num_samples": meter.num_samples}
        return about | meter.metrics()
