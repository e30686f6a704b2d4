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
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import brentq
from torch.nn.functional import binary_cross_entropy_with_logits

from pibroch.collectives import data_parallel
from pibroch.collectives.ranks import Ranks
from pibroch.collectives.transports import TRANSPORT_VARIABLE
from pibroch.data import JaggedBatch
from pibroch.exchange import Embeddings
from pibroch.exchange.alltoall.build import AllToAll
from pibroch.models.base import Model
from pibroch.sim.cluster import Cluster
from pibroch.sim.counting import Job, StepCount, count_alltoall
from pibroch.sim.machine import Machine
from pibroch.sim.measuring import Enter, Party, Sample, Say, in_processes, nowhere
from pibroch.sim.prediction import Conditions, predict
from pibroch.sim.steps import Dense

STEPS = 24
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


def calibrate_steps(
    machine: Machine,
    samples: Sequence[Sample],
    say: Say,
    num_processes: int = 2,
    enter: Enter = nowhere,
    burst: float = 0.0,
) -> Machine:
    """A machine with its slowdown, and how long its woken threads wait.

    A virtual machine's speed drifts within a minute: this takes some seconds, may be done again
    beside what is to be predicted, and has the rest of a calibration follow it.

    Args:
        machine: whose parts were measured, see :func:`pibroch.sim.calibrate.calibrate_parts`.
        samples: of which; those whose jobs are not of as many ranks as processes say nothing.
        say: told what is measured.
        num_processes: that work at once, each with one thread.
        enter: called first in each process, with its rank: where it is to be on a network.
        burst: of the links of this network, see :class:`~pibroch.sim.cluster.Cluster`.

    Raises:
        PibrochError: when a process ends without an answer.
    """
    steps = [
        (counts, Dense(machine.dense[key], batch_size), step)
        for answer in in_processes(partial(_measure, samples), num_processes, say, enter)
        for key, batch_size, counts, step in answer
    ]
    if not steps:
        return machine
    slowdowns = [slowdown_of(machine, counts, model, step.cpu_s) for counts, model, step in steps]
    machine = machine.model_copy(update={"slowdown": float(np.mean(slowdowns))})
    waits = [
        wait_s_of(machine, counts, model, step.seconds, burst) for counts, model, step in steps
    ]
    return with_wait(machine, float(np.mean(waits)))


def _measure(
    samples: Sequence[Sample], party: Party
) -> list[tuple[str, int, list[StepCount], WholeStep]]:
    """What one process measures."""
    os.environ[TRANSPORT_VARIABLE] = "gloo"  # as between hosts
    answer = []
    for sample in samples:
        if sample.job is None:
            continue
        batch_size = sample.batch_sizes[0]
        job = sample.job(batch_size)
        if job.num_ranks == party.ranks.world_size:
            counts = count_alltoall(job, COUNTED)
            party.begin(f"{sample.key}, {batch_size:,} samples, whole steps")
            step = measured_step(job, sample.model(), party.ranks)
            answer.append((sample.key, batch_size, counts, step))
    return answer


def measured_step(job: Job, model: Model, ranks: Ranks) -> WholeStep:
    """The median of some steps of training; all ranks of the job call it."""
    tables = [table for group in job.groups for table in group.space.tables]
    optimizers = {
        table.name: group.optimizer for group in job.groups for table in group.space.tables
    }
    exchange = AllToAll(placement=job.plan, wire=job.wire, replicas=job.replicas)
    embeddings = Embeddings(tables, optimizers, exchange, job.seed)
    model = data_parallel(model, ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def batches() -> Iterator[JaggedBatch]:
        for step in range(STEPS + WARM_UP):
            yield job.batch_of(step, ranks.rank)

    times = []
    last = time.perf_counter(), time.thread_time()
    for batch in embeddings.feed(batches()):
        optimizer.zero_grad()
        logits = model(batch.dense, lambda batch=batch: embeddings(batch))
        binary_cross_entropy_with_logits(logits, batch.labels).backward()
        optimizer.step()
        now = time.perf_counter(), time.thread_time()
        times.append((now[0] - last[0], now[1] - last[1]))
        last = now
    return WholeStep(*map(median, zip(*times[WARM_UP:], strict=True)))


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
    return predict(counts, Conditions("alltoall", cluster, machine, dense)).step_s


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
        costs = [machine.cost(name, 0, count[name].parts[0]).mean() for count in counts]
        alone += float(np.mean(costs))
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
