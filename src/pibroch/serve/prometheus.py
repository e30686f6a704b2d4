"""Counters and histograms for Prometheus; workers of one port share an array."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric

ENDPOINTS = ("infer", "score", "embed", "retrieve", "rows", "other")
STATUSES = (200, 400, 401, 404, 405, 408, 409, 413, 415, 422, 429, 500, 503)
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)

# buckets, the one above them, the sum
_SECONDS_PARTS = len(SECONDS) + 2
_ROWS_PARTS = len(ROWS) + 2
_SECONDS_AT = len(ENDPOINTS) * (len(STATUSES) + 1)
_ROWS_AT = _SECONDS_AT + len(ENDPOINTS) * _SECONDS_PARTS
BEATS_AT = _ROWS_AT + _ROWS_PARTS
SIZE = BEATS_AT + 1
"""Numbers that a worker keeps."""


class ServerMetrics:
    """What a worker has done.

    Args:
        values: float64 ``[workers, SIZE]``, of which this one writes its own row; of one worker
            when absent.
        worker: its row.
    """

    def __init__(self, values: NDArray[np.float64] | None = None, worker: int = 0) -> None:
        self._all = np.zeros((1, SIZE)) if values is None else values
        self._own = self._all[worker]

    def request(self, endpoint: str, status: int, seconds: float) -> None:
        """Count an answer."""
        where = ENDPOINTS.index(endpoint)
        column = STATUSES.index(status) if status in STATUSES else len(STATUSES)
        self._own[where * (len(STATUSES) + 1) + column] += 1
        self._observe(_SECONDS_AT + where * _SECONDS_PARTS, SECONDS, seconds)

    def batch(self, num_rows: int) -> None:
        """Count a batch that is about to be computed."""
        self._observe(_ROWS_AT, ROWS, num_rows)

    def beat(self) -> None:
        """Say that this worker's event loop turns."""
        self._own[BEATS_AT] += 1

    def _observe(self, first: int, bounds: Sequence[float], value: float) -> None:
        self._own[first + bisect_left(bounds, value)] += 1
        self._own[first + len(bounds) + 1] += value

    def text(self, gauges: Mapping[str, float], info: Mapping[str, str] | None = None) -> bytes:
        """Everything, of all workers together, in Prometheus' text format.

        Gauges by name, and what is known of the model, are of the one that answers.
        """
        totals = self._all.sum(0)
        requests = CounterMetricFamily(
            "pibroch_requests",
            "Answers by endpoint and HTTP status.",
            labels=("endpoint", "status"),
        )
        seconds = HistogramMetricFamily(
            "pibroch_request_seconds",
            "Time from a request's headers to its answer.",
            labels=("endpoint",),
        )
        rows = HistogramMetricFamily("pibroch_batch_rows", "Rows that were computed together.")
        for place, endpoint in enumerate(ENDPOINTS):
            for number, status in enumerate((*STATUSES, "other")):
                count = totals[place * (len(STATUSES) + 1) + number]
                if count or status == 200:
                    requests.add_metric((endpoint, str(status)), count)
            first = _SECONDS_AT + place * _SECONDS_PARTS
            seconds.add_metric((endpoint,), *_histogram(SECONDS, totals[first:]))
        rows.add_metric((), *_histogram(ROWS, totals[_ROWS_AT:]))
        model = InfoMetricFamily("pibroch_model", "What answers.", value=dict(info or {}))
        rest = [GaugeMetricFamily(name, "", value=value) for name, value in gauges.items()]
        return generate_latest(_Families([requests, seconds, rows, model, *rest]))


class _Families:
    """Metrics as ``generate_latest`` collects them."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _histogram(
    bounds: Sequence[float], values: NDArray[np.float64]
) -> tuple[list[tuple[str, float]], float]:
    counts = np.cumsum(values[: len(bounds) + 1]).tolist()
    names = [*(f"{bound:g}" for bound in bounds), "+Inf"]
    return list(zip(names, counts, strict=True)), float(values[len(bounds) + 1])
