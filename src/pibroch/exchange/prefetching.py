"""Exchanges that send the next batch's ids, and fetch its rows, while the current one computes.

Ids go out as soon as a batch is read; rows are fetched as soon as the gradients before them have
been applied, beside the rest of the backward pass, the dense optimizer and whatever the model
computes before it asks for its embeddings.

The training thread calls an exchange, and submits routes, fetches and updates to the communication
thread, which runs them in that order; so rows are fetched after the update that was submitted
before, and the training thread waits only in a lookup.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from pibroch.collectives import Channel
from pibroch.data import JaggedBatch
from pibroch.errors import DataError
from pibroch.exchange.agreement import and_then_fillers
from pibroch.exchange.base import Exchange, Handle

R = TypeVar("R")
"""The routes of a batch: where its rows are."""
F = TypeVar("F")
"""The rows that were fetched for it."""


@dataclass(slots=True, eq=False)
class PendingBatch(Generic[R, F]):
    """A batch, or a filler, on its way through the exchange.

    Attributes:
        batch: this rank's part.
        is_real: unless it is a filler after this rank's last batch.
        routes: of the batch, once the communication thread has sent its ids.
        rows: fetched for it; ``None`` until that was submitted.
    """

    batch: JaggedBatch
    is_real: bool
    routes: Future[R]
    rows: Future[F] | None = None


class PrefetchingExchange(Exchange[Handle], Generic[Handle, R, F]):
    """Every rank takes part in every lookup, with an empty batch when it has no samples.

    Args:
        channel: between all ranks, this exchange's alone.
        features: of all tables.
    """

    def __init__(self, channel: Channel, features: tuple[str, ...]) -> None:
        self._ranks = channel.ranks
        self._communication = channel.ranks.communication
        self.reads_ahead = channel.ranks.world_size > 1
        self.features = features
        self._announced: list[PendingBatch[R, F]] = []

    @abstractmethod
    def _route(self, batch: JaggedBatch, is_real: bool) -> R:
        """Tell other ranks what a batch needs; on the communication thread."""

    @abstractmethod
    def _fetch(self, routes: R, averaged_at: int | None) -> F:
        """Receive what a batch reads; on the communication thread."""

    @abstractmethod
    def _is_real_on_some_rank(self, routes: R) -> bool:
        """Whether the part of some rank is no filler."""

    def feed(self, batches: Iterable[JaggedBatch], trains: bool) -> Iterator[JaggedBatch]:
        """See :class:`Exchange`; reads one batch ahead and sends its ids.

        A rank that runs out of batches gets empty ones until all have: nobody waits for a rank that
        has stopped.
        """
        own: list[PendingBatch[R, F]] = []
        before: PendingBatch[R, F] | None = None
        try:
            for batch, is_real in and_then_fillers(batches, self.features):
                if (
                    before is not None
                    and not before.is_real
                    and not self._is_real_elsewhere(before)
                ):
                    return
                pending = self.announce(batch, is_real)
                own = [*own[-1:], pending]
                self._announced.append(pending)
                if before is not None:
                    yield before.batch
                before = pending
        finally:
            self._announced = [pending for pending in self._announced if pending not in own]

    def announce(self, batch: JaggedBatch, is_real: bool) -> PendingBatch[R, F]:
        """Send a batch's ids; returns at once."""

        def route() -> R:
            batch.validate()  # may have been written to since it was made
            return self._route(batch, is_real)

        return PendingBatch(batch, is_real, self._communication.submit(route))

    def fetched(self, batch: JaggedBatch, averaged_at: int | None) -> tuple[R, F]:
        """The routes and rows of a batch, announced before or now; blocks."""
        pending = next((pending for pending in self._announced if pending.batch is batch), None)
        if pending is None:
            pending = self.announce(batch, True)
        else:
            self._announced.remove(pending)
        if pending.rows is None or averaged_at is not None:
            pending.rows = self._begin_fetch(pending, averaged_at)
        with self._ranks.waiting():
            return pending.routes.result(), pending.rows.result()

    def fetch_next(self) -> None:
        """See :class:`Exchange`."""
        following = self._announced[0] if self._announced else None
        if (
            following is not None
            and following.rows is None
            and self._may_fetch_early(following.batch)
        ):
            following.rows = self._begin_fetch(following, None)

    def _may_fetch_early(self, batch: JaggedBatch) -> bool:
        """Whether a batch's rows may be fetched before it is looked up."""
        return True

    def flush(self) -> None:
        """See :class:`Exchange`."""
        self._communication.flush()

    def forget(self) -> None:
        """See :class:`Exchange`."""
        self._drop_fetched()

    def _drop_fetched(self) -> None:
        """Forget rows that were fetched before an update."""
        for pending in self._announced:
            pending.rows = None

    def _begin_fetch(self, pending: PendingBatch[R, F], averaged_at: int | None) -> Future[F]:
        return self._communication.submit(lambda: self._fetch(pending.routes.result(), averaged_at))

    def _is_real_elsewhere(self, filler: PendingBatch[R, F]) -> bool:
        try:
            return self._is_real_on_some_rank(filler.routes.result())
        except DataError:  # a bad batch is no filler; the lookup says what is wrong
            return True
