"""Carries out the oracle's plans: rows travel between ranks and servers, gradients to the owners, updates are applied.

Everything here runs on the communication thread, on all ranks in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pibroch.embedding import MemoryShard, SparseOptimizer
from pibroch.embedding.rows import NO_SCALE, rising, update_rows
from pibroch.exchange.wire import Wire
from pibroch.kernels.pack import numba as packing
from pibroch.kernels.scatter_update.numba import Grouped
from pibroch.kernels.window.rules import Gradients, Ints, Travel
from pibroch.observability.trace import span
from pibroch.servers.client import Homes, Parcel

Records = NDArray[np.float32]
NOBODY = -1
ROUND_BYTES = 16 << 20


@dataclass(slots=True)
class Purposes:
    """Bytes that this rank sent, by purpose."""

    sent: dict[str, int] = field(default_factory=dict)

    def add(self, purpose: str, num_bytes: int) -> None:
        """Count."""
        self.sent[purpose] = self.sent.get(purpose, 0) + num_bytes


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
        self, shard: MemoryShard, bounds: Ints, optimizer: SparseOptimizer, wire: Wire, homes: Homes | None = None
    ) -> None:
        self.shard, self.bounds, self.optimizer, self.wire, self.homes = shard, bounds, optimizer, wire, homes
        self.channel, self.num_home = wire.channel, len(shard.records)
        self.purposes = Purposes()
        self._row_of_slot = np.full(len(shard.space) - self.num_home, NOBODY, np.int64)

    def carry(self, travels: dict[str, Travel]) -> None:
        """Send the rows that leave, receive those that come: travels by purpose, in one message to each rank."""
        records, dim = self.shard.space, self.shard.dim
        widths = np.array([records.shape[1], dim])
        travel = reduce(merged, travels.values())
        going, coming = widths @ travel.counts[:2], widths @ travel.counts[2:]
        message, came = np.empty(int(going.sum()), np.float32), np.empty(int(coming.sum()), np.float32)
        packing.pack(records, travel.records_out, travel.weights_out, travel.counts[:2], dim, message)
        with span(f"carry {', '.join(travels)}"):
            self._swap(travels, travel, message, came, widths)
        left = travel.records_out[travel.records_out >= self.num_home] - self.num_home
        self._row_of_slot[left] = NOBODY
        packing.unpack(came, travel.records_in, travel.weights_in, travel.counts[2:], dim, records)
        in_slots = travel.records_in >= self.num_home
        self._row_of_slot[travel.records_in[in_slots] - self.num_home] = travel.rows_in[in_slots]
        self._touch(travel.records_in[~in_slots])

    def _swap(self, travels: dict[str, Travel], travel: Travel, message: Records, came: Records, widths: Ints) -> None:
        """Send a message's parts to ranks and servers, and fill ``came`` with theirs."""
        size, before = self.channel.ranks.world_size, self.wire.sent
        spans = (travel.counts.reshape(2, 2, -1) * widths[:, None]).transpose(0, 2, 1)
        out, into = spans[:, :size].sum((1, 2)).tolist()
        answers = [] if self.homes is None else self._visit(self.homes, travel, message[out:])
        going, coming = spans[:, :size].tolist()
        self.wire.carry_mixed(message[:out], going, came[:into], coming)
        if self.homes is not None:
            self.homes.collect(answers, spans[1, size:].sum(1).tolist(), came[into:])
        self._count(travels, self.wire.sent - before, widths)

    def _visit(self, homes: Homes, travel: Travel, records: Records) -> list[torch.futures.Future[Any]]:
        """The servers' part of a message."""
        size = self.channel.ranks.world_size
        first, counts = travel.counts[:, :size].sum(1), travel.counts[:, size:]
        leaving = self._row_of_slot[travel.records_out[first[0] :] - self.num_home]
        whole, lent = Parcel(travel.rows_in[first[2] :], counts[2]), Parcel(travel.lent_in[first[3] :], counts[3])
        return homes.exchange(Parcel(leaving, counts[0]), records, whole, lent)

    def _count(self, travels: dict[str, Travel], sent: int, widths: Ints) -> None:
        """Add the bytes that went to other ranks, shared by what they were before compression, and all traffic with servers."""
        size = self.channel.ranks.world_size
        shares = [
            int((widths * (4, self.wire.dtype.itemsize) @ each.counts[:2, :size]).sum()) for each in travels.values()
        ]
        for (purpose, each), share in zip(travels.items(), shares, strict=True):
            num_bytes = round(sent * share / max(1, sum(shares)))
            if self.homes is not None:
                counts = each.counts[:, size:]
                num_bytes += 4 * int((widths @ (counts[:2] + counts[2:])).sum()) + self.homes.num_row_bytes(
                    int(counts.sum())
                )
            self.purposes.add(purpose, num_bytes)

    def update(
        self, plan: Gradients, gradients: Records, num_sums: int, learning_rate: float, step: int, purpose: str
    ) -> None:
        """Bring gradients to the owners, and update what is owned here.

        Args:
            plan: what goes where.
            gradients: ``[sums and received ones, D]``: this rank's sums, then room for what comes.
            num_sums: number of the first gradient that comes now.
            learning_rate: of the step.
            step: number of this update, from 1.
            purpose: under which bytes are counted.
        """
        sent, before = gradients[plan.given], self.wire.sent
        room = torch.from_numpy(gradients[num_sums : num_sums + int(plan.counts[1].sum())])
        with span(f"{purpose} gradients"):
            going, coming = plan.counts[:, : self.channel.ranks.world_size].tolist()
            self.wire.carry(torch.from_numpy(sent), going, coming, room)
        self.purposes.add(purpose, self.wire.sent - before)
        self.apply(plan, gradients, learning_rate, step, purpose)

    def apply(self, plan: Gradients, gradients: Records, learning_rate: float, step: int, name: str) -> None:
        """Update what is owned here by gradients that are here."""
        grouped = Grouped(plan.places, plan.segments, rising(len(plan.source)), plan.source, NO_SCALE)
        hyper = self.optimizer.hyper(learning_rate, step)
        with span(f"{name} updates"):
            update_rows(self.shard, self.optimizer, grouped, gradients, hyper, step)

    def write_home(self) -> None:
        """Write the records in all ranks' slots to their homes; they stay in the slots as well."""
        channel = self.channel
        slots = np.flatnonzero(self._row_of_slot != NOBODY)
        slots = slots[np.argsort(self._row_of_slot[slots], kind="stable")]
        rows = self._row_of_slot[slots]
        if self.homes is not None:
            self._write_to_servers(self.homes, slots, rows)
            return
        going = np.diff(np.searchsorted(rows, self.bounds))
        coming = channel.exchange_counts(torch.from_numpy(going).view(-1, 1)).flatten().tolist()
        came_rows = channel.all_to_all(torch.from_numpy(rows), going.tolist(), coming).numpy()
        records = torch.from_numpy(self.shard.space[slots + self.num_home])
        came = channel.all_to_all(records, going.tolist(), coming).numpy()
        self.purposes.add("write back", int(records.nbytes + rows.nbytes))
        places = came_rows - self.bounds[channel.ranks.rank]
        self.shard.records[places] = came
        self._touch(places)

    def _write_to_servers(self, homes: Homes, slots: Ints, rows: Ints) -> None:
        """In as many rounds as the fullest cache needs: servers keep a round in memory until all ranks' part is there."""
        records = self.shard.space
        rows_per_round = max(1, ROUND_BYTES // (4 * records.shape[1]))
        num_rounds = max(self.channel.gather(-(-len(rows) // rows_per_round)))
        for first in range(0, num_rounds * rows_per_round, rows_per_round):
            part = slice(first, first + rows_per_round)
            brought, nothing = records[slots[part] + self.num_home].ravel(), homes.no_rows()
            homes.exchange(homes.parcel(rows[part]), brought, nothing, nothing)
        num_bytes = 4 * records.shape[1] * len(rows)
        self.purposes.add("write back", num_bytes + homes.num_row_bytes(len(rows)))

    def clear(self) -> None:
        """Forget what is in the slots."""
        self._row_of_slot[:] = NOBODY

    def _touch(self, places: Ints) -> None:
        if self.shard.touched is not None:
            self.shard.touched[places] = True


def arrivals(travel: Travel | None) -> int:
    """How many records and weights come to this rank."""
    return 0 if travel is None else int(travel.counts[2:].sum())


def merged(first: Travel, second: Travel) -> Travel:
    """Both in one message: for each rank the rows of the first, then those of the second."""

    def join(kind: int, one: Ints, other: Ints) -> Ints:
        ends, other_ends = np.cumsum(first.counts[kind])[:-1], np.cumsum(second.counts[kind])[:-1]
        pairs = zip(np.split(one, ends), np.split(other, other_ends), strict=True)
        return np.concatenate([part for pair in pairs for part in pair])

    return Travel(
        join(0, first.records_out, second.records_out), join(1, first.weights_out, second.weights_out),
        join(2, first.records_in, second.records_in), join(3, first.weights_in, second.weights_in),
        first.counts + second.counts, join(2, first.rows_in, second.rows_in), join(3, first.lent_in, second.lent_in),
    )  # fmt: skip
