"""How many samples a second the lookahead oracle plans on one core.

Raw ids in, duplicates included, a rank's plans out.

Shape legend: F features, B samples of a global batch, R rows of a table.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from benchmarks.results import Row
from benchmarks.runner import Times
from benchmarks.workloads import Workload, zipf_ids
from pibroch.exchange.lookahead.oracle import Oracle

NUM_RANKS = 2
NUM_ROWS = 100_000
TIMED_STEPS = 16


@dataclass(frozen=True, slots=True)
class OracleSetting:
    """One measurement.

    Attributes:
        batch: samples of a global batch, of which each of two ranks has half.
        features: one table of 100,000 rows each.
        lookahead: steps.
    """

    batch: int
    features: int = 26
    lookahead: int = 10


def settings(quick: bool) -> list[OracleSetting]:
    """What to measure: batch sizes, numbers of features, lengths of the lookahead."""
    if quick:
        return [OracleSetting(2048), OracleSetting(16_384)]
    batches = [OracleSetting(batch) for batch in (2048, 16_384, 131_072)]
    features = [OracleSetting(16_384, features) for features in (8, 13)]
    return [*batches, *features, *(OracleSetting(2048, 26, lookahead) for lookahead in (50, 200))]


def speed(setting: OracleSetting, steps: int = TIMED_STEPS) -> Times:
    """Milliseconds of ``steps`` steps.

    The ids of one more batch made addresses and added, one step planned.

    The window is full, and has moved by its own length before the first timed step. One round.
    """
    lookahead = setting.lookahead
    batches = drawn(setting)
    num_rows = setting.features * NUM_ROWS
    num_tables_here = -(-setting.features // NUM_RANKS)
    bounds = np.array([0, num_tables_here * NUM_ROWS, num_rows], np.int64)
    oracle = Oracle(bounds, 0, lookahead, num_rows)
    offsets = np.arange(setting.features, dtype=np.int32) * NUM_ROWS
    cut = setting.batch // NUM_RANKS
    seen = np.zeros(num_rows, np.uint8)
    room = np.empty(batches[0].size, np.int32)

    def add(number: int) -> None:
        batch = batches[number % len(batches)]
        oracle.add(
            [
                distinct_addresses(part, offsets, seen, room)
                for part in (batch[:, :cut], batch[:, cut:])
            ]
        )

    for number in range(lookahead):
        add(number)
    oracle.open()
    step_ms = []
    for number in range(lookahead, 2 * lookahead + steps):
        start = time.perf_counter()
        add(number)
        oracle.plan()
        step_ms.append((time.perf_counter() - start) * 1e3)
    return Times([step_ms[lookahead:]], [])


@njit(nogil=True, cache=True)
def distinct_addresses(
    ids_FB: NDArray[np.int32],
    offsets: NDArray[np.int32],
    seen: NDArray[np.uint8],
    room: NDArray[np.int32],
) -> NDArray[np.int32]:
    """The addresses of ids ``[F, B]``, each once.

    ``seen`` has a 0 for each address, before and after.
    """
    num_rows = np.uint64(0)
    for feature in range(len(ids_FB)):
        ids_B = ids_FB[feature]
        offset = offsets[feature]
        for i in range(len(ids_B)):
            row = np.uint64(ids_B[i] + offset)
            room[num_rows] = row
            num_rows += np.uint64(1 - seen[row])
            seen[row] = 1
    for row in room[:num_rows]:
        seen[row] = 0
    return room[:num_rows].copy()


def drawn(setting: OracleSetting) -> list[NDArray[np.int32]]:
    """Zipf ids ``[F, B]`` of more batches than the window holds, so that they can come again."""
    workload = Workload("zipf", setting.lookahead + 2, setting.batch, setting.features, NUM_ROWS)
    rng = np.random.default_rng(workload.seed)
    shape = (setting.features, setting.batch)
    return [
        zipf_ids(rng.random(shape), workload).astype(np.int32) for _ in range(workload.num_batches)
    ]


def rows_of(setting: OracleSetting, times: Times) -> list[Row]:
    """One row, drawn in millions of samples a second."""
    p20_ms, p50_ms, p80_ms = (times.percentile(percent) for percent in (20, 50, 80))
    lookahead = "" if setting.lookahead == 10 else f",\nlookahead {setting.lookahead}"
    return [
        {
            "batch": setting.batch,
            "features": setting.features,
            "lookahead": setting.lookahead,
            "contender": "oracle, one core",
            "p20_ms": p20_ms,
            "p50_ms": p50_ms,
            "p80_ms": p80_ms,
            "samples_per_second": setting.batch / p50_ms * 1e3,
            "ns_per_id": p50_ms * 1e6 / setting.batch / setting.features,
            "panel": "oracle: million samples a second on one core",
            "group": f"{setting.batch:,} x {setting.features}{lookahead}",
            "height": setting.batch / p50_ms / 1e3,
            "low": setting.batch / p80_ms / 1e3,
            "high": setting.batch / p20_ms / 1e3,
        }
    ]


@contextmanager
def on_one_core() -> Iterator[None]:
    """Keep this thread on one core, Linux's scheduler willing."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
