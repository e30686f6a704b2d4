"""Section ``channel`` of the topic ``bounded_lag``.

Training on one host, whose channels use shared memory, beside gloo.
"""

from __future__ import annotations

from statistics import median

import numpy as np

from benchmarks.comparison import OURS
from benchmarks.lagged_team import team_of
from benchmarks.load import ForeignLoad
from benchmarks.plots import PlotSpec
from benchmarks.registry import Options
from benchmarks.results import Report, Row

CASES = (("small", 16, 256), ("large", 64, 2048))
"""Name, floats a row, samples a rank and step."""
LABELS = {"auto": OURS, "gloo": "gloo"}
COLUMNS = [
    "case",
    "ranks",
    "contender",
    "p20_ms",
    "p50_ms",
    "p80_ms",
    "cpu_ms",
    "gloo_over_this",
    "gloo_cpu_over_this",
]


def channel(options: Options, load: ForeignLoad) -> Report:
    """Time and CPU of a training step over both, in turns."""
    rounds, steps = (6, 10) if options.quick else (20, 25)
    rows: list[Row] = []
    for ranks in (2, 4):
        with team_of(ranks, load) as team:
            for case, dim, batch_size in CASES:
                options.say(f"{case}, {ranks} ranks")
                rows += channel_rows(
                    case, steps, team.ask("trained", dim, batch_size, rounds, steps)
                )
    notes = [
        "a DLRM of 26 tables under `alltoall`, dense layers summed over gloo in both; "
        + "; ".join(f"{name}: dim {dim}, {size} samples a rank" for name, dim, size in CASES),
        (
            f"{rounds} rounds of {steps} steps each, in turns in the same processes; losses are"
            " equal bit for bit"
        ),
        (
            "`cpu_ms`: of all ranks and threads together, a step, median of rounds;"
            " `gloo_over_this`: median of the rounds' ratios"
        ),
    ]
    plot = PlotSpec(
        "gloo_over_this",
        ("case",),
        "ranks",
        "contender",
        "times as fast as gloo",
        decimals=2,
        ours=OURS,
    )
    return Report(
        "bounded_lag", "Bounded lag: training channels within a host", rows, COLUMNS, plot, notes
    )


def channel_rows(
    case: str, steps: int, answers: list[dict[str, list[tuple[float, float]]]]
) -> list[Row]:
    """Rows of the table, from wall and CPU seconds of each round by rank and contender.

    A round takes as long as its slowest rank.
    """
    taken = {name: np.array([answer[name] for answer in answers]) * 1e3 / steps for name in LABELS}
    wall = {name: each[:, :, 0].max(0) for name, each in taken.items()}
    cpu = {name: each[:, :, 1].sum(0) for name, each in taken.items()}
    rows: list[Row] = []
    for name, label in LABELS.items():
        p20, p50, p80 = (float(np.quantile(wall[name], q)) for q in (0.2, 0.5, 0.8))
        rows.append(
            {
                "case": case,
                "ranks": len(answers),
                "contender": label,
                "p20_ms": p20,
                "p50_ms": p50,
                "p80_ms": p80,
                "cpu_ms": median(cpu[name].tolist()),
                "gloo_over_this": median((wall["gloo"] / wall[name]).tolist()),
                "gloo_cpu_over_this": median((cpu["gloo"] / cpu[name]).tolist()),
            }
        )
    return rows
