"""Sections of the topic ``bounded_lag`` that run inference.

:class:`pibroch.BoundedLagPipeline` on several kinds of data.

Latency and throughput are those of Sec. V-C: the mean over runs and ranks of a rank's mean latency,
and the mean over runs of the sum of the ranks' throughputs (the paper writes ``#batches / L`` where
its sum needs ``1 / L``), each with a 95 % interval.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from benchmarks.comparison import OURS
from benchmarks.lagged_data import BATCH_SIZE, MOST_VECTORS, write_case
from benchmarks.lagged_team import (
    MOST_DELAY_S,
    NUM_RANKS,
    RankTeam,
    drawn_delays,
    half_interval,
    team_of,
)
from benchmarks.load import ForeignLoad
from benchmarks.plots import Frame, PlotSpec, Row, colours_of
from benchmarks.registry import Options
from benchmarks.results import Report

BOUNDS = tuple(range(9))
QUICK_BOUNDS = (0, 2, 8)
CONTENDERS = (("auto", OURS), ("gloo", "gloo"))
CHART_BOUNDS = (0, 4)
CHART_STEPS = 24
CHART_FIRST = 8
COLUMNS = [
    "case",
    "contender",
    "k",
    "latency_ms",
    "latency_half_interval_ms",
    "batches_per_second",
    "half_interval_per_second",
]


def pipeline(options: Options, load: ForeignLoad) -> Report:
    """Fig. 7: inference under random delays."""
    delay = f"a delay of 0 to {1e3 * MOST_DELAY_S:g} ms in each step"
    return _measured(
        options,
        load,
        ("plain",),
        100 if options.quick else 300,
        True,
        "random delays (Fig. 7)",
        delay,
    )


def sizes(options: Options, load: ForeignLoad) -> Report:
    """Fig. 7: messages of very different sizes."""
    text = f"1 to {MOST_VECTORS} vectors a table and sample, no delays"
    return _measured(
        options,
        load,
        ("sizes",),
        60 if options.quick else 300,
        False,
        "message sizes (Fig. 7)",
        text,
    )


def data(options: Options, load: ForeignLoad) -> Report:
    """Fig. 8: the samples of Criteo and Avazu, and a long generated trace."""
    text = (
        "Criteo's and Avazu's samples, a generated trace of 1,000 batches of Criteo's shape; no"
        " delays"
    )
    cases = ("criteo", "avazu", "trace")
    return _measured(
        options, load, cases, 60 if options.quick else 1000, False, "data sets (Fig. 8)", text
    )


def _measured(
    options: Options,
    load: ForeignLoad,
    cases: tuple[str, ...],
    steps: int,
    delays: bool,
    what: str,
    text: str,
) -> Report:
    repeats, bounds = (1, QUICK_BOUNDS) if options.quick else (5, BOUNDS)
    paths = {case: write_case(case, options.scratch) for case in cases}
    taken: dict[tuple[str, str, int], list[list[float]]] = defaultdict(list)
    with team_of(NUM_RANKS, load) as team:
        for repeat in range(repeats):  # all settings take turns: a slow minute meets them alike
            for case, path in paths.items():
                for bound in bounds:
                    for transport, label in CONTENDERS:
                        if path is not None:
                            options.say(
                                f"{case}, {label}, k = {bound}, run {repeat + 1} of {repeats}"
                            )
                            seconds = _run(team, path, transport, bound, steps, repeat, delays)
                            taken[case, label, bound].append([each / steps for each in seconds])
    rows = [_row(*key, runs) for key, runs in taken.items()]
    notes = [
        (
            f"{NUM_RANKS} ranks, BoundedLagPipeline over a DLRM, batch {BATCH_SIZE} (16 with"
            f" {MOST_VECTORS} vectors), {steps} steps, {repeats} runs; {text}; predictions equal"
            " synchronous inference bit for bit in all of them"
        ),
        (
            "throughput of a run: the sum over ranks of 1 over latency; intervals: 95 %, over runs"
            " and ranks, and over runs"
        ),
        *(f"{case}: the sample is not there" for case, path in paths.items() if path is None),
    ]
    plot = PlotSpec(
        "latency_ms",
        ("case",),
        "k",
        "contender",
        "ms a batch",
        "low",
        "high",
        decimals=2,
        shared=False,
    )
    return Report("bounded_lag", f"Bounded lag: inference, {what}", rows, COLUMNS, plot, notes)


def _run(
    team: RankTeam, path: Path, transport: str, bound: int, steps: int, repeat: int, delays: bool
) -> list[float]:
    drawn = drawn_delays(steps, repeat) if delays else 0.0 * drawn_delays(steps)
    arguments = [(column.tolist(),) for column in drawn.T]
    answers = team.ask("pipelined", str(path), transport, bound, by_rank=arguments)
    assert all(answer["same"] for answer in answers), (
        "predictions differ from synchronous inference"
    )
    return [answer["seconds"] for answer in answers]


def _row(case: str, label: str, bound: int, runs: list[list[float]]) -> Row:
    latencies = [1e3 * each for run in runs for each in run]
    throughputs = [sum(1.0 / each for each in run) for run in runs]
    mean = fmean(latencies)
    half = half_interval(latencies)
    return {
        "case": case,
        "contender": label,
        "k": bound,
        "latency_ms": mean,
        "latency_half_interval_ms": half,
        "batches_per_second": fmean(throughputs),
        "half_interval_per_second": half_interval(throughputs),
        "low": mean - half,
        "high": mean + half,
    }


@dataclass(frozen=True, slots=True)
class TimeChart:
    """What each rank does when: a bar a rank, a panel a bound.

    Attributes:
        spans: by bound and rank, ``(name, from_ms, to_ms)``.
    """

    spans: dict[int, list[list[tuple[str, float, float]]]]

    def draw(self, rows: list[Row], title: str, path: Path) -> None:
        """See :class:`benchmarks.plots.Plot`."""
        colours = colours_of(list(dict.fromkeys(row["doing"] for row in rows)), "wait for answers")

        def draw_panel(axes: Axes, members: list[Row]) -> None:
            for rank, spans in enumerate(self.spans[members[0]["k"]]):
                for name, start, end in spans:
                    axes.add_patch(
                        Rectangle(
                            (start, rank - 0.4), end - start, 0.8, color=colours[name], linewidth=0
                        )
                    )
            axes.set_xlim(
                0, max(end for spans in self.spans[members[0]["k"]] for _, _, end in spans)
            )
            axes.set_ylim(-0.6, NUM_RANKS - 0.4)
            axes.set_yticks(range(NUM_RANKS), [f"rank {rank}" for rank in range(NUM_RANKS)])
            axes.set_xlabel("ms", fontsize=9)

        Frame(("panel",), "").draw(rows, colours, title, path, draw_panel)


def timeline(options: Options, load: ForeignLoad) -> Report:
    """Fig. 5: what one run's time goes to, as a chart."""
    path = write_case("plain", options.scratch)
    drawn = drawn_delays(CHART_FIRST + CHART_STEPS)
    rows: list[Row] = []
    charts: dict[int, list[list[tuple[str, float, float]]]] = {}
    with team_of(NUM_RANKS, load) as team:
        for bound in CHART_BOUNDS:
            options.say(f"k = {bound}")
            by_rank = [(column.tolist(), CHART_FIRST) for column in drawn.T]
            answers: list[dict[str, Any]] = team.ask(
                "pipelined", str(path), "auto", bound, by_rank=by_rank
            )
            begin = min(start for answer in answers for _, start, _ in answer["spans"])
            charts[bound] = [
                [
                    (name, (start - begin) / 1e6, (end - begin) / 1e6)
                    for name, start, end in answer["spans"]
                ]
                for answer in answers
            ]
            for rank, spans in enumerate(charts[bound]):
                for name in dict.fromkeys(name for name, _, _ in spans):
                    total = sum(end - start for each, start, end in spans if each == name)
                    rows.append(
                        {
                            "panel": f"k = {bound}",
                            "k": bound,
                            "rank": rank,
                            "doing": name,
                            "step_ms": total / CHART_STEPS,
                        }
                    )
    notes = [
        (
            f"{NUM_RANKS} ranks, one run, {CHART_STEPS} steps after {CHART_FIRST} others, delays of"
            f" 0 to {1e3 * MOST_DELAY_S:g} ms (`delay`); a rank that waits for answers gives its"
            " own to others meanwhile"
        ),
    ]
    columns = ["k", "rank", "doing", "step_ms"]
    return Report(
        "bounded_lag",
        "Bounded lag: what a run's time goes to (Fig. 5)",
        rows,
        columns,
        TimeChart(charts),
        notes,
    )


def memory(options: Options, load: ForeignLoad) -> Report:
    """Memory of each unit of k, beside the paper's formula (Sec. III-D)."""
    rows: list[Row] = []
    with team_of(NUM_RANKS, load) as team:
        for case in ("plain", "sizes"):
            path = write_case(case, options.scratch)
            for bound in QUICK_BOUNDS if options.quick else BOUNDS:
                options.say(f"{case}, k = {bound}")
                response = team.ask("remembered", str(path), bound)[0]
                formula = bound * (response["received"] + response["dense"])
                rows.append(
                    {
                        "case": case,
                        "k": bound,
                        "slots_kb": response["slots"] / 1e3,
                        "overflow_kb": response["overflow"] / 1e3,
                        "dense_kb": bound * response["dense"] / 1e3,
                        "all_kb": (
                            response["slots"] + response["overflow"] + bound * response["dense"]
                        )
                        / 1e3,
                        "formula_kb": formula / 1e3,
                    }
                )
    notes = [
        (
            f"rank 0 of {NUM_RANKS}, after 64 batches. `slots_kb`: address space of slots for what"
            " comes, of which only pages that were written take memory; `overflow_kb`: segments"
            " for what did not fit a slot and goes out, as much as comes"
        ),
        (
            "`formula_kb` is the paper's: k receive buffers of the largest messages and k dense"
            " results. Two slots a unit are needed, for questions as well as answers, and k = 0"
            " needs two, too"
        ),
    ]
    columns = ["case", "k", "slots_kb", "overflow_kb", "dense_kb", "all_kb", "formula_kb"]
    plot = PlotSpec("all_kb", ("case",), "k", "case", "KB a rank", shared=False)
    return Report("bounded_lag", "Bounded lag: memory by bound", rows, columns, plot, notes)
