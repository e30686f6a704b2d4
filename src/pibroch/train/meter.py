"""What a run measures: loss over all ranks, speed, time, waiting, traffic, hits, memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pibroch.collectives.world import World
from pibroch.embedding import HashedIndex
from pibroch.embedding.row_index import LearningIndex
from pibroch.exchange import Embeddings
from pibroch.exchange.base import Exchange
from pibroch.observability.memory import rss_bytes
from pibroch.observability.records import RawIdsRecord


class Stopwatch:
    """Counts seconds and samples of the steps between ``start`` and ``pause``.

    Evaluation, saving and the compiling first step do not count.

    Args:
        seconds_before: of earlier processes of the same run.
    """

    def __init__(self, seconds_before: float = 0.0) -> None:
        self.seconds_before = seconds_before
        self._seconds = 0.0
        self._samples = 0
        self._started: float | None = None

    def start(self) -> None:
        """Go on counting."""
        if self._started is None:
            self._started = time.perf_counter()

    def pause(self) -> None:
        """Stop counting until the next ``start``."""
        if self._started is not None:
            self._seconds += time.perf_counter() - self._started
            self._started = None

    def add(self, samples: int) -> None:
        """Count samples, when running."""
        if self._started is not None:
            self._samples += samples

    def read(self) -> tuple[float, int]:
        """Seconds and samples of this process so far."""
        running = 0.0 if self._started is None else time.perf_counter() - self._started
        return self._seconds + running, self._samples


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
    transfers_spared: float | None
    raw_ids: Mapping[str, RawIdsRecord] | None


class Meter:
    """Sums up steps.

    Args:
        world: whose losses make the mean.
        stopwatch: keeps this process's training time and samples.
        embeddings: whose hits and rows in use are counted.
    """

    def __init__(self, world: World, stopwatch: Stopwatch, embeddings: Embeddings) -> None:
        self._world = world
        self._stopwatch = stopwatch
        self._embeddings = embeddings
        self._exchange = embeddings.exchange
        self._loss_sum = 0.0
        self._num_samples = 0
        self._seconds, self._samples = stopwatch.read()
        self._waited, self._sent, self._received = self._traffic()
        self._done = self._exchange.report()
        self._transfers = embeddings.transfers, embeddings.transfers_given
        self._counters = counters_of(embeddings)

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
        counters = counters_of(self._embeddings)
        transfers = self._embeddings.transfers, self._embeddings.transfers_given
        elapsed = seconds - self._seconds
        own = samples - self._samples
        totals = self._world.control.gather([self._loss_sum, self._num_samples, own])
        loss_sum, num_samples, all_own = (sum(column) for column in zip(*totals, strict=True))
        counted = all_own if self._world.is_first else own
        reading = Reading(
            loss=loss_sum / max(1, num_samples),
            samples_per_second=counted / elapsed if elapsed else 0.0,
            waiting_seconds=waited - self._waited,
            bytes_sent=sent - self._sent,
            bytes_received=received - self._received,
            rss_bytes=rss_bytes(),
            cache_hit_rate=hit_rate(
                done.rows_read - self._done.rows_read, done.rows_fetched - self._done.rows_fetched
            ),
            lookahead=done.lookahead or None,
            transfers_spared=spared(
                transfers[0] - self._transfers[0], transfers[1] - self._transfers[1]
            ),
            raw_ids={
                table: RawIdsRecord.between(self._counters[table], each)
                for table, each in counters.items()
            }
            or None,
        )
        self._loss_sum = 0.0
        self._num_samples = 0
        self._seconds = seconds
        self._samples = samples
        self._waited = waited
        self._sent = sent
        self._received = received
        self._done = done
        self._transfers = transfers
        self._counters = counters
        return reading

    def _traffic(self) -> tuple[float, int, int]:
        traffic = self._world.ranks.traffic
        return traffic.waited_s, traffic.sent, traffic.received


def counters_of(embeddings: Embeddings) -> dict[str, dict[str, int]]:
    """What tables of raw ids count, by name; see :meth:`LearningIndex.counters`."""
    return {
        table: index.counters()
        for table, index in embeddings.row_indices.items()
        if isinstance(index, LearningIndex)
    }


def totals_of(embeddings: Embeddings) -> dict[str, dict[str, int | float | None]]:
    """The same with the ``hit_rate`` over all steps, and of hashed tables ``search_p99``.

    The slots that a search reads, of 99 ids of 100 no more; O(capacity).
    """
    totals: dict[str, dict[str, int | float | None]] = {}
    for table, counters in counters_of(embeddings).items():
        totals[table] = {**counters, "hit_rate": RawIdsRecord.between({}, counters).hit_rate}
        index = embeddings.row_indices[table]
        if isinstance(index, HashedIndex):
            totals[table]["search_p99"] = index.longest_search(0.99)
    return totals


def hit_rate(rows_read: int, rows_fetched: int) -> float | None:
    """The share of rows that did not have to be fetched; ``None`` when none was read.

    >>> hit_rate(200, 50)
    0.75
    """
    return max(0.0, 1 - rows_fetched / rows_read) if rows_read else None


def spared(transfers: int, transfers_given: int) -> float | None:
    """The share of vectors that did not have to cross; ``None`` when none would have.

    >>> spared(60, 100)
    0.4
    """
    return 1 - transfers / transfers_given if transfers_given else None


class ExchangedBytes:
    """What training steps send to each rank to exchange embeddings, from now on.

    Evaluations and checkpoints are not theirs.

    """

    def __init__(self, exchange: Exchange[Any]) -> None:
        self._exchange = exchange
        self._others = self._sent()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What the exchange sends meanwhile belongs to no step."""
        self._exchange.flush()  # what the last step sends is its own
        before = self._sent()
        try:
            yield
        finally:
            self._others += self._sent() - before

    def a_step(self, num_steps: int, world_size: int) -> list[float] | None:
        """Bytes to each rank, ``[W]``, over a number of steps; ``None`` where none were counted."""
        sent = self._sent() - self._others
        if not sent:
            return None
        return [round(sent[rank] / max(1, num_steps), 1) for rank in range(world_size)]

    def _sent(self) -> Counter[int]:
        return Counter(self._exchange.report().bytes_by_rank)
