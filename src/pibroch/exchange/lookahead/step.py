"""A batch on its way through the lookahead exchange.

The training thread makes a step and passes it to tasks of the other threads. A field that another
thread writes is read only after the future that says so: ``announced``, ``plan`` and ``places``
bring their own value, ``local`` says that the planner thread is done with ``gradients``.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from pibroch.data import JaggedBatch
from pibroch.exchange.lookahead.announcement import Announcement
from pibroch.exchange.lookahead.oracle import StepPlan
from pibroch.kernels.arrays import Ints, Records
from pibroch.kernels.scatter_update import Hyper


@dataclass(slots=True, eq=False)
class Step:
    """One batch, from its reading to the end of its updates.

    Attributes:
        batch: this rank's part.
        is_real: unless it is a filler after this rank's last batch.
        feed: number of its feed.
        announced: what all ranks say about it.
        number: among the steps that the oracle gets, from 1.
        plan: of what happens after it, for each lane.
        places: where its rows are read, for each lane, once they are there.
        num_fetched: how many of its rows other ranks have sent, or will send, for it.
        gradients: this rank's sums and room for those of other ranks, for each lane, once computed.
        hyper: of its update, for each lane; ``None`` where nothing is updated.
        update: its number, from 1.
        local: done when the rows that this rank alone touched are updated.
    """

    batch: JaggedBatch
    is_real: bool
    feed: int
    announced: Future[Announcement] = field(default_factory=Future)
    number: int = 0
    plan: Future[list[StepPlan]] = field(default_factory=Future)
    places: Future[list[Ints]] = field(default_factory=Future)
    num_fetched: int = 0
    gradients: list[Records] = field(default_factory=list)
    hyper: Sequence[Hyper | None] = field(default_factory=list)
    update: int = 0
    local: Future[None] = field(default_factory=Future)
