"""What an oracle is asked, and when it can answer.

A request waits until the steps that it depends on are known.

Whoever keeps an oracle for a rank keeps its requests so, in the rank's own process or elsewhere.
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
    """What a rank asks of the oracle: the opening, or the plan of a step.

    Attributes:
        kind: the oracle's method.
        feed: number of the feed whose steps it is about, from 1.
        num_steps: steps that must be known, counted from the first of all feeds.
    """

    kind: RequestKind
    feed: int
    num_steps: int


class PlanQueue:
    """Steps and requests in, requests out whose time has come, in the order of their numbers.

    One thread calls it at a time.

    The oracle hears of no more steps than a request names, whatever is known besides: so the
    answers follow from steps and requests alone, not from when they come, and an oracle that is
    asked all of them again gives them again.

    Args:
        oracle: of one rank, all its lanes.

    Example:
        >>> import numpy as np
        >>> from pibroch.exchange.lookahead.oracle import Oracle
        >>> queue = PlanQueue(JointOracle([Oracle(np.array([0, 4, 8]), rank=0, lookahead=1, capacity=4)]))
        >>> queue.ask(0, PlanRequest("open", feed=1, num_steps=1)); queue.take()
        >>> queue.add(1, [[np.array([2, 5]), np.array([5])]]); queue.take()
        (0, PlanRequest(kind='open', feed=1, num_steps=1))
    """

    def __init__(self, oracle: JointOracle) -> None:
        self._oracle = oracle
        self._feed = self._num_known = self._num_steps = 0
        self._known: deque[tuple[int, Sequence[Sequence[RowIds]]]] = (
            deque()
        )  # those that the oracle has not heard of
        self._waiting: dict[int, PlanRequest] = {}
        self._number = 0
        self._refused_after = 0
        self._refusal: ConfigError | None = None

    def begin(self, num_steps: int, number: int) -> None:
        """Begin with other numbers than 0, where others were served before.

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
        self._known.append((feed, rows))
        self._num_known += 1

    def _tell(self) -> None:
        """Let the oracle hear of the next step."""
        feed, rows = self._known.popleft()
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
        """A request; numbers run from 0 without gaps, but may come out of their order."""
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
        newest = self._known[-1][0] if self._known else self._feed
        if request.feed != newest:
            raise TrainingError(
                f"a request about feed {request.feed} in feed {newest}", "one about this feed"
            )
        while self._num_steps < request.num_steps:
            self._tell()
        if self._refusal is not None and request.num_steps > self._refused_after:
            raise self._refusal
        return self._oracle.open() if request.kind == "open" else self._oracle.plan()
