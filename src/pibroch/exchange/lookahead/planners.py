"""Who makes the plans: an oracle in each rank, from the rows of all, or a central one in a process of its own.

Both are told of the same steps and asked the same, and give the same answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from functools import partial
from typing import Any

from pibroch.collectives.task_thread import TaskThread
from pibroch.exchange.lookahead.announcement import Announcement
from pibroch.exchange.lookahead.oracle import JointOracle, Opening, PlanRequest, StepPlan
from pibroch.exchange.lookahead.oracle.thread import OracleThread


class Planner(ABC):
    """One rank's way to its oracle. The thread that trains calls it, and never waits here.

    After an error that is no answer all requests, open ones too, are answered by it.
    """

    tells_rows: bool
    """Whether the oracle needs the rows of all ranks here."""

    def __init__(self) -> None:
        self._num_requests = 0

    def add(self, feed: int, announced: Future[Announcement]) -> None:
        """One more step, as soon as all ranks have told about it.

        Args:
            feed: number of the feed that it belongs to; with a new number the steps before are
                forgotten, all records being at home.
            announced: about the step.
        """
        announced.add_done_callback(partial(self._heard, feed))

    def open(self, feed: int, num_steps: int) -> Future[list[Opening]]:
        """See :meth:`JointOracle.open`; answered when ``num_steps`` steps, of all feeds, are known."""
        return self._next(PlanRequest("open", feed, num_steps))

    def plan(self, feed: int, num_steps: int) -> Future[list[StepPlan]]:
        """See :meth:`JointOracle.plan`; likewise."""
        return self._next(PlanRequest("plan", feed, num_steps))

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Answer all requests by an error, those to come as well."""

    @abstractmethod
    def _tell(self, feed: int, announcement: Announcement) -> None:
        """A step is known."""

    @abstractmethod
    def _ask(self, number: int, request: PlanRequest) -> Future[Any]:
        """The answer to a request."""

    def _next(self, request: PlanRequest) -> Future[Any]:
        self._num_requests += 1
        return self._ask(self._num_requests - 1, request)

    def _heard(self, feed: int, announced: Future[Announcement]) -> None:
        error = announced.exception()
        if error is None:
            self._tell(feed, announced.result())
        else:
            self.fail(error)


class LocalPlanner(Planner):
    """An oracle in this process.

    Args:
        thread: keeps it.
        oracle: of this rank, all lanes.
    """

    tells_rows = True

    def __init__(self, thread: TaskThread, oracle: JointOracle) -> None:
        super().__init__()
        self._oracle = OracleThread(oracle, thread)

    def fail(self, error: BaseException) -> None:
        """See :class:`Planner`."""
        self._oracle.fail(error)

    def _ask(self, number: int, request: PlanRequest) -> Future[Any]:
        return self._oracle.ask(number, request)

    def _tell(self, feed: int, announcement: Announcement) -> None:
        rows = announcement.rows
        announcement.rows = ()
        self._oracle.add(feed, rows)
