"""pibroch's dense model alone.

What is left of a step when embeddings are there already and their update costs nothing.
"""

from __future__ import annotations

from benchmarks.cases import Case
from benchmarks.workers import pibroch_tables as ours
from benchmarks.workers.distributed_ideal import train
from benchmarks.workers.dlrm import TrainingSubject, torch_batches
from benchmarks.workers.dlrm_pibroch import dense_model


def build(case: Case) -> TrainingSubject:
    """The contender for one case; its embeddings never change."""
    batches = torch_batches(case)
    losses = train(dense_model(case), batches, case)
    return TrainingSubject(
        lambda batch: next(losses),
        lambda batch: batches[1][batch],
        ours.versions(),
        len(batches[1]),
    )
