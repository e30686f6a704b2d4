"""Pooled vectors travel: bags go to the owner of their table, a vector for each comes back.

Gradients go to the owner, one for each bag. These are fewer bytes than rows where bags are long and
repeat little. The owner does for each rank what that rank would have done with the rows, in the
same order, so the numbers are those of :mod:`pibroch.exchange.alltoall.row_lane`.

Shape legend: B_p samples of rank p, F_p features whose tables rank p holds, D width of the lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.embedding.rows import NO_SCALE, group_rows, read_rows, update_rows
from pibroch.errors import ConfigError, RowIdError
from pibroch.exchange.alltoall.lane import Lane, LaneQuestion, Route
from pibroch.exchange.fresh_rows import FreshRecords
from pibroch.exchange.messages import Messages, Values
from pibroch.exchange.rows import BatchIds, group, pool, pooling_scale
from pibroch.kernels import route as routing
from pibroch.kernels import scatter_update as updating
from pibroch.kernels.arrays import Bytes, Ints, Records, Stored
from pibroch.kernels.scatter_update import Grouped


@dataclass(frozen=True, slots=True)
class BagRoute(Route):
    """The route of a batch whose bags are pooled by their owners.

    Attributes:
        lane: of the tables.
        num_samples: B_p of each rank p.
        bags: of each rank, those of tables held here; rows are offsets in this shard.
        grouped: the same by distinct row.
        updates: rows of this shard that the step updates; their gradients come rank by rank, each
            rank's by distinct row.
        is_real: see :class:`Route`.
        fresh: rows of this shard that begin anew with the batch.
    """

    lane: PooledLane
    num_samples: list[int]
    bags: list[BatchIds]
    grouped: list[Grouped]
    updates: Grouped
    is_real: bool
    fresh: FreshRecords | None

    def fetch(self, averaged_at: int | None) -> Messages[Records]:
        """For each owner in turn its features' vectors, ``[B * F_p, D]``."""
        if self.fresh is not None:
            self.fresh.begin(self.lane.shard)
        pooled = [self.lane.pooled(ids, averaged_at) for ids in self.bags]
        return (
            yield from self.lane.carry(
                torch.cat(pooled), [len(part) for part in pooled], self._own_bags()
            )
        )

    def pool(self, fetched: Records, room_BS: Tensor | None) -> Tensor:
        """See :class:`Route`."""
        return self.lane.joined(fetched, self.num_samples[self.lane.rank], room_BS)

    def combine(self, gradient: Tensor) -> Tensor:
        """The gradients of each owner's bags in turn, ``[B * F, D]``."""
        gradients = torch.empty(sum(self._own_bags()), self.lane.layout.width)
        for columns, of_bags in self.lane.by_reader(gradients, self.num_samples[self.lane.rank]):
            of_bags[:] = gradient[:, columns]
        return gradients

    def update(self, gradients: Tensor, learning_rate: float, step: int) -> Messages[None]:
        """See :class:`Route`."""
        lane = self.lane
        counts = [len(ids.offsets) - 1 for ids in self.bags]
        if lane.is_frozen:
            return
        received = yield from lane.carry(gradients, self._own_bags(), counts)
        ends = np.cumsum([0, *counts])
        size = max(1, sum(self.num_samples))
        totals = []
        for p, grouped in enumerate(self.grouped):
            total = np.empty((len(grouped.rows), lane.layout.width), np.float32)
            share = np.float32(self.num_samples[p] / size)
            updating.sum_gradients(received[ends[p] : ends[p + 1]], grouped, float(share), total)
            totals.append(total)
        hyper = lane.optimizer.hyper(learning_rate, step)
        update_rows(lane.shard, lane.optimizer, self.updates, np.concatenate(totals), hyper, step)

    def _own_bags(self) -> list[int]:
        """This rank's bags by owner."""
        return self.lane.bags_of(self.num_samples[self.lane.rank])


class PooledLane(Lane):
    """The owner of a table pools its bags for all ranks.

    The lane's features stand in the order of their owners.

    A message to an owner is bytes: int32 lengths of the bags, then rows as offsets in its shard,
    then float32 scales if there are any. Features of one owner stand side by side, so its bags are
    one span of the batch's.
    """

    begins_at_fetch = True

    def route(self, batch: JaggedBatch, is_real: bool = True) -> Messages[Route]:
        """See :class:`Lane`."""
        batch = batch.pick(self.layout.features)
        messages, scaled, problem = self._messages(batch)
        counts = [len(message) for message in messages]
        heads = [[-1 if problem else batch.batch_size, is_real, count, scaled] for count in counts]
        received = yield from self.exchange_heads(torch.tensor(heads), problem)
        sizes = received[:, 2].tolist()
        answer = yield Values(torch.from_numpy(np.concatenate(messages)), counts, sizes)
        pieces = zip(answer.tensor.split(sizes), received, strict=True)
        bags = [
            self._bags(piece.numpy(), int(size), bool(scaled))
            for piece, (size, _, _, scaled) in pieces
        ]
        grouped = [group(ids) for ids in bags]
        updates = group_rows(np.concatenate([each.rows for each in grouped]))
        return BagRoute(
            self,
            received[:, 0].tolist(),
            bags,
            grouped,
            updates,
            bool(received[:, 1].any()),
            self.own_fresh(batch),
        )

    def ask(self, batch: JaggedBatch) -> LaneQuestion:
        """See :class:`Lane`."""
        messages, scaled, problem = self._messages(batch.pick(self.layout.features))
        if problem is not None:
            raise problem
        size = batch.batch_size

        def join(answers: Sequence[Records], room_BS: Tensor | None) -> Tensor:
            return self.joined(np.concatenate(answers), size, room_BS)

        return LaneQuestion(messages, [int(scaled)] * len(messages), self.bags_of(size), join)

    def answer(
        self, question: Bytes, num_samples: int, note: int, averaged_at: int | None
    ) -> Records:
        """See :class:`Lane`."""
        return self.pooled(self._bags(question, num_samples, bool(note)), averaged_at).numpy()

    def pooled(self, ids: BatchIds, averaged_at: int | None) -> Tensor:
        """One rank's bags, ``[B_p * F, D]``."""
        rows = ids.row_ids
        records: Stored = self.shard.stored
        if averaged_at is not None:
            records = read_rows(self.shard, self.optimizer, ids.row_ids, averaged_at)
            rows = np.arange(len(rows))
        return pool(ids, records, rows, self.layout.width).view(-1, self.layout.width)

    def joined(self, fetched: Records, num_samples: int, room_BS: Tensor | None) -> Tensor:
        """Write vectors of each owner's features in turn, ``[B * F_p, D]``, to their columns."""
        assert room_BS is not None, "see room_for"
        for columns, vectors in self.by_reader(torch.from_numpy(fetched), num_samples):
            room_BS[:, columns] = vectors
        return room_BS

    def by_reader(self, vectors: Tensor, num_samples: int) -> Iterator[tuple[slice, Tensor]]:
        """Each reader's columns, and a view of its bags in ``vectors``, ``[B, D]``.

        The vectors are in the order of the owners.
        """
        layout = self.layout
        columns = self.columns
        assert columns is not None, "owners pool"
        firsts = iter(columns.first.tolist())
        for part, count in zip(
            vectors.split(self.bags_of(num_samples)), layout.num_features_of_shard, strict=True
        ):
            for of_bags in part.view(num_samples, count, layout.width).unbind(1):
                first = next(firsts)
                yield slice(first, first + layout.width), of_bags

    def bags_of(self, num_samples: int) -> list[int]:
        """Bags of so many samples, by owner."""
        return [num_samples * count for count in self.layout.num_features_of_shard]

    def _messages(self, batch: JaggedBatch) -> tuple[list[Bytes], bool, RowIdError | None]:
        """A message to each owner about its bags, whether they have scales, and a bad id."""
        layout = self.layout
        if batch.by_id:
            raise ConfigError(
                "weights that are learned with a placement where owners pool",
                "a placement under which rows travel, e.g. table_wise",
            )
        offsets = batch.offsets.numpy()
        rows = layout.index.rows_of(batch)
        addresses = np.empty(len(rows), np.int64)
        problem = None
        bad = routing.resolve_addresses(rows, offsets, layout.homes, addresses)
        if bad >= 0:
            problem = layout.index.error(batch, int(bad))
        scale = pooling_scale(batch, layout.readers.mean)
        return (
            [self._message(p, addresses, offsets, scale) for p in range(self.world_size)],
            len(scale) > 0,
            problem,
        )

    def _message(self, owner: int, addresses: Ints, offsets: Ints, scale: Records) -> Bytes:
        """The message to one owner about its bags."""
        ends = np.cumsum([0, *self.layout.num_features_of_shard])
        bags_per_feature = (len(offsets) - 1) // max(1, int(ends[-1]))
        first = ends[owner] * bags_per_feature
        last = ends[owner + 1] * bags_per_feature
        span = slice(offsets[first], offsets[last])
        lengths = np.diff(offsets[first : last + 1]).astype(np.int32)
        rows = (addresses[span] - self.layout.bounds[owner]).astype(self.id_type)
        return _packed(lengths, rows, scale[span] if len(scale) else NO_SCALE)

    def _bags(self, message: Bytes, num_samples: int, scaled: bool) -> BatchIds:
        """The bags of a message of :meth:`_message`."""
        num_features = self.layout.num_features_of_shard[self.rank]
        num_bags = num_features * num_samples
        lengths = message[: 4 * num_bags].view(np.int32)
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        num_ids = int(offsets[-1])
        start = 4 * num_bags
        end = start + num_ids * np.dtype(self.id_type).itemsize
        # bytes are copied, as they may lie unaligned
        rows = np.frombuffer(message[start:end].tobytes(), self.id_type).astype(np.int64)
        scale = np.frombuffer(message[end:].tobytes(), np.float32) if scaled else NO_SCALE
        one_hot = num_ids == num_bags and bool((lengths == 1).all())
        return BatchIds(
            rows, offsets, scale, one_hot, max(1, num_features), self.layout.readers.shares_tables
        )


class PartialSumLane(PooledLane):
    """Each shard pools what it has of a bag.

    The reader adds the parts in the order of shards: a reduce-scatter of bags.

    Fewer bytes than rows where a bag holds more distinct rows than its table has shards. The sums
    are those of rows that travel but for rounding, as they are added in another order. The gradient
    of a bag goes to every shard of its table.
    """

    def joined(self, fetched: Records, num_samples: int, room_BS: Tensor | None) -> Tensor:
        """See :class:`PooledLane`; adds what the owners of a table have."""
        assert room_BS is not None, "see room_for"
        is_first = set[int]()
        for columns, vectors in self.by_reader(torch.from_numpy(fetched), num_samples):
            if columns.start in is_first:
                room_BS[:, columns] += vectors
            else:
                room_BS[:, columns] = vectors
                is_first.add(columns.start)
        return room_BS

    def by_reader(self, vectors: Tensor, num_samples: int) -> Iterator[tuple[slice, Tensor]]:
        """See :class:`PooledLane`; gives a reader once for each shard of its table."""
        layout = self.layout
        columns = self.columns
        assert columns is not None, "owners pool"
        for part, readers in zip(
            vectors.split(self.bags_of(num_samples)), layout.readers_of_shard, strict=True
        ):
            of_readers = part.view(num_samples, len(readers), layout.width).unbind(1)
            for reader, of_bags in zip(readers, of_readers, strict=True):
                first = int(columns.first[reader])
                yield slice(first, first + layout.width), of_bags

    def _message(self, owner: int, addresses: Ints, offsets: Ints, scale: Records) -> Bytes:
        start, end = self.layout.bounds[owner : owner + 2]
        chosen = np.flatnonzero((addresses >= start) & (addresses < end))
        bags = np.searchsorted(offsets, chosen, side="right") - 1
        lengths = np.bincount(bags, minlength=len(offsets) - 1).reshape(
            len(self.layout.features), -1
        )
        own = lengths[list(self.layout.readers_of_shard[owner])].reshape(-1).astype(np.int32)
        rows = (addresses[chosen] - start).astype(self.id_type)
        return _packed(own, rows, scale[chosen] if len(scale) else NO_SCALE)


def _packed(lengths: NDArray[np.int32], rows: NDArray[np.signedinteger], scale: Records) -> Bytes:
    return np.concatenate([part.view(np.uint8) for part in (lengths, rows, scale)])
