"""A batch on its way through the lookahead exchange."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from pibroch.data import JaggedBatch
from pibroch.exchange.announcement import Announcement
from pibroch.exchange.carrier import Records
from pibroch.kernels.window.rules import Ints
from pibroch.lookahead import StepPlan


@dataclass(slots=True, eq=False)
class Step:
    """A batch on its way.

    Attributes:
        batch: this rank's part.
        is_real: unless it is a filler after this rank's last batch.
        feed: from which it came.
        said: what all ranks told about it.
        number: among the steps of which the oracle hears, from 1.
        plan: of what happens after it.
        places: where its rows are read, once they are there.
        num_fetched: of its rows that came, or will come, from other ranks for it.
        gradients: this rank's sums and room for what comes, once they are computed.
        lone: done when the rows that this rank alone touched are updated.
    """

    batch: JaggedBatch
    is_real: bool
    feed: int
    said: Future[Announcement] = field(default_factory=Future)
    number: int = 0
    plan: Future[StepPlan] | None = None
    places: Future[Ints] | None = None
    num_fetched: int = 0
    gradients: Records | None = None
    lone: Future[None] | None = None


@dataclass(slots=True)
class Rates:
    """How the last step's update was to be made."""

    learning_rate: float = 0.0
    number: int = 0
