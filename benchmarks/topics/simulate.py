"""``pibroch simulate`` beside the lab: steps predicted from a calibration at two ranks.

Ranks of the lab are hosts that share this machine's cores, which the simulation knows. What is
calibrated are costs of calls, ids, rows, bytes and messages, dense models alone, and by steps of
``alltoall`` at two ranks and 1 Gbit/s two numbers: how much longer all of that takes within a step,
and how long a thread waits that a message wakes.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import mean, median

import numpy as np
import torch

import pibroch as pb
from benchmarks.cases import Arrays, Case
from benchmarks.comparison import Lineup, noise_note
from benchmarks.hosts import BATCH_SIZE, case_of, measure_at
from benchmarks.lab import Lab
from benchmarks.lab.network import LINK, burst_of
from benchmarks.load import ForeignLoad
from benchmarks.papers import section as papers
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row
from benchmarks.runner import Schedule, Times
from benchmarks.team import teams
from benchmarks.workers import pibroch_tables as ours
from benchmarks.workers.dlrm_pibroch import dense_model
from benchmarks.workloads import Workload
from pibroch.embedding import group_tables
from pibroch.planner import Plan
from pibroch.sim.calibrate import calibrate_parts
from pibroch.sim.cluster import Cluster, bytes_per_second
from pibroch.sim.counting import Job, StepCount, count
from pibroch.sim.machine import Machine
from pibroch.sim.measuring import Sample, in_turns
from pibroch.sim.prediction import Conditions, Prediction, predict
from pibroch.sim.steps import Dense
from pibroch.sim.whole_steps import fitted, measure_steps

KINDS = ("zipf", "criteo")
"""Of ids; each takes some 55 minutes."""
SECTIONS = (*KINDS, papers.SECTION)
LOOKAHEAD = 20
BATCHES = 40
WORKERS = {
    "alltoall": "distributed_pibroch",
    "retrieve": "distributed_pibroch:build_retrieve",
    "lookahead": "distributed_pibroch:build_lookahead",
    "towers": "distributed_pibroch:build_towers",
}
EXCHANGES = {
    "alltoall": pb.AllToAll(),
    "lookahead": pb.Lookahead(lookahead=LOOKAHEAD),
    "towers": pb.Towers(),
}
RATES = ("1gbit", "200mbit")
CALIBRATED_RATE = "1gbit"
TURNS = 5
"""Of steps at each rate, then of calibrating steps: a machine may be slow for some seconds."""
SCHEDULE = Schedule(rounds=1, steps_per_round=10, warmup_steps=1, pause_s=0.3)
CALIBRATING_STEPS = 24
COLUMNS = [
    "ids", "hosts", "dim", "exchange", "rate", "alone_ms", "predicted_ms", "p20_ms", "p50_ms",
    "p80_ms", "time_error", "predicted_mb", "link_mb", "bytes_error",
]  # fmt: skip
PLOT = PlotSpec(
    "over_measured", ("hosts", "rate"), "dim", "exchange", "predicted over measured", decimals=2
)
MEANINGS = (
    (
        f"`predicted_ms`: the step, by whole steps at two ranks in {TURNS} turns with those"
        " measured, and costs of parts that were measured before;"
        " `alone_ms`: if work took within a step what it takes by itself"
    ),
    "`time_error`: predicted over the measured median, less 1",
    (
        "`predicted_mb`: payload that a host's link carries a step, dense gradients included;"
        " `link_mb`: what the interface counted of these steps;"
        " it sees segments before they are cut, with few headers"
    ),
    "`towers`: each host holds whole tables, no module between",
    (
        f"lookahead {LOOKAHEAD}, {BATCHES} different global batches, 2048 samples a rank; of Criteo"
        " the sample's 137,139 rows, as often as needed, each time in another order"
    ),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One lab's common ground; a rank a host."""

    ids: str
    hosts: int
    dim: int

    def __str__(self) -> str:
        return f"{self.ids} ids, {self.hosts} hosts, dim {self.dim}"


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps of an exchange at one rate.

    Attributes:
        times: of them.
        link_mb: megabytes a step, on the mean link out of a host.
    """

    times: Times
    link_mb: float


def enter_host(lab: Lab, rank: int) -> None:
    """Have this process be on a host of the lab."""
    os.environ["GLOO_SOCKET_IFNAME"] = LINK
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{lab.network.host(rank)}") as namespace:
        if libc.setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")


def settings(ids: str, quick: bool) -> list[Setting]:
    """What to measure of ids of one kind."""
    sizes = [(2, 16)] if quick else product((2, 4, 8), (16, 64))
    return [Setting(ids, *each) for each in sizes]


@topic(
    "simulate",
    "steps predicted by `pibroch simulate` beside the lab's, which needs root, and the papers'",
    sections=SECTIONS,
    quick_sections=KINDS[:1],
)
def run(options: Options) -> Report:
    """Calibrate, predict, measure; of the papers' figures predict alone.

    Raises:
        PibrochError: where no lab can be built; says what is missing.
    """
    if options.section == papers.SECTION:
        return papers.run(options)
    load = ForeignLoad()
    rows: list[Row] = []
    for setting in settings(options.section, options.quick):
        case = case_of_setting(setting, options)
        for exchange in WORKERS:
            measured, machine = measure(setting, case, exchange, options, load)
            options.say(f"{setting}: predicting {exchange}")
            counts, conditions = counted(case, setting, exchange)
            for rate, steps in measured.items():
                predicted, alone = (
                    predict(counts, conditions(rate, each)) for each in (machine, as_alone(machine))
                )
                row = row_of(setting, (exchange, rate), predicted, steps)
                rows.append(row | {"alone_ms": alone.step_s * 1e3})
                options.say(
                    f"{setting}, {rate}: {exchange} predicted {row['predicted_ms']:.1f} ms,"
                    f" measured {row['p50_ms']:.1f}"
                )
    notes = [*headlines(rows), noise_note(load), *MEANINGS]
    title = f"Predicted beside measured, ids of {options.section}"
    return Report("simulate", title, rows, COLUMNS, PLOT, notes, provenance())


def measure(
    setting: Setting,
    case: Case,
    exchange: str,
    options: Options,
    load: ForeignLoad,
) -> tuple[dict[str, Measured], Machine]:
    """Steps of an exchange by rate, and this machine as calibrated beside them.

    The speed of a virtual machine drifts by a tenth within seconds: all rates and calibrations take
    turns. Bytes are counted from pause to pause: rows for a next step travel between turns, too.

    Args:
        setting: of the lab.
        case: that ranks build.
        exchange: whose steps are measured.
        options: of the topic.
        load: of other processes, noted meanwhile.
    """
    specs = Lineup.of({exchange: WORKERS[exchange]}, {}).specs
    lookahead = {"lookahead": LOOKAHEAD} if exchange == "lookahead" else {}
    times = {rate: Times() for rate in RATES}
    sent = dict.fromkeys(RATES, 0.0)
    steps = dict.fromkeys(RATES, 0)
    with Lab(setting.hosts) as lab, teams(specs, lab) as running, ExitStack() as scope:
        (team,) = running
        options.say(f"{setting}: {exchange}")
        team.setup(with_options(case, lookahead))
        team.run("step", 0, 4 + lookahead.get("lookahead", 0))
        team.count_load(load)
        samples = [sample_of(setting.dim, options)]
        enter = partial(enter_host, lab)
        lab.network.shape(CALIBRATED_RATE)
        machine = calibrate_parts(samples, "this machine", options.say, 2, enter)
        calibrating = partial(measure_steps, samples, CALIBRATING_STEPS)
        ask = scope.enter_context(in_turns(calibrating, 2, options.say, enter))
        for turn in range(TURNS):
            for rate in RATES:
                options.say(f"{setting}, {rate}: {exchange}, turn {turn + 1} of {TURNS}")
                carried = lab.network.link_bytes()
                times[rate].extend(measure_at(rate, lab, running, SCHEDULE).times[exchange])
                links = zip(lab.network.link_bytes(), carried, strict=True)
                sent[rate] += mean(now.since(then).sent for now, then in links)
                steps[rate] += sum(each.steps for each in team.carried)
            lab.network.shape(CALIBRATED_RATE)
            answers = ask()
            time.sleep(SCHEDULE.pause_s)  # rows for its next step travel
    measured = {rate: Measured(times[rate], sent[rate] / steps[rate] / 1e6) for rate in RATES}
    return measured, fitted(machine, answers, burst_of(CALIBRATED_RATE))


def as_alone(machine: Machine) -> Machine:
    """A machine whose work takes within a step what it takes by itself."""
    return machine.model_copy(update={"slowdown": 1.0})


def case_of_setting(setting: Setting, options: Options) -> Case:
    """The case that ranks build, and the simulation counts."""
    workload = Workload(setting.ids, BATCHES, BATCH_SIZE * setting.hosts)
    return case_of(workload, setting.hosts, setting.dim, options)


def with_options(case: Case, options: dict[str, int]) -> Case:
    """The case under some options of its exchange."""
    return Case(**{**case.as_json(), "exchange_options": options})


def sample_of(dim: int, options: Options) -> Sample:
    """What is calibrated: rows of two ranks without a network, and the dense model."""
    case = case_of_setting(Setting("zipf", 2, dim), options)
    return Sample(
        f"dlrm {dim}",
        partial(job_of, case, 2, seed=1),
        partial(dense_model, case),
        (BATCH_SIZE, BATCH_SIZE // 2),
    )


def job_of(case: Case, num_ranks: int, batch_size: int, seed: int | None = None) -> Job:
    """The case as the simulation's."""
    arrays = Arrays.load(case.data)

    def batch_of(step: int, rank: int) -> pb.JaggedBatch:
        number = step % len(arrays)
        first = rank * case.batch_size
        own = slice(first, first + batch_size)
        return pb.JaggedBatch.from_one_hot(
            torch.from_numpy(arrays.dense[number, own]),
            [f"C{table}" for table in range(case.num_tables)],
            torch.from_numpy(np.ascontiguousarray(arrays.ids[number, :, own])),
            torch.from_numpy(arrays.labels[number, own]),
        )

    tables = ours.tables(case)
    groups = group_tables(tables, ours.sparse_optimizer(case))
    return Job(groups, Plan.of(tables, num_ranks, "row_wise"), batch_of, seed=seed)


def counted(
    case: Case, setting: Setting, exchange: str
) -> tuple[list[StepCount], Callable[[str, Machine], Conditions]]:
    """Steps of an exchange, and what they are made under at a rate, by a calibration."""
    job = job_of(case, setting.hosts, BATCH_SIZE)
    if exchange != "retrieve":  # whose training makes the steps of alltoall
        job = job.under(EXCHANGES[exchange])

    def conditions(rate: str, machine: Machine) -> Conditions:
        dense = Dense(machine.dense[f"dlrm {setting.dim}"], BATCH_SIZE)
        memory = machine.memory.bytes_per_second or 1e9
        cores = float(machine.cores)
        link = bytes_per_second(rate)
        hosts = setting.hosts
        cluster = Cluster(hosts, 1, link, memory, cores, hosts, burst_of(rate))
        return Conditions(cluster, machine, dense)

    return count(job, 4), conditions


def row_of(
    setting: Setting, which: tuple[str, str], predicted: Prediction, measured: Measured
) -> Row:
    """Predicted beside measured."""
    measured_ms = [measured.times.percentile(percent) for percent in (20, 50, 80)]
    predicted_ms = predicted.step_s * 1e3
    predicted_mb = float(predicted.link_bytes.mean()) / 1e6
    return {
        "ids": setting.ids,
        "hosts": setting.hosts,
        "dim": setting.dim,
        "exchange": which[0],
        "rate": which[1],
        "predicted_ms": predicted_ms,
        "p20_ms": measured_ms[0],
        "p50_ms": measured_ms[1],
        "p80_ms": measured_ms[2],
        "time_error": predicted_ms / measured_ms[1] - 1,
        "over_measured": predicted_ms / measured_ms[1],
        "predicted_mb": predicted_mb,
        "link_mb": measured.link_mb,
        "bytes_error": predicted_mb / measured.link_mb - 1,
        "parts": predicted.parts_s,
    }


def headlines(rows: list[Row]) -> list[str]:
    """Median and worst errors."""
    lines = []
    for name, what in (("time_error", "step time"), ("bytes_error", "bytes of links")):
        errors = [abs(row[name]) for row in rows]
        worst = max(rows, key=lambda row: abs(row[name]))
        where = ", ".join(str(worst[key]) for key in ("ids", "hosts", "dim", "exchange", "rate"))
        lines.append(
            f"**{what}: median error {median(errors):.1%}, worst {max(errors):.1%} ({where})**"
        )
    return lines
