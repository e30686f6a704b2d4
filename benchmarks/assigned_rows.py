"""Vectors that cross between ranks under an assignment of samples, counted from lookahead's plans.

Shape legend: N batches, F features, B samples of a global batch, W ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pibroch import JaggedBatch, Plan, Table
from pibroch.assignment import RowAssigner
from pibroch.embedding import RowSpace
from pibroch.exchange.assigned import rows_under
from pibroch.exchange.layout import LaneLayout, lay_out
from pibroch.exchange.lookahead.oracle import Opening, Oracle, StepPlan
from pibroch.exchange.lookahead.oracle.kernels.window import Gradients, Transfer
from pibroch.kernels.arrays import Ints
from pibroch.kernels.route import resolve_addresses

LOOKAHEAD = 200
DIM = 16


@dataclass(frozen=True, slots=True)
class Counted:
    """What a run of batches took.

    Attributes:
        given: vectors that cross in all steps with samples as they came, on all ranks.
        assigned: likewise with samples where their rows are.
        expected: what the assigner expected of both, in this order.
        assign_ms: of each batch.
    """

    given: int
    assigned: int
    expected: tuple[int, int]
    assign_ms: list[float]

    @property
    def ratio(self) -> float:
        """Of what crosses, assigned over given."""
        return self.assigned / self.given if self.given else 1.0


def layout_of(num_features: int, num_rows: int, num_ranks: int) -> LaneLayout:
    """One table a feature, its rows over all ranks."""
    tables = [Table(f"C{number}", num_rows, DIM) for number in range(num_features)]
    (layout,) = lay_out(RowSpace(tables), Plan.of(tables, num_ranks, "row_wise"), 0)
    return layout


def count(
    ids_NFB: NDArray[np.int64],
    num_rows: int,
    num_ranks: int,
    lookahead: int = LOOKAHEAD,
    horizon: int | None = None,
) -> Counted:
    """Train on the batches in thought, with samples given and assigned.

    Args:
        ids_NFB: of one-hot features.
        num_rows: of each table.
        num_ranks: W.
        lookahead: of the oracle.
        horizon: of the assigner; that of the oracle when absent.
    """
    _, num_features, num_samples = ids_NFB.shape
    layout = layout_of(num_features, num_rows, num_ranks)
    rows = rows_under([layout], num_ranks, lookahead if horizon is None else horizon)
    assigner = RowAssigner(rows)
    bounds = [num_samples * rank // num_ranks for rank in range(num_ranks + 1)]
    given = np.repeat(np.arange(num_ranks, dtype=np.int16), np.diff(bounds))
    ranks_of_batch = []
    assign_ms = []
    expected = [0, 0]
    for ids_FB in ids_NFB:
        batch = JaggedBatch.from_one_hot(
            torch.empty(num_samples, 0),
            layout.features,
            torch.from_numpy(ids_FB),
            torch.zeros(num_samples),
        )
        start = time.perf_counter()
        verdict = assigner.assign(batch, bounds)
        assign_ms.append((time.perf_counter() - start) * 1e3)
        ranks_of_batch.append(verdict.ranks.copy())
        expected[0] += verdict.transfers_given
        expected[1] += verdict.transfers
    addresses = [addresses_of(ids_FB, layout) for ids_FB in ids_NFB]
    results = [
        transfers(addresses, ranks, layout.bounds, lookahead)
        for ranks in ([given] * len(addresses), ranks_of_batch)
    ]
    return Counted(results[0], results[1], (expected[0], expected[1]), assign_ms)


def addresses_of(ids_FB: NDArray[np.int64], layout: LaneLayout) -> Ints:
    """``[F, B]``."""
    addresses = np.empty(ids_FB.size, np.int64)
    assert (
        resolve_addresses(ids_FB.ravel(), np.arange(ids_FB.size + 1), layout.homes, addresses) < 0
    )
    return addresses.reshape(ids_FB.shape)


def transfers(
    addresses_NFB: Sequence[Ints],
    ranks_of_batch: Sequence[NDArray[np.int16]],
    bounds: Ints,
    lookahead: int = LOOKAHEAD,
) -> int:
    """Records, weights and gradients that all ranks send each other in these steps."""
    num_ranks = len(bounds) - 1
    steps = [
        [np.unique(addresses[:, ranks == rank]) for rank in range(num_ranks)]
        for addresses, ranks in zip(addresses_NFB, ranks_of_batch, strict=True)
    ]
    return sum(
        sent(answer)
        for rank in range(num_ranks)
        for answer in answers(rank, steps, bounds, lookahead)
    )


def answers(
    rank: int, steps: Sequence[Sequence[Ints]], bounds: Ints, lookahead: int
) -> Iterator[Opening | StepPlan]:
    """What a rank's oracle says, with room for all rows."""
    oracle = Oracle(bounds, rank, lookahead, int(bounds[-1]))
    for rows in steps[: lookahead + 1]:
        oracle.add(rows)
    yield oracle.open()
    for number in range(len(steps)):
        if number + lookahead + 1 < len(steps):
            oracle.add(steps[number + lookahead + 1])
        yield oracle.plan()


def sent(answer: Opening | StepPlan) -> int:
    """Vectors that leave a rank."""
    if isinstance(answer, Opening):
        moved = [answer.now, answer.prefetch]
        return sum(transfer_sent(each) for each in moved if each is not None)
    moved = [answer.next_step, answer.prefetch, *answer.evicted]
    gradients = [answer.critical, answer.deferred]
    return sum(transfer_sent(each) for each in moved if each is not None) + sum(
        gradients_sent(each) for each in gradients
    )


def transfer_sent(transfer: Transfer) -> int:
    """Records and weights that leave."""
    return len(transfer.records_out) + len(transfer.weights_out)


def gradients_sent(gradients: Gradients) -> int:
    """Gradients that leave."""
    return len(gradients.given)
