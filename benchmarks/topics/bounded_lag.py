"""Bounded lag: its all-to-all beside gloo's (BLS, Fig. 6), and what a bound removes of random delays (Fig. 7).

Ranks are processes of one host. Delays are sleeps, so that ranks need no core of their own; what is measured stands beside the
recursion (:mod:`pibroch.collectives.bounded_lag.max_plus`) on the delays that were drawn.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.comparison import OURS, noise_note
from benchmarks.load import ForeignLoad
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row
from pibroch.collectives.bounded_lag.max_plus import total_time
from pibroch.ports import free_port

KIB = 1024
SECTIONS = ("collective", "calls", "delays", "pipeline")
SIZES = (1, 64, 4 * KIB, 64 * KIB, 1024 * KIB, 4096 * KIB, 64 * 1024 * KIB)
QUICK_SIZES = (64, 64 * KIB, 4096 * KIB)
BOUNDS = (0, 1, 2, 4, 8)
NUM_RANKS, MOST_DELAY_S = 4, 0.01
ANSWER_S = 900
STUDENT_95 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776}
"""Of the t distribution, by degrees of freedom: half a 95 % interval in standard errors."""


class RankTeam:
    """Processes of one process group, asked together.

    Args:
        size: number of ranks.
        load: they count as ours.
    """

    def __init__(self, size: int, load: ForeignLoad) -> None:
        from benchmarks.workers.lagged import serve

        context, port = multiprocessing.get_context("spawn"), free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, size, port), daemon=True)
            process.start()
            theirs.close()
            load.add_worker(process.pid or 0)
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self, name: str, *arguments: Any, by_rank: list[tuple[Any, ...]] | None = None) -> list[Any]:
        """Let all ranks do something; their answers."""
        for rank, pipe in enumerate(self._pipes):
            pipe.send((name, (*arguments, *(by_rank[rank] if by_rank else ()))))
        answers = []
        for pipe in self._pipes:
            assert pipe.poll(ANSWER_S), f"{name}: a rank does not answer"
            answers.append(pipe.recv())
        return answers

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()


@contextmanager
def _team(size: int, load: ForeignLoad) -> Iterator[RankTeam]:
    team = RankTeam(size, load)
    try:
        yield team
    finally:
        team.close()


@topic(
    "bounded_lag", "an all-to-all with bounded lag beside gloo's, and the delays that it hides; no root needed",
    sections=SECTIONS, quick_sections=("collective", "delays"),
)  # fmt: skip
def run(options: Options) -> Report:
    """Measure a section."""
    load = ForeignLoad()
    sections = {"collective": collective, "calls": calls, "delays": delays, "pipeline": pipeline}
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
        with _team(ranks, load) as team:
            for nbytes in sizes:
                options.say(f"{ranks} ranks, {size_name(nbytes)} a peer")
                calls = max(5, min(300, (8 << 20) // nbytes))
                times = team.ask("collective", nbytes, 3 if options.quick else 7, calls)[0]
                gloo = 1e6 * median(times["gloo"])
                for name, seconds in times.items():
                    p20, p50, p80 = (1e6 * np.quantile(seconds, q) for q in (0.2, 0.5, 0.8))
                    rows.append({
                        "ranks": ranks, "bytes": nbytes, "size": size_name(nbytes),
                        "contender": OURS if name == "bls" else name,
                        "p20_us": float(p20), "p50_us": float(p50), "p80_us": float(p80), "gloo_over_this": gloo / float(p50),
                    })  # fmt: skip
    notes = [
        "synchronous calls with k = 0; both gave the same bytes in every setting; contenders take turns in the same processes"
    ]
    columns = ["ranks", "size", "contender", "p20_us", "p50_us", "p80_us", "gloo_over_this"]
    plot = PlotSpec("gloo_over_this", ("ranks",), "size", "contender", "times as fast as gloo", decimals=1, ours=OURS)
    return Report("bounded_lag", "Bounded lag: one all-to-all (Fig. 6a)", rows, columns, plot, notes)


def calls(options: Options, load: ForeignLoad) -> Report:
    """Fig. 6b: many calls of 32 KB a peer after each other; k = 0."""
    rows: list[Row] = []
    with _team(NUM_RANKS, load) as team:
        for number in (1, 100) if options.quick else (1, 10, 100, 1000, 10_000, 100_000):
            options.say(f"{number} calls")
            found = team.ask("repeated", 32_000, number)[0]
            for name, seconds in found.items():
                rows.append({
                    "ranks": NUM_RANKS, "calls": number, "contender": OURS if name == "bls" else name,
                    "us_per_call": 1e6 * seconds / number, "gloo_over_this": found["gloo"] / seconds,
                })  # fmt: skip
    plot = PlotSpec("gloo_over_this", ("ranks",), "calls", "contender", "times as fast as gloo", decimals=1, ours=OURS)
    columns = ["calls", "contender", "us_per_call", "gloo_over_this"]
    notes = [f"{NUM_RANKS} ranks, 32 KB a peer, synchronous, k = 0"]
    return Report("bounded_lag", "Bounded lag: calls in sequence (Fig. 6b)", rows, columns, plot, notes)


def delays(options: Options, load: ForeignLoad) -> Report:
    """Fig. 7: random delays, beside the recursion on them."""
    drawn = _drawn(200 if options.quick else 2000)
    rows: list[Row] = []
    with _team(NUM_RANKS, load) as team:
        for bound in BOUNDS:
            for name in ("bls", "gloo"):
                options.say(f"{name}, k = {bound}")
                answers = team.ask("delayed", name, bound, by_rank=[(column.tolist(),) for column in drawn.T])
                taken = max(seconds for seconds, _ in answers)
                slept = np.array([sleeps for _, sleeps in answers]).T
                rows.append(_delay_row(OURS if name == "bls" else name, bound, taken, drawn, slept))
    _add_removed(rows, drawn)
    notes = [
        f"{NUM_RANKS} ranks, {len(drawn)} steps of a delay of 0 to {1e3 * MOST_DELAY_S:g} ms, then an all-to-all of "
        "4 KB a peer, of which k may be outstanding; gloo: its own asynchronous one in the same FIFO (Table I)",
        "`recursion_ms`: what waiting alone takes on the delays that were drawn, `slept_ms` on the sleeps as they were: one "
        "is longer than asked for, more so on a busy machine",
        "`removed_share`: of the gap between synchronous time and mean delay of the slowest rank; `possible_share` by the "
        "recursion",
    ]
    columns = [
        "contender",
        "k",
        "step_ms",
        "recursion_ms",
        "slept_ms",
        "over_slept_ms",
        "removed_share",
        "possible_share",
    ]
    plot = PlotSpec("step_ms", ("ranks",), "k", "contender", "ms a step", decimals=2, ours=OURS)
    return Report("bounded_lag", "Bounded lag: random delays (Fig. 7)", rows, columns, plot, notes)


def pipeline(options: Options, load: ForeignLoad) -> Report:
    """Fig. 7 with a model: inference under random delays, latency and throughput as in Sec. V-C."""
    steps, repeats = (100, 1) if options.quick else (300, 5)
    rows: list[Row] = []
    with _team(NUM_RANKS, load) as team:
        for bound in BOUNDS:
            for transport, label in (("auto", OURS), ("gloo", "gloo")):
                options.say(f"{label}, k = {bound}")
                latencies, throughputs = [], []
                for repeat in range(repeats):
                    drawn = _drawn(steps, repeat)
                    answers = team.ask(
                        "pipelined", transport, bound, by_rank=[(column.tolist(),) for column in drawn.T]
                    )
                    assert all(same for _, same in answers), "predictions differ from synchronous inference"
                    latencies += [1e3 * seconds / steps for seconds, _ in answers]
                    throughputs.append(sum(steps / seconds for seconds, _ in answers))
                rows.append({
                    "ranks": NUM_RANKS, "contender": label, "k": bound,
                    "latency_ms": fmean(latencies), "latency_half_interval_ms": _half(latencies),
                    "batches_per_second": fmean(throughputs), "half_interval_per_second": _half(throughputs),
                })  # fmt: skip
    columns = [
        "contender",
        "k",
        "latency_ms",
        "latency_half_interval_ms",
        "batches_per_second",
        "half_interval_per_second",
    ]
    plot = PlotSpec("latency_ms", ("ranks",), "k", "contender", "ms a batch", decimals=2, ours=OURS)
    notes = [
        f"{NUM_RANKS} ranks, BoundedLagPipeline over a DLRM of 8 tables, batch 256, a delay of 0 to {1e3 * MOST_DELAY_S:g} ms "
        f"in each of {steps} steps, {repeats} runs; predictions equal synchronous inference bit for bit in all of them",
        "throughput of a run: the sum over ranks of batches over seconds; intervals: 95 %, over runs and ranks",
    ]
    return Report("bounded_lag", "Bounded lag: inference under random delays (Fig. 7)", rows, columns, plot, notes)


def _drawn(steps: int, seed: int = 0) -> NDArray[np.float64]:
    """Delays in seconds ``[steps, ranks]``."""
    return np.random.default_rng(seed).uniform(0.0, MOST_DELAY_S, (steps, NUM_RANKS))


def _delay_row(contender: str, bound: int, taken: float, drawn: NDArray[np.float64], slept: NDArray[np.float64]) -> Row:
    scale = 1e3 / len(drawn)
    step, recursion, actual = (scale * each for each in (taken, total_time(drawn, bound), total_time(slept, bound)))
    return {
        "ranks": NUM_RANKS, "contender": contender, "k": bound, "step_ms": step, "recursion_ms": recursion, "slept_ms": actual,
        "over_slept_ms": step - actual,
    }  # fmt: skip


def _add_removed(rows: list[Row], drawn: NDArray[np.float64]) -> None:
    least = 1e3 * float(drawn.sum(0).max()) / len(drawn)
    for contender in {row["contender"] for row in rows}:
        own = [row for row in rows if row["contender"] == contender]
        for key, share in (("step_ms", "removed_share"), ("recursion_ms", "possible_share")):
            for row in own:
                row[share] = (own[0][key] - row[key]) / (own[0]["recursion_ms"] - least)


def _half(values: list[float]) -> float:
    """Half of a 95 % interval of the mean."""
    freedom = len(values) - 1
    return 0.0 if freedom < 1 else STUDENT_95.get(freedom, 1.96 + 2.4 / freedom) * stdev(values) / len(values) ** 0.5


def size_name(nbytes: int) -> str:
    """Binary.

    >>> size_name(64), size_name(65536), size_name(4 << 20)
    ('64 B', '64 KiB', '4 MiB')
    """
    for power, unit in ((20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << power:
            return f"{nbytes >> power} {unit}"
    return f"{nbytes} B"
