"""Carries out the oracle's plans: rows travel between ranks and servers, gradients to the owners, updates are applied.

Everything here runs on the communication thread, on all ranks in the same order, but for :meth:`Carrier.apply`, which the
planner thread calls for rows that this rank alone touched: none of those that another update is about.

A place below ``num_home`` is a row of this rank's own shard, one from there on a slot. A message to a rank is flat: whole
records that go there for good, then weights lent for one step. A transfer's ``counts`` have four rows (records out, weights
out, records in, weights in) and a column for each rank, then for each server.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
import torch

from pibroch.embedding import MemoryShard, SparseOptimizer
from pibroch.embedding.rows import NO_SCALE, rising, update_rows
from pibroch.exchange.lookahead.announcement import BytesByPurpose
from pibroch.exchange.lookahead.step import Rates
from pibroch.exchange.wire import RowWire
from pibroch.kernels.arrays import Ints, Records
from pibroch.kernels.pack import numba as packing
from pibroch.kernels.scatter_update.numba import Grouped
from pibroch.kernels.window.rules import Gradients, Transfer
from pibroch.observability.trace import span

if TYPE_CHECKING:
    from pibroch.exchange.lookahead.server_homes import ServerHomes

NOBODY = -1


class Carrier:
    """One rank's records, at home and in slots, and the ways to the others'.

    Args:
        shard: the home, with spare rows for the slots.
        bounds: int64 ``[P + 1]``, the first address of each rank's home, then of each server's.
        optimizer: of all rows.
        wire: to the other ranks.
        homes: on servers, if they are there.
    """

    def __init__(
        self,
        shard: MemoryShard,
        bounds: Ints,
        optimizer: SparseOptimizer,
        wire: RowWire,
        homes: ServerHomes | None = None,
    ) -> None:
        self.shard, self.wire, self._bounds, self._optimizer, self._homes = shard, wire, bounds, optimizer, homes
        self._channel, self._num_home = wire.channel, len(shard.records)
        self._num_ranks = wire.channel.ranks.world_size
        self.purposes = BytesByPurpose()
        self._row_of_slot = np.full(len(shard.space) - self._num_home, NOBODY, np.int64)

    @property
    def num_cached(self) -> int:
        """Slots that hold a row's record."""
        return int(np.count_nonzero(self._row_of_slot != NOBODY))

    def carry(self, transfers: dict[str, Transfer]) -> None:
        """Send the rows that leave, receive those that come: transfers by purpose, in one message to each rank."""
        records, dim, num_home = self.shard.space, self.shard.dim, self._num_home
        widths = np.array([records.shape[1], dim])
        transfer = reduce(merged, transfers.values())
        send_counts, receive_counts = widths @ transfer.counts[:2], widths @ transfer.counts[2:]
        sent, received = np.empty(int(send_counts.sum()), np.float32), np.empty(int(receive_counts.sum()), np.float32)
        packing.pack(records, transfer.records_out, transfer.weights_out, transfer.counts[:2], dim, sent)
        with span(f"carry {', '.join(transfers)}"):
            self._swap(transfers, transfer, sent, received, widths)
        left = transfer.records_out[transfer.records_out >= num_home] - num_home
        self._row_of_slot[left] = NOBODY
        packing.unpack(received, transfer.records_in, transfer.weights_in, transfer.counts[2:], dim, records)
        in_slots = transfer.records_in >= num_home
        self._row_of_slot[transfer.records_in[in_slots] - num_home] = transfer.rows_in[in_slots]
        self._touch(transfer.records_in[~in_slots])

    def _swap(
        self, transfers: dict[str, Transfer], transfer: Transfer, sent: Records, received: Records, widths: Ints
    ) -> None:
        """Send a message's parts to ranks and servers, and fill ``received`` with theirs: servers have the end of both."""
        size, before = self._num_ranks, self.wire.sent
        spans = (transfer.counts.reshape(2, 2, -1) * widths[:, None]).transpose(0, 2, 1)  # [out or in, peer, kind]
        out, into = spans[:, :size].sum((1, 2)).tolist()
        answers = None
        if self._homes is not None:
            first = int(transfer.counts[0, :size].sum())
            leaving = self._row_of_slot[transfer.records_out[first:] - self._num_home]
            answers = self._homes.begin(transfer, leaving, sent[out:])
        send_spans, receive_spans = spans[:, :size].tolist()
        self.wire.carry_mixed(sent[:out], send_spans, received[:into], receive_spans)
        if self._homes is not None and answers is not None:
            self._homes.collect(answers, spans[1, size:].sum(1).tolist(), received[into:])
        self._count(transfers, self.wire.sent - before, widths)

    def _count(self, transfers: dict[str, Transfer], sent: int, widths: Ints) -> None:
        """Add the bytes that went to other ranks, shared by what they were before compression, and all traffic with servers."""
        itemsizes = (4, self.wire.dtype.itemsize)
        shares = [int((widths * itemsizes @ each.counts[:2, : self._num_ranks]).sum()) for each in transfers.values()]
        for (purpose, each), share in zip(transfers.items(), shares, strict=True):
            num_bytes = round(sent * share / max(1, sum(shares)))
            if self._homes is not None:
                num_bytes += self._homes.num_bytes(each, widths)
            self.purposes.add(purpose, num_bytes)

    def update(self, plan: Gradients, gradients: Records, num_sums: int, rates: Rates, purpose: str) -> None:
        """Bring gradients to the owners, and update what is owned here.

        Args:
            plan: what goes where.
            gradients: ``[sums and received ones, D]``: this rank's sums, then room for what comes.
            num_sums: number of the first gradient that comes now.
            rates: of the step.
            purpose: under which bytes are counted.
        """
        sent, before = gradients[plan.given], self.wire.sent
        room = torch.from_numpy(gradients[num_sums : num_sums + int(plan.counts[1].sum())])
        with span(f"{purpose} gradients"):
            send_counts, receive_counts = plan.counts[:, : self._num_ranks].tolist()
            self.wire.carry(torch.from_numpy(sent), send_counts, receive_counts, room)
        self.purposes.add(purpose, self.wire.sent - before)
        self.apply(plan, gradients, rates, purpose)

    def apply(self, plan: Gradients, gradients: Records, rates: Rates, name: str) -> None:
        """Update what is owned here by gradients that are here."""
        grouped = Grouped(plan.places, plan.segments, rising(len(plan.source)), plan.source, NO_SCALE)
        hyper = self._optimizer.hyper(rates.learning_rate, rates.number)
        with span(f"{name} updates"):
            update_rows(self.shard, self._optimizer, grouped, gradients, hyper, rates.number)

    def write_home(self) -> None:
        """Write the records in all ranks' slots to their homes; they stay in the slots as well."""
        channel = self._channel
        slots = np.flatnonzero(self._row_of_slot != NOBODY)
        slots = slots[np.argsort(self._row_of_slot[slots], kind="stable")]
        rows, slots = self._row_of_slot[slots], slots + self._num_home
        if self._homes is not None:
            self.purposes.add("write back", self._homes.write(rows, self.shard.space, slots))
            return
        send_counts = np.diff(np.searchsorted(rows, self._bounds))
        receive_counts = channel.exchange_counts(torch.from_numpy(send_counts).view(-1, 1)).flatten().tolist()
        their_rows = channel.all_to_all(torch.from_numpy(rows), send_counts.tolist(), receive_counts).numpy()
        records = torch.from_numpy(self.shard.space[slots])
        theirs = channel.all_to_all(records, send_counts.tolist(), receive_counts).numpy()
        self.purposes.add("write back", int(records.nbytes + rows.nbytes))
        places = their_rows - self._bounds[channel.ranks.rank]
        self.shard.records[places] = theirs
        self._touch(places)

    def flush(self) -> None:
        """Wait until servers have all that was sent to them."""
        if self._homes is not None:
            self._homes.flush()

    def clear(self) -> None:
        """Forget what is in the slots."""
        self._row_of_slot[:] = NOBODY

    def count_plans(self, purpose: str, num_bytes: int) -> None:
        """Count what travels to and from an oracle, which keeps no account; any thread may call it."""

        def count() -> None:
            self.purposes.add(purpose, num_bytes)
            self._channel.ranks.traffic.sent += num_bytes
            self._channel.ranks.traffic.received += num_bytes

        self._channel.ranks.communication.submit(count)

    def _touch(self, places: Ints) -> None:
        if self.shard.touched is not None:
            self.shard.touched[places] = True


def arrivals(transfer: Transfer | None) -> int:
    """How many records and weights come to this rank."""
    return 0 if transfer is None else int(transfer.counts[2:].sum())


def merged(first: Transfer, second: Transfer) -> Transfer:
    """Both in one message: for each rank the rows of the first, then those of the second."""

    def join(kind: int, one: Ints, other: Ints) -> Ints:
        ends, other_ends = np.cumsum(first.counts[kind])[:-1], np.cumsum(second.counts[kind])[:-1]
        pairs = zip(np.split(one, ends), np.split(other, other_ends), strict=True)
        return np.concatenate([part for pair in pairs for part in pair])

    return Transfer(
        join(0, first.records_out, second.records_out), join(1, first.weights_out, second.weights_out),
        join(2, first.records_in, second.records_in), join(3, first.weights_in, second.weights_in),
        first.counts + second.counts, join(2, first.rows_in, second.rows_in), join(3, first.lent_in, second.lent_in),
    )  # fmt: skip
