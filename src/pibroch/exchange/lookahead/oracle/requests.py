"""Requests to an oracle, which wait until the steps that they depend on are known.

The same for an oracle in the rank's own process and for one in another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pibroch.errors import ConfigError, TrainingError
from pibroch.exchange.lookahead.oracle.joint import JointOracle
from pibroch.exchange.lookahead.oracle.oracle import Opening, StepPlan
from pibroch.kernels.arrays import RowIds

RequestKind = Literal["open", "plan"]
Answer = list[Opening] | list[StepPlan]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A rank's request to the oracle for the opening, or for the plan of a step.

    Attributes:
        kind: the oracle's method.
        feed: number of the feed whose steps it is about, from 1.
        num_steps: steps that must be known, counted from the first of all feeds.
    """

    kind: RequestKind
    feed: int
    num_steps: int


class PlanQueue:
    """Steps and requests in; requests that can be answered out, in the order of their numbers.

    One thread calls it at a time.

    The oracle gets no more steps than a request names, even where more are known. So its answers
    follow from steps and requests alone, not from the times of their arrival, and an oracle that
    gets all of them again gives the same answers.

    Args:
        oracle: of one rank, all its lanes.

    Example:
        >>> import numpy as np
        >>> from pibroch.exchange.lookahead.oracle import Oracle
        >>> oracle = Oracle(np.array([0, 4, 8]), rank=0, lookahead=1, capacity=4)
        >>> queue = PlanQueue(JointOracle([oracle]))
        >>> queue.ask(0, PlanRequest("open", feed=1, num_steps=1)); queue.take()
        >>> queue.add(1, [[np.array([2, 5]), np.array([5])]]); queue.take()
        (0, PlanRequest(kind='open', feed=1, num_steps=1))
    """

    def __init__(self, oracle: JointOracle) -> None:
        self._oracle = oracle
        self._feed = self._num_known = self._num_steps = 0
        # feed and rows of the steps that the oracle has not got
        self._unplanned: deque[tuple[int, Sequence[Sequence[RowIds]]]] = deque()
        self._waiting: dict[int, PlanRequest] = {}
        self._number = 0
        self._refused_after = 0
        self._refusal: ConfigError | None = None

    def begin(self, num_steps: int, number: int) -> None:
        """Begin with other numbers than 0, in place of a queue that was served before.

        Args:
            num_steps: that came before the first one here, which begins a feed.
            number: of the first request here.
        """
        self._num_known = self._num_steps = num_steps
        self._number = number

    def add(self, feed: int, rows: Sequence[Sequence[RowIds]]) -> None:
        """One more step, see :meth:`JointOracle.add`.

        With the first step of another feed those before it are forgotten.
        """
        self._unplanned.append((feed, rows))
        self._num_known += 1

    def _add_next(self) -> None:
        """Give the oracle the next step."""
        feed, rows = self._unplanned.popleft()
        if feed != self._feed:
            self._oracle.restart()
            self._feed = feed
        if self._refusal is None:
            try:
                self._oracle.add(rows)
            except ConfigError as error:
                self._refused_after = self._num_steps
                self._refusal = error
        self._num_steps += 1

    def ask(self, number: int, request: PlanRequest) -> None:
        """Add a request; numbers run from 0 without gaps, but may arrive in any order."""
        self._waiting[number] = request

    def take(self) -> tuple[int, PlanRequest] | None:
        """The next request that can be answered, with its number."""
        request = self._waiting.get(self._number)
        if request is None or request.num_steps > self._num_known:
            return None
        del self._waiting[self._number]
        self._number += 1
        return self._number - 1, request

    def answer(self, request: PlanRequest) -> Answer:
        """The answer to the request that was taken last, for each lane.

        Raises:
            ConfigError: when one of its steps fits into no cache.
            TrainingError: when its feed was left: nobody waits for the answer then.
        """
        newest = self._unplanned[-1][0] if self._unplanned else self._feed
        if request.feed != newest:
            raise TrainingError(
                f"a request about feed {request.feed} in feed {newest}", "one about this feed"
            )
        while self._num_steps < request.num_steps:
            self._add_next()
        if self._refusal is not None and request.num_steps > self._refused_after:
            raise self._refusal
        return self._oracle.open() if request.kind == "open" else self._oracle.plan()
