"""Whole steps of training beside what their parts alone predict.

Work takes longer within a step than by itself: caches and memory are shared with messages under
way, and a thread that is woken waits for a core. How much longer is one number of a machine,
measured under ``alltoall`` of the ranks that calibrate it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median

import torch
from scipy.optimize import brentq
from torch.nn.functional import binary_cross_entropy_with_logits

from pibroch.collectives import data_parallel
from pibroch.collectives.ranks import Ranks
from pibroch.data import JaggedBatch
from pibroch.exchange import Embeddings
from pibroch.exchange.alltoall.build import AllToAll
from pibroch.models.base import Model
from pibroch.sim.cluster import Cluster
from pibroch.sim.counting import Job, StepCount
from pibroch.sim.machine import Machine
from pibroch.sim.prediction import Conditions, predict
from pibroch.sim.steps import Dense

STEPS = 24
WARM_UP = 4
LEAST = 0.5
MOST = 4.0
"""Of what is found: beyond them the parts were not measured as they are."""


def measured_step_s(job: Job, model: Model, ranks: Ranks) -> float:
    """Median seconds of a step of training; all ranks of the job call it."""
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
    last = time.perf_counter()
    for batch in embeddings.feed(batches()):
        optimizer.zero_grad()
        logits = model(batch.dense, lambda batch=batch: embeddings(batch))
        binary_cross_entropy_with_logits(logits, batch.labels).backward()
        optimizer.step()
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return median(times[WARM_UP:])


def step_s_of(machine: Machine, counts: Sequence[StepCount], dense: Dense) -> float:
    """Predicted seconds of such a step where the machine was calibrated.

    A rank is on each of as many hosts, which share its cores.
    """
    size = len(counts[0].operations[0].parts[0])
    link = (machine.network.bytes_per_second or 1e9) / machine.network.wire_share
    local = machine.memory.bytes_per_second or 1e9
    cluster = Cluster(size, 1, link, local, float(machine.cores), size)
    return predict(counts, Conditions("alltoall", cluster, machine, dense)).step_s


def slowdown_of(
    machine: Machine, counts: Sequence[StepCount], dense: Dense, step_s: float
) -> float:
    """By how much work has to take longer for a step of so many seconds.

    Args:
        machine: where it was measured.
        counts: of such steps.
        dense: the model.
        step_s: measured.
    """

    def too_long(factor: float) -> float:
        slower = machine.model_copy(update={"slowdown": factor})
        return step_s_of(slower, counts, dense) - step_s

    if too_long(LEAST) > 0:
        return LEAST
    if too_long(MOST) < 0:
        return MOST
    return float(brentq(too_long, LEAST, MOST, rtol=1e-3))
