"""Bounded lag: its all-to-all beside gloo's and MPICH's (BLS, Fig. 6).

And what a bound removes of random delays (Fig. 7).

Inference on several kinds of data is in :mod:`benchmarks.lagged_sections`. Ranks are processes of
one host. Delays are sleeps, so that ranks need no core of their own; what is measured stands beside
the recursion (:mod:`pibroch.collectives.bounded_lag.jitter`) on the delays that were drawn.
"""

from __future__ import annotations

from statistics import median

import numpy as np
from numpy.typing import NDArray

from benchmarks.channel_section import channel
from benchmarks.comparison import OURS, noise_note
from benchmarks.lagged_sections import data, memory, pipeline, sizes, timeline
from benchmarks.lagged_team import MOST_DELAY_S, NUM_RANKS, drawn_delays, size_name, team_of
from benchmarks.load import ForeignLoad
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row
from pibroch.collectives.bounded_lag.jitter import total_time

KIB = 1024
SECTIONS = (
    "collective",
    "calls",
    "delays",
    "pipeline",
    "sizes",
    "data",
    "timeline",
    "memory",
    "channel",
)
SIZES = (1, 64, 4 * KIB, 64 * KIB, 1024 * KIB, 4096 * KIB, 64 * 1024 * KIB)
QUICK_SIZES = (64, 64 * KIB, 4096 * KIB)
BOUNDS = (0, 1, 2, 4, 8)


@topic(
    "bounded_lag",
    "an all-to-all with bounded lag beside gloo's, and the delays that it hides; no root needed",
    sections=SECTIONS,
    quick_sections=("collective", "delays", "timeline", "memory"),
)
def run(options: Options) -> Report:
    """Measure a section."""
    load = ForeignLoad()
    sections = {
        "collective": collective,
        "calls": calls,
        "delays": delays,
        "pipeline": pipeline,
        "sizes": sizes,
        "data": data,
        "timeline": timeline,
        "memory": memory,
        "channel": channel,
    }
    report = sections[options.section](options, load)
    report.notes.append(noise_note(load))
    report.origin = provenance()
    return report


def collective(options: Options, load: ForeignLoad) -> Report:
    """Fig. 6a: one call, by bytes a peer; k = 0."""
    sizes = (
        (64, 64 * KIB, 4096 * KIB)
        if options.quick
        else (1, 64, 4 * KIB, 64 * KIB, 1024 * KIB, 4096 * KIB, 64 * 1024 * KIB)
    )
    rows: list[Row] = []
    for ranks in (2, 4):
        with team_of(ranks, load) as team:
            for nbytes in sizes:
                options.say(f"{ranks} ranks, {size_name(nbytes)} a peer")
                calls = max(5, min(300, (8 << 20) // nbytes))
                times = team.ask("collective", nbytes, 3 if options.quick else 7, calls)[0]
                gloo = 1e6 * median(times["gloo"])
                mpich = 1e6 * median(times["mpich"]) if "mpich" in times else None
                for name, seconds in times.items():
                    p20, p50, p80 = (1e6 * np.quantile(seconds, q) for q in (0.2, 0.5, 0.8))
                    rows.append(
                        {
                            "ranks": ranks,
                            "bytes": nbytes,
                            "size": size_name(nbytes),
                            "contender": OURS if name == "bls" else name,
                            "p20_us": float(p20),
                            "p50_us": float(p50),
                            "p80_us": float(p80),
                            "gloo_over_this": gloo / float(p50),
                            "this_over_mpich": None if mpich is None else float(p50) / mpich,
                        }
                    )
    notes = [
        (
            "synchronous calls with k = 0; all gave the same bytes in every setting; contenders"
            " take turns in the same processes"
        ),
        (
            "`mpich`: MPI_Alltoallv from Python, where the extra mpi is installed; `views`:"
            " pibroch's transport without the copy out of its slots, which it hands out"
        ),
    ]
    columns = [
        "ranks",
        "size",
        "contender",
        "p20_us",
        "p50_us",
        "p80_us",
        "gloo_over_this",
        "this_over_mpich",
    ]
    plot = PlotSpec(
        "gloo_over_this",
        ("ranks",),
        "size",
        "contender",
        "times as fast as gloo",
        decimals=1,
        ours=OURS,
    )
    return Report(
        "bounded_lag", "Bounded lag: one all-to-all (Fig. 6a)", rows, columns, plot, notes
    )


def calls(options: Options, load: ForeignLoad) -> Report:
    """Fig. 6b: many calls of 32 KB a peer after each other; k = 0."""
    rows: list[Row] = []
    with team_of(NUM_RANKS, load) as team:
        for number in (1, 100) if options.quick else (1, 10, 100, 1000, 10_000, 100_000):
            options.say(f"{number} calls")
            response = team.ask("repeated", 32_000, number)[0]
            for name, seconds in response.items():
                rows.append(
                    {
                        "ranks": NUM_RANKS,
                        "calls": number,
                        "contender": OURS if name == "bls" else name,
                        "us_per_call": 1e6 * seconds / number,
                        "gloo_over_this": response["gloo"] / seconds,
                    }
                )
    plot = PlotSpec(
        "gloo_over_this",
        ("ranks",),
        "calls",
        "contender",
        "times as fast as gloo",
        decimals=1,
        ours=OURS,
    )
    columns = ["calls", "contender", "us_per_call", "gloo_over_this"]
    notes = [f"{NUM_RANKS} ranks, 32 KB a peer, synchronous, k = 0"]
    return Report(
        "bounded_lag", "Bounded lag: calls in sequence (Fig. 6b)", rows, columns, plot, notes
    )


def delays(options: Options, load: ForeignLoad) -> Report:
    """Fig. 7: random delays, beside the recursion on them."""
    drawn = drawn_delays(200 if options.quick else 2000)
    rows: list[Row] = []
    with team_of(NUM_RANKS, load) as team:
        for bound in BOUNDS:
            for name in ("bls", "gloo"):
                options.say(f"{name}, k = {bound}")
                answers = team.ask(
                    "delayed", name, bound, by_rank=[(column.tolist(),) for column in drawn.T]
                )
                taken = max(seconds for seconds, _ in answers)
                slept = np.array([sleeps for _, sleeps in answers]).T
                rows.append(_delay_row(OURS if name == "bls" else name, bound, taken, drawn, slept))
    _add_removed(rows, drawn)
    notes = [
        (
            f"{NUM_RANKS} ranks, {len(drawn)} steps of a delay of 0 to {1e3 * MOST_DELAY_S:g} ms,"
            " then an all-to-all of 4 KB a peer, of which k may be outstanding; gloo: its own"
            " asynchronous one in the same FIFO (Table I)"
        ),
        (
            "`recursion_ms`: what waiting alone takes on the delays that were drawn, `slept_ms` on"
            " the sleeps as they were: one sleeps until a tenth of a millisecond before its end and"
            " then looks, since sleeps end some 0.06 ms late; `late_ms` is what is left of that,"
            " mean, more on a busy machine"
        ),
        (
            "`removed_share`: of the gap between synchronous time and mean delay of the slowest"
            " rank; `possible_share` by the recursion"
        ),
    ]
    columns = [
        "contender",
        "k",
        "step_ms",
        "recursion_ms",
        "slept_ms",
        "over_recursion_ms",
        "over_slept_ms",
        "late_ms",
        "removed_share",
        "possible_share",
    ]
    plot = PlotSpec("step_ms", ("ranks",), "k", "contender", "ms a step", decimals=2, ours=OURS)
    return Report("bounded_lag", "Bounded lag: random delays (Fig. 7)", rows, columns, plot, notes)


def _delay_row(
    contender: str, bound: int, taken: float, drawn: NDArray[np.float64], slept: NDArray[np.float64]
) -> Row:
    scale = 1e3 / len(drawn)
    step, recursion, actual = (
        scale * each for each in (taken, total_time(drawn, bound), total_time(slept, bound))
    )
    return {
        "ranks": NUM_RANKS,
        "contender": contender,
        "k": bound,
        "step_ms": step,
        "recursion_ms": recursion,
        "slept_ms": actual,
        "over_recursion_ms": step - recursion,
        "over_slept_ms": step - actual,
        "late_ms": 1e3 * float((slept - drawn).mean()),
    }


def _add_removed(rows: list[Row], drawn: NDArray[np.float64]) -> None:
    least = 1e3 * float(drawn.sum(0).max()) / len(drawn)
    for contender in {row["contender"] for row in rows}:
        own = [row for row in rows if row["contender"] == contender]
        for key, share in (("step_ms", "removed_share"), ("recursion_ms", "possible_share")):
            for row in own:
                row[share] = (own[0][key] - row[key]) / (own[0]["recursion_ms"] - least)
