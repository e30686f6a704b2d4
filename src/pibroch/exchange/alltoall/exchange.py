"""When the messages of a step are sent: in four a lane, counts and ids go out, rows come back, gradients go out.

Ids of the next batch travel while the current one computes; its rows are fetched as soon as the gradients before them have
been applied, beside the rest of the backward pass, the dense optimizer and whatever the model computes before it asks for
its embeddings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from pibroch.collectives import Channel
from pibroch.data import JaggedBatch
from pibroch.embedding import RowSpace
from pibroch.errors import DataError
from pibroch.exchange.agreement import and_then_fillers
from pibroch.exchange.alltoall.lane import Lane, Route
from pibroch.exchange.base import Exchange
from pibroch.kernels.arrays import Records

Routes = list[Route]


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch, or a filler, on its way through the exchange; ``rows`` are under way once they were asked for."""

    batch: JaggedBatch
    is_real: bool
    routes: Future[Routes]
    rows: Future[list[Records]] | None = None


class AllToAllExchange(Exchange[Routes]):
    """Every rank holds a shard, and every rank takes part in every lookup, with an empty batch when it has no samples.

    Placement changes no bit of the results, but for column-wise tables under row-wise optimizers, which agree within rounding.

    Args:
        row_space: of all tables.
        lanes: with all blocks of all tables.
        channel: between the ranks, for this exchange alone.
    """

    def __init__(self, row_space: RowSpace, lanes: Sequence[Lane], channel: Channel) -> None:
        self.row_space, self._lanes = row_space, lanes
        self._ranks, self._communication = channel.ranks, channel.ranks.communication
        self.shards = [lane.shard for lane in lanes]
        self.reads_ahead = channel.ranks.world_size > 1
        self._announced: list[PendingBatch] = []

    def feed(self, batches: Iterable[JaggedBatch], trains: bool) -> Iterator[JaggedBatch]:
        """See :class:`Exchange`; reads one batch further than it hands out and sends that one's ids.

        A rank that runs out of batches gets empty ones until all have: nobody waits for a rank that has stopped.
        """
        mine: list[PendingBatch] = []
        before: PendingBatch | None = None
        try:
            for batch, is_real in and_then_fillers(batches, self.row_space.features):
                if before is not None and not before.is_real and not _is_real_elsewhere(before):
                    return
                pending = self._announce(batch, is_real)
                mine = [*mine[-1:], pending]
                self._announced.append(pending)
                if before is not None:
                    yield before.batch
                before = pending
        finally:
            self._announced = [pending for pending in self._announced if pending not in mine]

    def lookup(self, batch: JaggedBatch, trains: bool, averaged_at: int | None = None) -> tuple[Tensor, Routes]:
        """See :class:`Exchange`."""
        pending = next((pending for pending in self._announced if pending.batch is batch), None)
        if pending is None:
            pending = self._announce(batch, True)
        else:
            self._announced.remove(pending)
        if pending.rows is None or averaged_at is not None:
            pending.rows = self._fetch(pending, averaged_at)
        with self._ranks.waiting():
            routes, rows = pending.routes.result(), pending.rows.result()
        pooled = [route.pool(fetched) for route, fetched in zip(routes, rows, strict=True)]
        return self.assemble(batch.batch_size, pooled), routes

    def update(self, handle: Routes, gradient_BFD: Tensor, learning_rate: float, step: int) -> None:
        """See :class:`Exchange`; returns when this rank's gradients are summed, the rest goes on beside the caller."""
        parts = zip(handle, self.split(gradient_BFD), strict=True)
        sums = [(route, route.combine(gradient)) for route, gradient in parts]

        def deliver() -> None:
            for route, totals in sums:
                route.update(totals, learning_rate, step)

        self._communication.submit(deliver)
        self.forget()

    def route(self, batch: JaggedBatch) -> Routes:
        """A handle for the update of a batch that was looked up otherwise; blocks. Every rank calls it."""
        return self._announce(batch, True).routes.result()

    def fetch_next(self) -> None:
        """See :class:`Exchange`."""
        if self._announced and self._announced[0].rows is None:
            self._announced[0].rows = self._fetch(self._announced[0], None)

    def flush(self) -> None:
        """See :class:`Exchange`."""
        self._communication.flush()

    def forget(self) -> None:
        """See :class:`Exchange`."""
        for pending in self._announced:
            pending.rows = None

    def _announce(self, batch: JaggedBatch, is_real: bool) -> PendingBatch:
        routes = self._communication.submit(lambda: [lane.route(batch, is_real) for lane in self._lanes])
        return PendingBatch(batch, is_real, routes)

    def _fetch(self, pending: PendingBatch, averaged_at: int | None) -> Future[list[Records]]:
        return self._communication.submit(lambda: [route.fetch(averaged_at) for route in pending.routes.result()])

    def assemble(self, num_samples: int, pooled: Sequence[Tensor]) -> Tensor:
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

    def split(self, gradient_BFD: Tensor) -> list[Tensor]:
        """The inverse of :meth:`assemble`."""
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


def _is_real_elsewhere(filler: PendingBatch) -> bool:
    try:
        return filler.routes.result()[0].is_real
    except DataError:  # a bad batch is no filler; the lookup says what is wrong
        return True
