"""What lanes of the all-to-all exchange have in common. A lane carries the blocks of one width over all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pibroch.collectives import Channel
from pibroch.data import JaggedBatch
from pibroch.embedding import MemoryShard, SparseOptimizer
from pibroch.errors import DataError, RowIdError
from pibroch.exchange.layout import LaneLayout
from pibroch.exchange.wire import Wire


class Lane(ABC):
    """The blocks of one width: this rank's shard of them and the way to the others'.

    Methods are called in the order of their definition, `pool` and `combine` by the thread that trains, the others by the
    communication thread. All but these two are collective: every rank calls them in the same order.

    Args:
        layout: of the lane.
        optimizer: of all tables.
        seed: of the initial weights.
        channel: to the other ranks, for the communication thread's use.
        wire: the way of rows and gradients, over the same channel.
        spare_rows: room behind this rank's records.
    """

    def __init__(
        self, layout: LaneLayout, optimizer: SparseOptimizer, seed: int, channel: Channel, wire: Wire,
        spare_rows: int = 0,
    ) -> None:  # fmt: skip
        self.layout, self.optimizer, self.channel, self.wire = layout, optimizer, channel, wire
        self.rank, self.world_size = channel.ranks.rank, channel.ranks.world_size
        self.shard = MemoryShard(layout.pieces[self.rank], layout.width, optimizer, seed, spare_rows)
        largest = int(np.diff(layout.bounds).max())
        self.id_type: np.dtype[Any] = np.dtype(np.int32 if largest < 1 << 31 else np.int64)

    @abstractmethod
    def route(self, batch: JaggedBatch, is_real: bool = True) -> Any:
        """Tell every owner what this rank's part of the batch needs; ``is_real`` unless it is a filler after the last one.

        The result has ``is_real``: whether any rank's part is.

        Raises:
            RowIdError: for an id outside its table, on the rank whose batch has it; DataError that names it on the others.
        """

    @abstractmethod
    def fetch(self, route: Any, averaged_at: int | None) -> NDArray[np.float32]:
        """What owners send for the batch, by the rows' weights or by their moving averages as of a step."""

    @abstractmethod
    def pool(self, route: Any, fetched: NDArray[np.float32]) -> Tensor:
        """Pooled embeddings ``[B, F, D]`` from what `fetch` brought."""

    @abstractmethod
    def combine(self, route: Any, gradient_BFD: Tensor) -> Tensor:
        """What owners need of a batch's gradients."""

    @abstractmethod
    def update(self, route: Any, gradients: Tensor, learning_rate: float, step: int) -> None:
        """Send `combine`'s result to the owners and apply what came here, summed in rank order, once to each row."""

    def _tell(self, said: Tensor, problem: RowIdError | None) -> NDArray[np.int64]:
        """Row p of int64 ``said`` ``[W, k]`` to rank p, and what that said; the first number is negative for a bad batch."""
        told = self.channel.exchange_counts(said).numpy()
        if (told[:, 0] < 0).any():  # all ranks know; none has changed anything
            problems = self.channel.gather(None if problem is None else str(problem))
            if problem is not None:
                raise problem
            rank = next(rank for rank, text in enumerate(problems) if text is not None)
            raise DataError(f"a bad batch on rank {rank}: {problems[rank]}", "ids inside their tables on every rank")
        return told

    def _carry(self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> NDArray[np.float32]:
        """Float32 rows to and from all ranks."""
        numbers: NDArray[np.float32] = self.wire.carry(rows, send_counts, receive_counts).numpy()
        return numbers
