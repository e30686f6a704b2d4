"""Exchanges that send the next batch's ids, and fetch its rows, while the current one computes.

Ids go out as soon as a batch is read; rows are fetched as soon as the gradients before them have
been applied, beside the rest of the backward pass, the dense optimizer and whatever the model
computes before it asks for its embeddings. The order is that of each exchange's schedule.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pibroch.collectives import Channel
from pibroch.data import JaggedBatch
from pibroch.errors import DataError
from pibroch.exchange.agreement import and_then_fillers
from pibroch.exchange.base import Exchange, Rates
from pibroch.exchange.schedule import Moment, Runner, Schedule, ScheduledStep


@dataclass(slots=True, eq=False)
class FedStep(ScheduledStep):
    """A batch, or a filler, from its reading to the end of its update.

    Attributes:
        batch: this rank's part.
        is_real: unless it is a filler after this rank's last batch.
        averaged_at: the step whose moving averages its lookup reads; ``None`` for weights.
        gradients: of the embeddings, between the backward pass's arrival and their sums.
        rates: of its update.
    """

    batch: JaggedBatch
    is_real: bool
    averaged_at: int | None = None
    gradients: Sequence[Tensor] = ()
    rates: Rates | None = None

    @property
    def begins_rows(self) -> bool:
        """Whether rows begin anew with it."""
        return self.batch.fresh is not None


class PrefetchingExchange(Exchange[FedStep]):
    """Every rank takes part in every lookup, with an empty batch when it has no samples.

    Its schedule finds out where a batch's rows are in the moment READ, and brings them in TURN.

    Args:
        channel: between all ranks, this exchange's alone.
        features: of all tables.
    """

    _runner: Runner[Any, FedStep]

    def __init__(self, channel: Channel, features: tuple[str, ...]) -> None:
        self._ranks = channel.ranks
        self._communication = channel.ranks.communication
        self.reads_ahead = channel.ranks.world_size > 1
        self.features = features
        self._announced: list[FedStep] = []

    @property
    def schedule(self) -> Schedule:
        """See :class:`Exchange`."""
        return self._runner.schedule

    @abstractmethod
    def _is_real_on_some_rank(self, step: FedStep) -> bool:
        """Whether the part of some rank is no filler; waits for the routes."""

    def feed(self, batches: Iterable[JaggedBatch], trains: bool) -> Iterator[JaggedBatch]:
        """See :class:`Exchange`; reads one batch ahead and sends its ids.

        A rank that runs out of batches gets empty ones until all have: nobody waits for a rank that
        has stopped.
        """
        own: list[FedStep] = []
        before: FedStep | None = None
        try:
            for batch, is_real in and_then_fillers(batches, self.features):
                if (
                    before is not None
                    and not before.is_real
                    and not self._is_real_elsewhere(before)
                ):
                    return
                step = self._begin(batch, is_real)
                own = [*own[-1:], step]
                self._announced.append(step)
                if before is not None:
                    yield before.batch
                before = step
        finally:
            self._announced = [step for step in self._announced if step not in own]

    def _begin(self, batch: JaggedBatch, is_real: bool) -> FedStep:
        """Send a batch's ids; returns at once."""
        step = FedStep(batch, is_real)
        self._runner.at(Moment.READ, self, step)
        return step

    def _step_of(self, batch: JaggedBatch, averaged_at: int | None) -> FedStep:
        """The step of a batch that is looked up, begun before or now; waits for its rows."""
        step = next((step for step in self._announced if step.batch is batch), None)
        if step is None:
            step = self._begin(batch, True)
        else:
            self._announced.remove(step)
        if averaged_at is not None:
            self._runner.forget(Moment.TURN, step)
            step.averaged_at = averaged_at
        self._runner.at(Moment.TURN, self, step)
        with self._ranks.waiting():
            self._runner.wait(Moment.TURN, step)
        return step

    def fetch_next(self) -> None:
        """See :class:`Exchange`."""
        following = self._announced[0] if self._announced else None
        if following is not None and self._may_fetch_early(following.batch):
            self._runner.at(Moment.TURN, self, following)

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
        for step in self._announced:
            self._runner.forget(Moment.TURN, step)

    def _is_real_elsewhere(self, filler: FedStep) -> bool:
        try:
            return self._is_real_on_some_rank(filler)
        except DataError:  # a bad batch is no filler; the lookup says what is wrong
            return True
