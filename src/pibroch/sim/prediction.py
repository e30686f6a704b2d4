"""One cluster, one job: what a step would take, and what would cross."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pibroch.sim.cluster import Cluster
from pibroch.sim.counting import StepCount
from pibroch.sim.machine import Machine
from pibroch.sim.program import Program
from pibroch.sim.steps import Dense, run_steps, step_seconds

STEPS_RUN = 14
STEPS_BEFORE = 4


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is predicted of a step.

    Attributes:
        step_s: its time.
        parts_s: the training thread's time by what it does, or waits for.
        samples_per_second: of all ranks.
        sent_bytes: payload that each rank sends to others, ``[W]``, dense gradients included.
        link_bytes: payload that leaves each host by its link, ``[H]``.
    """

    step_s: float
    parts_s: dict[str, float]
    samples_per_second: float
    sent_bytes: NDArray[np.float64]
    link_bytes: NDArray[np.float64]

    @property
    def waiting_s(self) -> float:
        """Of the training thread, for rows, plans, sums and messages."""
        return sum(value for name, value in self.parts_s.items() if name.startswith("waiting"))


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under which steps are made.

    Attributes:
        cluster: whose ranks make them.
        machine: what work takes there.
        dense: the model.
        jitter: see :class:`~pibroch.sim.program.Program`; the machine's where absent.
        seed: of the jitter.
    """

    cluster: Cluster
    machine: Machine
    dense: Dense
    jitter: float | None = None
    seed: int = 0

    def program(self, counts: Sequence[StepCount]) -> Program:
        """What all threads do in some steps that were counted."""
        jitter = self.machine.jitter if self.jitter is None else self.jitter
        program = Program(self.cluster, self.machine, jitter, self.seed)
        run_steps(program, counts, self.dense, STEPS_RUN)
        return program


def predict(counts: Sequence[StepCount], conditions: Conditions) -> Prediction:
    """What steps that were counted take."""
    program = conditions.program(counts)
    cluster = conditions.cluster
    seconds, parts = step_seconds(program, STEPS_RUN, STEPS_BEFORE)
    flows = [
        program.flow(sent) for each in counts for done in each.operations for sent in done.sent
    ]
    sums = conditions.dense.sums(cluster.host_of_rank)
    out_link, out_local = (
        np.sum([getattr(each, way) for each in flows], axis=0) / len(counts)
        + np.sum([getattr(each, way) for each in sums], axis=0)
        for way in ("out_link", "out_local")
    )
    return Prediction(
        seconds,
        parts,
        conditions.dense.num_samples * cluster.num_ranks / seconds,
        out_link + out_local,
        np.bincount(cluster.host_of_rank, out_link, cluster.num_hosts).astype(np.float64),
    )
