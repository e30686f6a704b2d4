"""Bounded lag (BLS): what a bound hides of random delays, Figure 7.

A step takes the 5 ms of the paper's inference and a delay between 0 and 10 ms, each rank's own,
which are drawn; how ranks wait for each other is the recursion of
:mod:`pibroch.collectives.bounded_lag.jitter`. Messages take no time, as the paper gives none.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.papers.points import Point
from pibroch.collectives.bounded_lag.jitter import total_time

PAPER = "BLS"
NUM_RANKS = 8
NUM_STEPS = 20_000
INFERENCE_MS = 5.0
MOST_DELAY_MS = 10.0
SYNCHRONOUS_MS = 17.0
MASKED_MS = 12.0
"""What the text reads from Figure 7, without a bound and with a large one."""
BOUNDS = (1, 2, 4, 8, 16)


def points(seed: int = 0) -> Iterator[Point]:
    """All that is compared; seconds."""
    rng = np.random.default_rng(seed)
    times = INFERENCE_MS + rng.uniform(0, MOST_DELAY_MS, (NUM_STEPS, NUM_RANKS))
    step_ms = {bound: total_time(times, bound) / NUM_STEPS for bound in (0, *BOUNDS)}
    setting = f"{NUM_RANKS} ranks, delays of 0 to {MOST_DELAY_MS:g} ms"
    for bound in (0, *BOUNDS):
        in_paper = {0: SYNCHRONOUS_MS, BOUNDS[-1]: MASKED_MS}.get(bound)
        what = f"ms a step, bound {bound}"
        yield Point(PAPER, "Fig. 7", setting, what, in_paper, step_ms[bound])
    yield Point(
        PAPER,
        "Fig. 7",
        setting,
        f"throughput, bound {BOUNDS[-1]} over none",
        SYNCHRONOUS_MS / MASKED_MS,
        step_ms[0] / step_ms[BOUNDS[-1]],
    )
