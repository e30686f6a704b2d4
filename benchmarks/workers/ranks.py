"""What the workers of topic ``distributed`` share: one process a rank, its part of the batches.

Torch alone.

Shape legend: N batches, F features, B samples of a rank, n dense features, D dim.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import count
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cases import CHECK_STEPS, Arrays, Case
from benchmarks.workers.parts import Parts

T = TypeVar("T")
TIMEOUT = timedelta(seconds=120)


def join(case: Case) -> None:
    """Join the group that the environment describes, with the case's number of threads."""
    torch.set_num_threads(case.threads)
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=TIMEOUT)


def rank_batches(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of each global batch.

    Ids ``[N, F, B]``, dense ``[N, B, n]``, labels ``[N, B]``.
    """
    rank = int(os.environ["RANK"])
    arrays = Arrays.load(case.data)
    own = slice(rank * case.batch_size, (rank + 1) * case.batch_size)
    parts = (arrays.ids[:, :, own], arrays.dense[:, own], arrays.labels[:, own])
    ids_NFB, dense_NBn, labels_NB = (torch.from_numpy(part.copy()) for part in parts)
    return ids_NFB, dense_NBn, labels_NB


def batch_order(num_batches: int) -> Iterator[int]:
    """Numbers of the batches to train on, without end.

    The first ones, which are checked, come twice each.

    A lost or doubled update of a row shows in the loss when the batch comes again.
    """
    return ((step // 2 if step < CHECK_STEPS else step) % num_batches for step in count())


def in_order(batches: Sequence[T]) -> Iterator[T]:
    """Batches to train on, in the order of :func:`batch_order`."""
    return (batches[number] for number in batch_order(len(batches)))


class RankSubject:
    """A rank that trains.

    Args:
        losses: trains on the next batch, in the order of :func:`batch_order`, and gives this rank's
            mean loss; an iterator, because whoever looks ahead reads further than it trains.
        versions: packages that matter.
        counts: gives what the exchange counted since the set-up.
        parts: of the steps' time, if it is on.
    """

    def __init__(
        self,
        losses: Iterator[Tensor],
        versions: dict[str, str],
        counts: Callable[[], dict[str, float]] = dict,
        parts: Parts | None = None,
    ) -> None:
        self._losses = losses
        self._versions = versions
        self._counts = counts
        self._parts = parts or Parts(False)
        self._loss = torch.tensor(float("nan"))

    def phases(self) -> dict[str, Callable[[int], object]]:
        """Training steps; batches come in their own order."""
        return {"step": self._step}

    def _step(self, _: int) -> None:
        self._loss = next(self._losses)

    def tell(self) -> dict[str, float]:
        """Where parts are recorded: of the last step its loss, and milliseconds by part."""
        return {"loss": float(self._loss)} | self._parts.take_ms() if self._parts.is_on else {}

    def check(self, steps: int) -> dict[str, list[float]]:
        """``loss`` of each step, of this rank's samples."""
        return {"loss": [float(next(self._losses)) for _ in range(steps)]}

    def counts(self) -> dict[str, float]:
        """See :class:`benchmarks.workers.serving.Counting`."""
        return self._counts()

    def versions(self) -> dict[str, str]:
        """Versions of the packages used."""
        return self._versions
