"""The ideal with pibroch's dense model and its sums over ranks.

What is left when the exchange costs nothing.
"""

from __future__ import annotations

from benchmarks.cases import Case
from benchmarks.workers import pibroch_tables as ours
from benchmarks.workers.distributed_ideal import train
from benchmarks.workers.dlrm_pibroch import dense_model
from benchmarks.workers.ranks import RankSubject, join, rank_batches
from pibroch.collectives import data_parallel


def build(case: Case) -> RankSubject:
    """This rank's share of the contender."""
    join(case)
    parts = ours.parts(case)
    losses = train(data_parallel(dense_model(case)), rank_batches(case), case, parts)
    return RankSubject(losses, ours.versions(), parts=parts)
