"""The steps and requests that a rank has sent an oracle in this feed.

Another oracle gives the same answers once it has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pibroch.exchange.lookahead.oracle import PlanRequest

MOST_BYTES = 256 << 20
"""Of the rows in a feed's steps, as they travel."""


@dataclass(frozen=True, slots=True, eq=False)
class LoggedStep:
    """A step, as it is sent to an oracle.

    Attributes:
        number: from 0, over all feeds.
        feed: its number.
        num_rows: distinct rows, by lane.
        encoded: these rows.
    """

    number: int
    feed: int
    num_rows: Sequence[int]
    encoded: torch.Tensor


@dataclass(slots=True)
class FeedLog:
    """Steps and requests of the feed that goes on.

    Those of the feed before are kept as long as another rank may be in it. That is until the first
    answer in this feed, which shows that all ranks have sent a step of it.

    Attributes:
        first_request: number of the first request that is kept.
    """

    first_request: int = 0
    _steps: list[LoggedStep] = field(default_factory=list)
    _requests: list[PlanRequest] = field(default_factory=list)
    _unanswered: set[int] = field(default_factory=set)
    _num_steps: int = 0
    _num_bytes: int = 0
    _answered_feed: int = 0
    _too_large: int = 0  # a feed

    @property
    def is_whole(self) -> bool:
        """Whether all is here: of a feed that takes more than ``MOST_BYTES`` nothing is kept."""
        return not self._too_large

    @property
    def first_step(self) -> int:
        """Number of the first step that is kept."""
        return self._num_steps - len(self._steps)

    @property
    def steps(self) -> Sequence[LoggedStep]:
        """The steps that are kept, in their order."""
        return tuple(self._steps)

    def answered(self) -> list[tuple[int, PlanRequest]]:
        """Requests that have their answers, with their numbers."""
        return [
            each
            for each in enumerate(self._requests, self.first_request)
            if each[0] not in self._unanswered
        ]

    def unanswered(self) -> list[tuple[int, PlanRequest]]:
        """Requests that wait for their answers, with their numbers."""
        return [
            each
            for each in enumerate(self._requests, self.first_request)
            if each[0] in self._unanswered
        ]

    def add(self, feed: int, num_rows: Sequence[int], encoded: torch.Tensor) -> LoggedStep:
        """Log the next step."""
        step = LoggedStep(self._num_steps, feed, num_rows, encoded)
        self._num_steps += 1
        if feed != self._too_large:
            self._steps.append(step)
            self._num_bytes += encoded.nbytes
        if self._num_bytes > MOST_BYTES:
            self._too_large = feed
            self._steps.clear()
            self._num_bytes = 0
        return step

    def ask(self, request: PlanRequest) -> int:
        """Log the next request; returns its number."""
        number = self.first_request + len(self._requests)
        self._requests.append(request)
        self._unanswered.add(number)
        return number

    def answer(self, number: int) -> None:
        """A request has its answer, or needs none."""
        self._unanswered.discard(number)
        feed = (
            self._requests[number - self.first_request].feed if number >= self.first_request else 0
        )
        if feed > self._answered_feed:
            self._answered_feed = feed
            self._forget_before(feed)
        if not self.is_whole:
            self._forget_requests(
                min(self._unanswered, default=self.first_request + len(self._requests))
            )

    def _forget_before(self, feed: int) -> None:
        """All ranks have come to a feed: who is in one before waits for nothing."""
        if feed > self._too_large:
            self._too_large = 0
        self._steps = [step for step in self._steps if step.feed >= feed]
        self._num_bytes = sum(step.encoded.nbytes for step in self._steps)
        self._forget_requests(
            self.first_request + sum(request.feed < feed for request in self._requests)
        )

    def _forget_requests(self, first: int) -> None:
        """Forget the requests before a number."""
        self._requests = self._requests[first - self.first_request :]
        self.first_request = first
        self._unanswered = {number for number in self._unanswered if number >= self.first_request}
