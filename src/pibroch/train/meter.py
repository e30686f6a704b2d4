"""What a run measures between two training records.

Loss over all ranks, speed, waiting, traffic, hits, memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pibroch.collectives.world import World
from pibroch.exchange.base import Exchange
from pibroch.observability.memory import rss_bytes
from pibroch.train.stopwatch import Stopwatch


@dataclass(frozen=True, slots=True)
class Reading:
    """Figures since the last reading.

    Names and units as in :class:`~pibroch.observability.records.TrainingRecord`.
    """

    loss: float
    samples_per_second: float
    waiting_seconds: float
    bytes_sent: int
    bytes_received: int
    rss_bytes: int
    cache_hit_rate: float | None
    lookahead: int | None


class Meter:
    """Sums up steps.

    Args:
        world: whose losses make the mean.
        stopwatch: keeps this process's training time and samples.
        exchange: whose hits are counted.
    """

    def __init__(self, world: World, stopwatch: Stopwatch, exchange: Exchange[Any]) -> None:
        self._world = world
        self._stopwatch = stopwatch
        self._exchange = exchange
        self._loss_sum = 0.0
        self._num_samples = 0
        self._seconds, self._samples = stopwatch.read()
        self._waited, self._sent, self._received = self._traffic()
        self._done = exchange.report()

    def add(self, loss: float, num_samples: int) -> None:
        """Count a step: the mean loss of this rank's samples."""
        self._loss_sum += loss * num_samples
        self._num_samples += num_samples

    def read(self) -> Reading:
        """The loss is the mean over the samples of all ranks, the same on all.

        Every rank calls this at the same step.

        Rank 0 gives the speed of all ranks together, the others their own.
        """
        seconds, samples = self._stopwatch.read()
        waited, sent, received = self._traffic()
        done = self._exchange.report()
        elapsed = seconds - self._seconds
        own = samples - self._samples
        totals = self._world.control.gather([self._loss_sum, self._num_samples, own])
        loss_sum, num_samples, all_own = (sum(column) for column in zip(*totals, strict=True))
        reading = Reading(
            loss=loss_sum / max(1, num_samples),
            samples_per_second=(all_own if self._world.is_first else own) / elapsed
            if elapsed
            else 0.0,
            waiting_seconds=waited - self._waited,
            bytes_sent=sent - self._sent,
            bytes_received=received - self._received,
            rss_bytes=rss_bytes(),
            cache_hit_rate=hit_rate(
                done.rows_read - self._done.rows_read, done.rows_fetched - self._done.rows_fetched
            ),
            lookahead=done.lookahead or None,
        )
        self._loss_sum = 0.0
        self._num_samples = 0
        self._seconds = seconds
        self._samples = samples
        self._waited = waited
        self._sent = sent
        self._received = received
        self._done = done
        return reading

    def _traffic(self) -> tuple[float, int, int]:
        traffic = self._world.ranks.traffic
        return traffic.waited_s, traffic.sent, traffic.received


def hit_rate(rows_read: int, rows_fetched: int) -> float | None:
    """The share of rows that did not have to be fetched; ``None`` when none was read.

    >>> hit_rate(200, 50)
    0.75
    """
    return max(0.0, 1 - rows_fetched / rows_read) if rows_read else None
