"""A batch on its way through the lookahead exchange."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from pibroch.data import JaggedBatch
from pibroch.exchange.lookahead.announcement import Announcement
from pibroch.kernels.arrays import Ints, Records
from pibroch.lookahead import StepPlan


@dataclass(frozen=True, slots=True)
class Rates:
    """How an update is made: learning rate of the step, number of the update, from 1."""

    learning_rate: float = 0.0
    number: int = 0


@dataclass(slots=True, eq=False)
class Step:
    """A batch on its way.

    Attributes:
        batch: this rank's part.
        is_real: unless it is a filler after this rank's last batch.
        feed: from which it came.
        announced: what all ranks told about it.
        number: among the steps of which the oracle hears, from 1.
        plan: of what happens after it.
        places: where its rows are read, once they are there.
        num_fetched: of its rows that came, or will come, from other ranks for it.
        gradients: this rank's sums and room for what comes, once they are computed.
        rates: of its update.
        local: done when the rows that this rank alone touched are updated.
    """

    batch: JaggedBatch
    is_real: bool
    feed: int
    announced: Future[Announcement] = field(default_factory=Future)
    number: int = 0
    plan: Future[StepPlan] = field(default_factory=Future)
    places: Future[Ints] = field(default_factory=Future)
    num_fetched: int = 0
    gradients: Records | None = None
    rates: Rates = Rates()
    local: Future[None] = field(default_factory=Future)
