"""Counters and histograms in Prometheus' text format; workers of one port share an array."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

ENDPOINTS = ("infer", "score", "embed", "rows", "other")
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

    def batch(self, num_requests: int, num_rows: int) -> None:
        """Count a batch that is about to be computed."""
        self._observe(_ROWS_AT, ROWS, num_rows)

    def beat(self) -> None:
        """Say that this worker's event loop turns."""
        self._own[BEATS_AT] += 1

    def _observe(self, first: int, bounds: Sequence[float], value: float) -> None:
        self._own[first + bisect_left(bounds, value)] += 1
        self._own[first + len(bounds) + 1] += value

    def text(self, gauges: Mapping[str, float]) -> str:
        """Everything, of all workers together.

        Gauges by name, with labels, are of the one that answers.
        """
        totals = self._all.sum(0)
        lines = _about("pibroch_requests_total", "counter", "Answers by endpoint and HTTP status.")
        for place, endpoint in enumerate(ENDPOINTS):
            for number, status in enumerate((*STATUSES, "other")):
                count = totals[place * (len(STATUSES) + 1) + number]
                if count or status == 200:
                    labels = f'endpoint="{endpoint}",status="{status}"'
                    lines.append(f"pibroch_requests_total{{{labels}}} {count:.0f}")
        text = "Time from a request's headers to its answer."
        lines += _about("pibroch_request_seconds", "histogram", text)
        for place, endpoint in enumerate(ENDPOINTS):
            first = _SECONDS_AT + place * _SECONDS_PARTS
            lines += _histogram(
                "pibroch_request_seconds", f'endpoint="{endpoint}",', SECONDS, totals[first:]
            )
        lines += _about("pibroch_batch_rows", "histogram", "Rows that were computed together.")
        lines += _histogram("pibroch_batch_rows", "", ROWS, totals[_ROWS_AT:])
        for name, value in gauges.items():
            lines += [f"# TYPE {name.partition('{')[0]} gauge", f"{name} {value:.15g}"]
        return "\n".join(lines) + "\n"


def _about(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _histogram(
    name: str, labels: str, bounds: Sequence[float], values: NDArray[np.float64]
) -> list[str]:
    counts = np.cumsum(values[: len(bounds) + 1])
    lines = [
        f'{name}_bucket{{{labels}le="{bound:g}"}} {count:.0f}'
        for bound, count in zip(bounds, counts, strict=False)
    ]
    given = f"{{{labels[:-1]}}}" if labels else ""
    lines += [
        f'{name}_bucket{{{labels}le="+Inf"}} {counts[-1]:.0f}',
        f"{name}_count{given} {counts[-1]:.0f}",
    ]
    return [*lines, f"{name}_sum{given} {values[len(bounds) + 1]:.6f}"]
