"""Synchronous hybrid parallelism: rows lie where a plan puts them and travel to the ranks whose samples need them.

A step has four messages a lane (see :mod:`pibroch.exchange.lane`): counts and ids go out, rows come back, gradients go out.
Ids of the next batch travel while the current one computes; its rows are fetched as soon as the gradients before them have
been applied, beside the rest of the backward pass, the dense optimizer and whatever the model computes before it asks for
its embeddings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.collectives import Channel, Ranks
from pibroch.data import JaggedBatch
from pibroch.embedding import MemoryShard, RowSpace, SparseOptimizer
from pibroch.errors import DataError
from pibroch.exchange.base import Exchange
from pibroch.exchange.lane import Lane
from pibroch.exchange.layout import LaneLayout, lay_out, plan_for
from pibroch.exchange.planning import check_same_options
from pibroch.exchange.pooled_lane import PooledLane
from pibroch.exchange.row_lane import RowLane
from pibroch.exchange.wire import Wire
from pibroch.planner import Plan
from pibroch.servers.views import RemoteShard

Records = NDArray[np.float32]


@dataclass(slots=True, eq=False)
class Ticket:
    """A batch, or a filler, on its way through the exchange; ``rows`` are under way once they were asked for."""

    batch: JaggedBatch
    is_real: bool
    routes: Future[list[Any]]
    rows: Future[list[Records]] | None = None


class AllToAllExchange(Exchange):
    """Every rank holds a shard, and every rank takes part in every lookup, with an empty batch when it has no samples.

    Placement changes no bit of the results, but for column-wise tables under row-wise optimizers, which agree within rounding.

    Args:
        row_space: of all tables.
        optimizer: of all tables.
        seed: of the initial weights.
        placement: a kind for all tables, kinds by table name (``""`` for those not named), or a :class:`Plan`.
        wire: type in which rows and gradients travel: ``float32`` (exact), ``bfloat16``, ``float16`` (gradients below
            6e-8 vanish).
        compress: whether they travel compressed, without loss, see :mod:`pibroch.exchange.compression`.
        channel: between the ranks, for this exchange alone; over all ranks of torch.distributed's group when absent.

    Raises:
        ConfigError: for a plan that does not fit, a wire type unknown, or ranks that want different ways of travelling.
    """

    def __init__(
        self,
        row_space: RowSpace,
        optimizer: SparseOptimizer,
        seed: int,
        *,
        placement: str | Mapping[str, str] | Plan = "row_wise",
        wire: str = "float32",
        compress: bool = False,
        channel: Channel | None = None,
    ) -> None:
        channel = Ranks.joined().open_channel() if channel is None else channel
        self.row_space = row_space
        self._channel, self._ranks, self._communication = channel, channel.ranks, channel.ranks.communication
        check_same_options(channel, {"wire": wire, "compress": compress})
        self.plan = self._plan(placement)
        layouts = lay_out(row_space, self.plan, channel.ranks.rank)
        self._wire = Wire(channel, wire, compress)
        self._lanes = [self._lane_of(layout, optimizer, seed) for layout in layouts]
        self.shards: Sequence[MemoryShard | RemoteShard] = [lane.shard for lane in self._lanes]
        self.reads_ahead = channel.ranks.world_size > 1
        self._announced: list[Ticket] = []

    def feed(self, batches: Iterable[JaggedBatch], trains: bool) -> Iterator[JaggedBatch]:
        """See :class:`Exchange`; reads one batch further than it hands out and sends that one's ids.

        A rank that runs out of batches gets empty ones until all have: nobody waits for a rank that has stopped.
        """
        mine: list[Ticket] = []
        before: Ticket | None = None
        try:
            for batch, is_real in and_then_fillers(batches, self.row_space.features):
                if before is not None and not before.is_real and not _is_real_elsewhere(before):
                    return
                ticket = self._announce(batch, is_real)
                mine = [*mine[-1:], ticket]
                self._announced.append(ticket)
                if before is not None:
                    yield before.batch
                before = ticket
        finally:
            self._announced = [ticket for ticket in self._announced if ticket not in mine]

    def lookup(self, batch: JaggedBatch, trains: bool, averaged_at: int | None = None) -> tuple[Tensor, list[Any]]:
        """See :class:`Exchange`."""
        ticket = next((ticket for ticket in self._announced if ticket.batch is batch), None)
        if ticket is None:
            ticket = self._announce(batch, True)
        else:
            self._announced.remove(ticket)
        if ticket.rows is None or averaged_at is not None:
            ticket.rows = self._fetch(ticket, averaged_at)
        with self._ranks.waiting():
            routes, rows = ticket.routes.result(), ticket.rows.result()
        ways = zip(self._lanes, routes, rows, strict=True)
        return self._assemble(batch.batch_size, [lane.pool(route, fetched) for lane, route, fetched in ways]), routes

    def update(self, looked_up: list[Any], gradient_BFD: Tensor, learning_rate: float, step: int) -> None:
        """See :class:`Exchange`; returns when this rank's gradients are summed, the rest goes on beside the caller."""
        parts = zip(self._lanes, looked_up, self._split(gradient_BFD), strict=True)
        sums = [(lane, route, lane.combine(route, gradient)) for lane, route, gradient in parts]

        def deliver() -> None:
            for lane, route, totals in sums:
                lane.update(route, totals, learning_rate, step)

        self._communication.submit(deliver)
        self._fetch_again()

    def fetch_next(self) -> None:
        """See :class:`Exchange`."""
        if self._announced and self._announced[0].rows is None:
            self._announced[0].rows = self._fetch(self._announced[0], None)

    def flush(self) -> None:
        """See :class:`Exchange`."""
        self._communication.flush()

    def forget(self) -> None:
        """See :class:`Exchange`."""
        self._fetch_again()

    def _fetch_again(self) -> None:
        for ticket in self._announced:
            ticket.rows = None

    def _plan(self, placement: str | Mapping[str, str] | Plan) -> Plan:
        """Where rows lie."""
        return plan_for(self.row_space, placement, self._ranks.world_size, "ranks")

    def _lane_of(self, layout: LaneLayout, optimizer: SparseOptimizer, seed: int) -> Lane:
        kind = PooledLane if layout.is_pooled else RowLane
        return kind(layout, optimizer, seed, self._channel, self._wire)

    def _announce(self, batch: JaggedBatch, is_real: bool) -> Ticket:
        return Ticket(
            batch, is_real, self._communication.submit(lambda: [lane.route(batch, is_real) for lane in self._lanes])
        )

    def _fetch(self, ticket: Ticket, averaged_at: int | None) -> Future[list[Records]]:
        def fetch() -> list[Records]:
            ways = zip(self._lanes, ticket.routes.result(), strict=True)
            return [lane.fetch(route, averaged_at) for lane, route in ways]

        return self._communication.submit(fetch)

    def _assemble(self, num_samples: int, pooled: list[Tensor]) -> Tensor:
        """The lanes' ``[B, F_lane, width]`` as one ``[B, F, D]``."""
        if self._is_simple:
            return pooled[0]
        space = self.row_space
        out_BFD = torch.empty(num_samples, len(space.features), space.dim)
        for lane, pooled_BFD in zip(self._lanes, pooled, strict=True):
            width = lane.layout.width
            for i, (place, first) in enumerate(zip(lane.layout.places, lane.layout.first_columns, strict=True)):
                out_BFD[:, place, first : first + width] = pooled_BFD[:, i]
        return out_BFD

    def _split(self, gradient_BFD: Tensor) -> list[Tensor]:
        """The inverse of `_assemble`."""
        if self._is_simple:
            return [gradient_BFD]
        parts = []
        for lane in self._lanes:
            width, layout = lane.layout.width, lane.layout
            blocks = zip(layout.places, layout.first_columns, strict=True)
            parts.append(torch.stack([gradient_BFD[:, p, c : c + width] for p, c in blocks], 1).contiguous())
        return parts

    @property
    def _is_simple(self) -> bool:
        """Whether one lane has all features in their order."""
        return len(self._lanes) == 1 and self._lanes[0].layout.places == tuple(range(len(self.row_space.features)))


def _is_real_elsewhere(filler: Ticket) -> bool:
    try:
        return bool(filler.routes.result()[0].is_real)
    except DataError:  # a bad batch is no filler; the lookup says what is wrong
        return True


def and_then_fillers(batches: Iterable[JaggedBatch], keys: tuple[str, ...]) -> Iterator[tuple[JaggedBatch, bool]]:
    """Batches, each with True, then without end empty ones of their kind with False."""
    width = 0
    for batch in batches:
        width = batch.dense.shape[1]
        yield batch, True
    nothing, offsets = torch.empty(0), torch.zeros(1, dtype=torch.int64)
    while True:
        yield JaggedBatch(torch.empty(0, width), keys, nothing.long(), offsets, nothing), False
