"""A lane carries the blocks of one width of a group of tables over all ranks.

Here is what lanes of every kind have in common. What a lane sends it yields, see
:mod:`pibroch.exchange.messages`: the messages of all lanes travel as one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.embedding import Frozen, MemoryShard, TableGroup
from pibroch.embedding.columns import Columns
from pibroch.embedding.row_index import LearningIndex
from pibroch.embedding.shard import MakeRoom
from pibroch.errors import RowIdError
from pibroch.exchange.agreement import bad_batch
from pibroch.exchange.fresh_rows import FreshRecords, fresh_bags, fresh_records
from pibroch.exchange.layout import LaneLayout
from pibroch.exchange.messages import Counts, Messages, Rows
from pibroch.exchange.wire import RowWire
from pibroch.kernels import route as routing
from pibroch.kernels.arrays import Bytes, Ints, Records
from pibroch.kernels.memory import empty_rows


class Route(ABC):
    """A batch on its way through a lane: where its rows are, and what is done with them.

    The methods are called in their order. `pool` and `combine` run on the training thread; `fetch`
    and `update` are generators of messages, which the communication thread runs.

    Attributes:
        is_real: whether some rank's part is one of its own batches, and not a filler after its last
            one.
    """

    is_real: bool

    def begin(self) -> None:  # noqa: B027  # most have nothing to do
        """The batch's step begins: rows of this shard that begin anew with it do so.

        The communication thread calls it, after `fetch`, where a batch has such rows.
        """

    @abstractmethod
    def fetch(self, averaged_at: int | None) -> Messages[Records]:
        """What owners send for the batch: by weights, or by moving averages as of a step."""

    @abstractmethod
    def pool(self, fetched: Records, room_BS: Tensor | None) -> Tensor:
        """Embeddings from what `fetch` returned.

        Pooled ones are written to the lane's columns of ``room_BS``, others are ``[V, D]``.
        """

    @abstractmethod
    def combine(self, gradient: Tensor) -> Tensor:
        """What owners need of the gradient of what `pool` gave."""

    @abstractmethod
    def update(self, gradients: Tensor, learning_rate: float, step: int) -> Messages[None]:
        """Send `combine`'s result to the owners, and update each row of this rank once.

        Gradients of a row are summed in rank order.
        """


@dataclass(frozen=True, slots=True)
class LaneQuestion:
    """What a lane asks of every rank for a batch that nothing is updated for.

    It takes one message there and one back.

    Attributes:
        parts: bytes for each rank, a multiple of four.
        notes: a number for each rank that goes with them.
        num_vectors: how many each rank will answer with.
        pool: gives of all ranks' answers, ``[num_vectors, width]`` each, and the room, what
            :meth:`Route.pool` would.
    """

    parts: Sequence[Bytes]
    notes: Sequence[int]
    num_vectors: Sequence[int]
    pool: Callable[[Sequence[Records], Tensor | None], Tensor]


class Lane(ABC):
    """The blocks of one width: this rank's shard, and the way to those of other ranks.

    Args:
        layout: of the lane.
        group: of its tables.
        seed: of the initial weights; ``None`` to leave all numbers to who writes them.
        wire: carries rows and gradients; the communication thread alone uses its channel.
        spare_rows: room behind this rank's records.
        make_room: for them.

    Attributes:
        begins_at_fetch: whether rows that begin anew with a batch do so when it is fetched, which
            is then not done early.
    """

    begins_at_fetch = False

    def __init__(
        self,
        layout: LaneLayout,
        group: TableGroup,
        seed: int | None,
        wire: RowWire,
        spare_rows: int = 0,
        make_room: MakeRoom = empty_rows,
    ) -> None:
        self.layout = layout
        self.optimizer = group.optimizer
        self.channel = wire.channel
        self.wire = wire
        self.columns: Columns | None = None
        if group.columns is not None:
            self.columns = group.columns.part(layout.places, layout.first_columns, layout.width)
        self.rank = self.channel.ranks.rank
        self.world_size = self.channel.ranks.world_size
        pieces = layout.pieces[self.rank]
        self.shard = MemoryShard(
            pieces, layout.width, self.optimizer, seed, spare_rows, layout.dtype, make_room
        )
        readers = [table for table in group.space.tables for _ in table.features]
        blocks = {
            (readers[place].name, first): (number, readers[place])
            for number, (place, first) in reversed(
                list(enumerate(zip(layout.places, layout.first_columns, strict=True)))
            )
        }
        self._learning_blocks = [
            (number, table, range(first, first + layout.width))
            for (name, first), (number, table) in blocks.items()
            if isinstance(group.space.indices[name], LearningIndex)
        ]
        largest = int(np.diff(layout.bounds).max())
        self.id_type: DTypeLike = np.int32 if largest < 1 << 31 else np.int64

    @abstractmethod
    def route(self, batch: JaggedBatch, is_real: bool = True) -> Messages[Route]:
        """Tell every owner what this rank's part of the batch needs.

        Args:
            batch: of at least the lane's features, checked.
            is_real: unless it is a filler after this rank's last batch.

        Raises:
            RowIdError: for an id outside its table, on the rank whose batch has it; DataError that
                names it on the others.
        """

    @abstractmethod
    def ask(self, batch: JaggedBatch) -> LaneQuestion:
        """What this rank has to ask for a batch of at least the lane's features, checked.

        Raises:
            RowIdError: for an id outside its table; nobody else knows of the batch yet.
        """

    @abstractmethod
    def answer(
        self, question: Bytes, num_samples: int, note: int, averaged_at: int | None
    ) -> Records:
        """Vectors ``[num_vectors, width]`` for one rank's part of a :class:`LaneQuestion`.

        Args:
            question: bytes for this rank.
            num_samples: of the asking rank's batch.
            note: that came with the question.
            averaged_at: answer with moving averages as of this step instead of the weights.
        """

    def own_fresh(self, batch: JaggedBatch) -> FreshRecords | None:
        """Rows of this shard that begin anew with a batch."""
        fresh = self.fresh(batch)
        first, stop = self.layout.bounds[self.rank : self.rank + 2].tolist()
        return None if fresh is None else fresh.within(first, stop)

    def fresh(self, batch: JaggedBatch) -> FreshRecords | None:
        """The records of this lane's rows, by address, that begin anew with a batch."""
        if batch.fresh is None or not self._learning_blocks:
            return None
        layout = self.layout
        tables = [""] * len(layout.features)
        for number, table, _ in self._learning_blocks:
            tables[number] = table.name
        rows, offsets = fresh_bags(batch.fresh, tables)
        addresses = np.empty(len(rows), np.int64)
        routing.resolve_addresses(rows, offsets, layout.homes, addresses)
        return fresh_records(
            batch.fresh,
            [(table, columns) for _, table, columns in self._learning_blocks],
            self.optimizer,
            [addresses[offsets[n] : offsets[n + 1]] for n, *_ in self._learning_blocks],
        )

    def exchange_heads(self, heads: Tensor, problem: RowIdError | None) -> Messages[Ints]:
        """Row p of int64 ``heads`` ``[W, k]`` to rank p; returns theirs.

        The first number is negative for a bad batch.
        """
        answer = yield Counts(heads)
        received: Ints = answer.tensor.numpy()
        if (received[:, 0] < 0).any():  # all ranks see it, and none has changed anything
            error = bad_batch(self.channel, problem)
            assert error is not None, "some rank has it"
            raise error
        return received

    def carry(
        self, rows: Tensor, send_counts: list[int], receive_counts: list[int]
    ) -> Messages[Records]:
        """Send float32 rows to all ranks, and receive theirs."""
        answer = yield Rows(rows, send_counts, receive_counts)
        return answer.tensor.numpy()

    @property
    def is_frozen(self) -> bool:
        """Whether no row of it moves, so that no gradient needs to travel."""
        return isinstance(self.optimizer, Frozen)
