"""Whole steps of training beside what their parts alone predict.

Within a step caches and memory are shared with messages under way, so work takes longer than by
itself: the CPU clock of the training thread says how much. What is then still missing of the step's
time are threads that a message wakes and that wait for a core. Both are numbers of a machine,
measured under ``alltoall`` of the ranks that calibrate it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count as from_zero
from itertools import islice
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import brentq
from torch.nn.functional import binary_cross_entropy_with_logits

from pibroch.collectives import data_parallel
from pibroch.collectives.ranks import Ranks
from pibroch.collectives.transports import TRANSPORT_VARIABLE
from pibroch.exchange import Embeddings
from pibroch.exchange.alltoall.build import AllToAll
from pibroch.models.base import Model
from pibroch.sim.cluster import Cluster
from pibroch.sim.counting import Job, StepCount, count
from pibroch.sim.machine import Machine
from pibroch.sim.measuring import Party, Sample
from pibroch.sim.prediction import Conditions, predict
from pibroch.sim.steps import Dense

WARM_UP = 4
COUNTED = 8
MOST_WAIT_S = 0.02
"""Of a woken thread: beyond it the parts were not measured as they are."""


class WholeStep(NamedTuple):
    """A step of training.

    Attributes:
        seconds: that it took.
        cpu_s: seconds of CPU of the training thread in it.
    """

    seconds: float
    cpu_s: float


class Measured(NamedTuple):
    """Steps of a sample, as one process measured them.

    Attributes:
        key: of the dense model.
        batch_size: of the rank.
        counts: of such steps.
        step: the median one, of all turns until then.
    """

    key: str
    batch_size: int
    counts: list[StepCount]
    step: WholeStep


def measure_steps(
    samples: Sequence[Sample], num_steps: int, party: Party
) -> Iterator[list[Measured]]:
    """What one process measures, turn by turn: of each sample so many steps after warm-up.

    Those whose jobs are not of as many ranks as processes say nothing. A virtual machine's speed
    drifts within seconds: a calibration takes turns with what it is to predict.
    """
    os.environ[TRANSPORT_VARIABLE] = "gloo"  # as between hosts
    running = []
    for sample in samples:
        job = None if sample.job is None else sample.job(sample.batch_sizes[0])
        if job is not None and job.num_ranks == party.ranks.world_size:
            steps = steps_of(job, sample.model(), party.ranks)
            running.append((sample, count(job, COUNTED), steps, list[WholeStep]()))
    while True:
        answer = []
        for sample, counts, steps, kept in running:
            batch_size = sample.batch_sizes[0]
            party.begin(f"{sample.key}, {batch_size:,} samples, whole steps")
            kept += list(islice(steps, WARM_UP + num_steps))[WARM_UP:]
            middle = WholeStep(*map(median, zip(*kept, strict=True)))
            answer.append(Measured(sample.key, batch_size, counts, middle))
        yield answer


def steps_of(job: Job, model: Model, ranks: Ranks) -> Iterator[WholeStep]:
    """Steps of training as they are asked for, without end; all ranks of the job ask alike."""
    tables = [table for group in job.groups for table in group.space.tables]
    optimizers = {
        table.name: group.optimizer for group in job.groups for table in group.space.tables
    }
    assert isinstance(job.exchange, AllToAll), "which calibrates"
    embeddings = Embeddings(tables, optimizers, replace(job.exchange, placement=job.plan), job.seed)
    model = data_parallel(model, ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batches = (job.batch_of(step, ranks.rank) for step in from_zero())
    last = time.perf_counter(), time.thread_time()
    for batch in embeddings.feed(batches):
        optimizer.zero_grad()
        logits = model(batch.dense, lambda batch=batch: embeddings(batch))
        binary_cross_entropy_with_logits(logits, batch.labels).backward()
        optimizer.step()
        yield WholeStep(time.perf_counter() - last[0], time.thread_time() - last[1])
        last = time.perf_counter(), time.thread_time()


def fitted(machine: Machine, answers: Sequence[Sequence[Measured]], burst: float = 0.0) -> Machine:
    """A machine with the slowdown and the wait that explain steps which processes measured there.

    Args:
        machine: whose parts were measured, see :func:`pibroch.sim.calibrate.calibrate_parts`; it
            stays as it is without such steps.
        answers: of each process, see :func:`measure_steps`.
        burst: of the links between them, see :class:`~pibroch.sim.cluster.Cluster`.
    """
    steps = [
        (each.counts, Dense(machine.dense[each.key], each.batch_size), each.step)
        for answer in answers
        for each in answer
    ]
    if not steps:
        return machine
    slowdowns = [slowdown_of(machine, counts, model, step.cpu_s) for counts, model, step in steps]
    machine = machine.model_copy(update={"slowdown": float(np.mean(slowdowns))})
    waits = [
        wait_s_of(machine, counts, model, step.seconds, burst) for counts, model, step in steps
    ]
    return with_wait(machine, float(np.mean(waits)))


def step_s_of(
    machine: Machine, counts: Sequence[StepCount], dense: Dense, burst: float = 0.0
) -> float:
    """Predicted seconds of such a step where the machine was calibrated.

    A rank is on each of as many hosts, which share its cores.
    """
    size = len(counts[0].operations[0].parts[0])
    link = (machine.network.bytes_per_second or 1e9) / machine.network.wire_share
    local = machine.memory.bytes_per_second or 1e9
    cluster = Cluster(size, 1, link, local, float(machine.cores), size, burst)
    return predict(counts, Conditions(cluster, machine, dense)).step_s


def slowdown_of(machine: Machine, counts: Sequence[StepCount], dense: Dense, cpu_s: float) -> float:
    """How much longer work takes within a step.

    Args:
        machine: where it was measured.
        counts: of such steps.
        dense: the model.
        cpu_s: of the training thread in a step.
    """
    parts = (dense.seconds(name) for name in ("begin", "forward", "backward", "rest"))
    alone = sum(parts) + dense.cost.optimizer
    for name in ("read", "pool", "combine"):
        costs = [machine.cost(name, 0, each[name].parts[0]) for each in counts]
        alone += float(np.mean([each.mean() for each in costs if each is not None]))
    return cpu_s / alone


def wait_s_of(
    machine: Machine,
    counts: Sequence[StepCount],
    dense: Dense,
    step_s: float,
    burst: float = 0.0,
) -> float:
    """How much later messages are seen within a step of so many seconds.

    Args:
        machine: where it was measured, with its slowdown.
        counts: of such steps.
        dense: the model.
        step_s: measured.
        burst: of the links.
    """

    def too_long(wait_s: float) -> float:
        return step_s_of(with_wait(machine, wait_s), counts, dense, burst) - step_s

    if too_long(0.0) > 0:
        return 0.0
    if too_long(MOST_WAIT_S) < 0:
        return MOST_WAIT_S
    return float(brentq(too_long, 0.0, MOST_WAIT_S, rtol=1e-3))


def with_wait(machine: Machine, wait_s: float) -> Machine:
    """A machine whose threads wait so long for messages between hosts that have come."""
    late = machine.network.model_copy(update={"wait_s": wait_s})
    return machine.model_copy(update={"network": late})
