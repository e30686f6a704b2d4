"""Carries out the oracle's plans.

Rows travel between ranks and servers, gradients to the owners, updates are applied.

The communication thread runs this. Methods that send are generators of messages, those of all lanes
run together, see :mod:`pibroch.exchange.messages`. Beside it the training thread calls
:meth:`Carrier.read` and :meth:`Carrier.sums`, and the planner thread :meth:`Carrier.apply` for rows
that this rank alone touched. By the plan no row of these is one that the communication thread
writes at the time, so there is no lock.

A place below ``num_home`` is a row of this rank's own shard, one from there on a slot. A message to
a rank is flat: whole records that go there for good, then weights borrowed for one step. The
``counts`` of a transfer have four rows (records out, weights out, records in, weights in) and a
column for each rank, then for each server.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from pibroch.embedding.rows import NO_SCALE, rising, update_rows
from pibroch.exchange.alltoall.row_lane import RowLane
from pibroch.exchange.fresh_rows import FreshRecords
from pibroch.exchange.lookahead.announcement import BytesByPurpose
from pibroch.exchange.lookahead.kept_slots import KeptSlots
from pibroch.exchange.lookahead.oracle import StepPlan
from pibroch.exchange.lookahead.oracle.kernels.window import Gradients, Transfer
from pibroch.exchange.messages import Counts, Messages, MixedRows, Rows, Values
from pibroch.kernels import pack as packing
from pibroch.kernels import scatter_update as updating
from pibroch.kernels.arrays import Ints, Records, Stored
from pibroch.kernels.scatter_update import Grouped, Hyper
from pibroch.observability.trace import span

if TYPE_CHECKING:
    from pibroch.exchange.lookahead.server_homes import ServerHomes

NOBODY = -1
_NOTHING = np.empty(0, np.int64), np.empty((0, 0), np.float32)


class Carrier:
    """One rank's records of a lane, at home and in slots, and the way to those of other ranks.

    Args:
        lane: with spare rows for the slots behind its home.
        purposes: counts bytes, of all lanes.
        homes: the homes, where these are on servers.

    Attributes:
        returned: rows, and records of them that were in slots when a run was cut off, see
            :meth:`bring_home`.
    """

    def __init__(
        self, lane: RowLane, purposes: BytesByPurpose, homes: ServerHomes | None = None
    ) -> None:
        self.shard = lane.shard
        self.wire = lane.wire
        self._bounds = lane.layout.bounds
        self._optimizer = lane.optimizer
        self.is_frozen = lane.is_frozen
        self.purposes = purposes
        self._homes = homes
        self._channel = lane.channel
        self._num_home = len(lane.shard.records)
        self._num_ranks = lane.world_size
        # as far as slots were ever used: the lowest are taken first
        self._row_of_slot = np.empty(0, np.int64)
        self.returned = _NOTHING

    @property
    def num_cached(self) -> int:
        """Slots that hold a row's record."""
        return int(np.count_nonzero(self._row_of_slot != NOBODY))

    def read(
        self, places: Ints, row_of_position: NDArray[np.int32]
    ) -> tuple[Stored, NDArray[np.signedinteger]]:
        """Records, and which one each position of a batch reads.

        Weights are rounded to the wire's type wherever the record is.
        """
        space = self.shard.stored_space
        dim = self.shard.dim
        if self.wire.is_exact:
            return space, places[row_of_position]
        rows = np.empty((len(places), dim), np.float32)
        packing.copy_out(space, places, dim, rows.reshape(-1), 0, 0, len(places))
        return self.wire.rounded(rows), row_of_position

    def show(self, fresh: FreshRecords, rows: Ints, places: Ints) -> None:
        """Begin rows anew where this rank reads them.

        Args:
            fresh: rows of the lane that begin anew with the step.
            rows: addresses that this rank reads in it.
            places: of these.
        """
        fresh.write(self.shard.space, rows, places)

    def begin(self, fresh: FreshRecords | None) -> Messages[None]:
        """Begin rows of the lane anew wherever they lie; every rank calls it."""
        rows = np.empty(0, np.int64)
        records = self.shard.space[:0]
        if fresh is not None:
            fresh.write(self.shard.space, *self.cached())
            if self._channel.ranks.rank == 0:
                rows = fresh.rows
                records = fresh.records()
        yield from self._write(rows, records, np.arange(len(rows)))

    def sums(self, grouped: Grouped, gradients: Records, share: float, plan: StepPlan) -> Records:
        """This rank's weighted sum of gradients for each distinct row, ``[rows, D]``.

        Behind the sums there is room for those that other ranks send in this step.
        """
        if self.is_frozen:
            return gradients[:0]
        num_received = sum(int(part.counts[1].sum()) for part in (plan.critical, plan.deferred))
        num_sums = len(grouped.rows)
        room = np.empty((num_sums + num_received, self.shard.dim), np.float32)
        updating.sum_gradients(gradients, grouped, share, room[:num_sums])
        if not self.wire.is_exact:
            room[:num_sums] = self.wire.rounded(room[:num_sums])
        return room

    def settle(
        self,
        plan: StepPlan,
        gradients: Records,
        hyper: Hyper | None,
        step: int,
        fresh: FreshRecords | None,
    ) -> Messages[None]:
        """The deferred updates of a step, then evictions, and rows for the step after next."""
        first = len(gradients) - int(plan.deferred.counts[1].sum())
        yield from self.update(plan.deferred, gradients, first, hyper, step, "deferred", fresh)
        for transfer in plan.evicted[:-1]:
            yield from self.carry({"evict": transfer})
        last = {"evict": plan.evicted[-1]}
        yield from self.carry(last if plan.prefetch is None else last | {"prefetch": plan.prefetch})
        if self._homes is not None:
            self._homes.early.ask(plan.number, plan.early)

    def carry(self, transfers: dict[str, Transfer]) -> Messages[None]:
        """Send the rows that leave, receive those that arrive.

        All transfers, by purpose, go in one message to each rank.
        """
        records = self.shard.space
        stored = self.shard.stored_space
        dim = self.shard.dim
        num_home = self._num_home
        widths = np.array([records.shape[1], dim])
        transfer = reduce(merged, transfers.values())
        send_counts = widths @ transfer.counts[:2]
        receive_counts = widths @ transfer.counts[2:]
        sent = np.empty(int(send_counts.sum()), np.float32)
        received = np.empty(int(receive_counts.sum()), np.float32)
        packing.pack(
            records,
            stored,
            transfer.records_out,
            transfer.weights_out,
            transfer.counts[:2],
            dim,
            sent,
        )
        yield from self._swap(transfers, transfer, sent, received, widths)
        left = transfer.records_out[transfer.records_out >= num_home] - num_home
        self._row_of_slot[left] = NOBODY
        packing.unpack(
            received,
            transfer.records_in,
            transfer.weights_in,
            transfer.counts[2:],
            dim,
            records,
            stored,
        )
        in_slots = transfer.records_in >= num_home
        self._note_rows(transfer.records_in[in_slots] - num_home, transfer.rows_in[in_slots])
        self.shard.mark(transfer.records_in[~in_slots])

    def _note_rows(self, slots: Ints, rows: Ints) -> None:
        """Note that the records of ``rows`` are in ``slots`` now."""
        size = len(self._row_of_slot)
        most = int(slots.max(initial=-1)) + 1
        if most > size:
            more = min(max(most, 2 * size), len(self.shard.space) - self._num_home) - size
            self._row_of_slot = np.concatenate([self._row_of_slot, np.full(more, NOBODY, np.int64)])
        self._row_of_slot[slots] = rows

    def _swap(
        self,
        transfers: dict[str, Transfer],
        transfer: Transfer,
        sent: Records,
        received: Records,
        widths: Ints,
    ) -> Messages[None]:
        """Send the parts of ``sent`` to ranks and servers, and fill ``received`` from them.

        In both the servers' parts are at the end.
        """
        size = self._num_ranks
        # [out or in, peer, kind]
        spans = (transfer.counts.reshape(2, 2, -1) * widths[:, None]).transpose(0, 2, 1)
        out, into = spans[:, :size].sum((1, 2)).tolist()
        answers = None
        if self._homes is not None:
            first = int(transfer.counts[0, :size].sum())
            leaving = self._row_of_slot[transfer.records_out[first:] - self._num_home]
            answers = self._homes.begin(transfer, leaving, sent[out:])
        send_spans, receive_spans = spans[:, :size].tolist()
        answer = yield MixedRows(sent[:out], send_spans, received[:into], receive_spans)
        if self._homes is not None and answers is not None:
            self._homes.collect(answers, received[into:])
        self._count(transfers, answer.sent, widths)

    def _count(self, transfers: dict[str, Transfer], sent: int, widths: Ints) -> None:
        """Count the bytes sent to other ranks, and all traffic with servers.

        Bytes to ranks are shared among purposes by what they were before compression.
        """
        itemsizes = (4, self.wire.dtype.itemsize)
        shares = [
            int((widths * itemsizes @ each.counts[:2, : self._num_ranks]).sum())
            for each in transfers.values()
        ]
        for (purpose, each), share in zip(transfers.items(), shares, strict=True):
            num_bytes = round(sent * share / max(1, sum(shares)))
            if self._homes is not None:
                num_bytes += self._homes.num_bytes(each, widths)
            self.purposes.add(purpose, num_bytes)

    def update(
        self,
        plan: Gradients,
        gradients: Records,
        num_sums: int,
        hyper: Hyper | None,
        step: int,
        purpose: str,
        fresh: FreshRecords | None,
    ) -> Messages[None]:
        """Bring gradients to the owners, and update what is owned here.

        Args:
            plan: what goes where.
            gradients: ``[sums and received ones, D]``: this rank's sums, then room for the others'.
            num_sums: where in ``gradients`` those received now begin.
            hyper: of the step; ``None`` to update nothing.
            step: number of the update, from 1.
            purpose: under which bytes are counted.
            fresh: rows of the lane that begin anew with the step.
        """
        if self.is_frozen:
            return
        sent = torch.from_numpy(gradients[plan.given])
        room = torch.from_numpy(gradients[num_sums : num_sums + int(plan.counts[1].sum())])
        send_counts, receive_counts = plan.counts[:, : self._num_ranks].tolist()
        answer = yield Rows(sent, send_counts, receive_counts, room)
        self.purposes.add(purpose, answer.sent)
        self.apply(plan, gradients, hyper, step, purpose, fresh)

    def apply(
        self,
        plan: Gradients,
        gradients: Records,
        hyper: Hyper | None,
        step: int,
        name: str,
        fresh: FreshRecords | None,
    ) -> None:
        """Update what is owned here by gradients that are here; without ``hyper`` nothing.

        Rows that begin anew with the step do so first.
        """
        if self.is_frozen:
            return
        if fresh is not None:
            begun = fresh.write(self.shard.space, self._rows_at(plan.places), plan.places)
            self.shard.mark(begun)
        if hyper is None:
            return
        grouped = Grouped(
            plan.places, plan.segments, rising(len(plan.source)), plan.source, NO_SCALE
        )
        with span(f"{name} updates"):
            update_rows(self.shard, self._optimizer, grouped, gradients, hyper, step)

    def _rows_at(self, places: Ints) -> Ints:
        """The addresses of the rows whose records are at some places."""
        rows = places + int(self._bounds[self._channel.ranks.rank])
        in_slots = np.flatnonzero(places >= self._num_home)
        rows[in_slots] = self._row_of_slot[places[in_slots] - self._num_home]
        return rows

    def hyper(self, learning_rate: float, step: int) -> Hyper:
        """The hyperparameters of an update."""
        return self._optimizer.hyper(learning_rate, step)

    def write_home(self) -> Messages[None]:
        """Write the records in all ranks' slots to their homes; they stay in the slots as well."""
        rows, slots = self.cached()
        yield from self._write(rows, self.shard.space, slots)

    def bring_home(self) -> Messages[None]:
        """Write all ranks' ``returned`` records to their homes."""
        rows, records = self.returned
        self.returned = _NOTHING
        yield from self._write(rows, records, np.arange(len(rows)))

    @property
    def space(self) -> Records:
        """Records of all places."""
        return self.shard.space

    def cached(self) -> tuple[Ints, Ints]:
        """The rows whose records are in slots, and the places of these."""
        slots = np.flatnonzero(self._row_of_slot != NOBODY)
        return self._row_of_slot[slots], slots + self._num_home

    def kept(self, key: str, tag: str) -> KeptSlots | None:
        """The records in slots, kept in memory that outlives this process; ``None`` without any."""
        return KeptSlots.open(self, key, tag, int(self._bounds[-1]), self.shard.space.shape[1])

    def _write(self, rows: Ints, records: Records, places: Ints) -> Messages[None]:
        """Write records of some rows, by their places among ``records``, to their homes."""
        channel = self._channel
        order = np.argsort(rows, kind="stable")
        rows = rows[order]
        places = places[order]
        if self._homes is not None:
            self.purposes.add("write back", self._homes.write(rows, records, places))
            return
        send_counts = np.diff(np.searchsorted(rows, self._bounds))
        counted = yield Counts(torch.from_numpy(send_counts).view(-1, 1))
        receive_counts = counted.tensor.flatten().tolist()
        sent_rows = yield Values(torch.from_numpy(rows), send_counts.tolist(), receive_counts)
        their_rows = sent_rows.tensor.numpy()
        sent = torch.from_numpy(records[places].reshape(len(rows), self.shard.space.shape[1]))
        received = yield Values(sent, send_counts.tolist(), receive_counts)
        their_records = received.tensor.numpy()
        self.purposes.add("write back", int(sent.nbytes + rows.nbytes))
        homes = their_rows - self._bounds[channel.ranks.rank]
        self.shard.records[homes] = their_records
        self.shard.mark(homes)

    def flush(self) -> None:
        """Wait until servers have all that was sent to them."""
        if self._homes is not None:
            self._homes.flush()

    def clear(self) -> None:
        """Forget what is in the slots, and early records on their way to them."""
        self._row_of_slot[:] = NOBODY
        if self._homes is not None:
            self._homes.early.forget()


def arrivals(transfer: Transfer | None) -> int:
    """How many records and weights come to this rank."""
    return 0 if transfer is None else int(transfer.counts[2:].sum())


def merged(first: Transfer, second: Transfer) -> Transfer:
    """Both in one message: for each rank the rows of the first, then those of the second."""
    if not first.counts.any():
        return second

    def join(kind: int, one: Ints, other: Ints) -> Ints:
        ends = np.cumsum(first.counts[kind])[:-1]
        other_ends = np.cumsum(second.counts[kind])[:-1]
        pairs = zip(np.split(one, ends), np.split(other, other_ends), strict=True)
        return np.concatenate([part for pair in pairs for part in pair])

    return Transfer(
        join(0, first.records_out, second.records_out),
        join(1, first.weights_out, second.weights_out),
        join(2, first.records_in, second.records_in),
        join(3, first.weights_in, second.weights_in),
        first.counts + second.counts,
        join(2, first.rows_in, second.rows_in),
        join(3, first.borrowed_rows_in, second.borrowed_rows_in),
    )
