"""Who makes the plans: an oracle in each rank, from the rows of all, or one central oracle.

Both get the same steps and requests, and give the same answers.
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
    """One rank's way to its oracle.

    The training thread calls it, and never waits here. ``_on_announced`` runs on the communication
    thread, which completes announcements; it passes the step on to the planner thread. After an
    error that is no answer all requests, open ones too, are answered by it.
    """

    announces_rows: bool
    """Whether the oracle needs the rows of all ranks here."""

    def __init__(self) -> None:
        self._num_requests = 0

    def add(self, feed: int, announced: Future[Announcement]) -> None:
        """One more step, as soon as all ranks have announced it.

        Args:
            feed: number of the feed that it belongs to; with a new number the steps before are
                forgotten, all records being at home.
            announced: about the step.
        """
        announced.add_done_callback(partial(self._on_announced, feed))

    def open(self, feed: int, num_steps: int) -> Future[list[Opening]]:
        """See :meth:`JointOracle.open`; answered once it has ``num_steps`` steps of all feeds."""
        return self._next(PlanRequest("open", feed, num_steps))

    def plan(self, feed: int, num_steps: int) -> Future[list[StepPlan]]:
        """See :meth:`JointOracle.plan`; answered likewise."""
        return self._next(PlanRequest("plan", feed, num_steps))

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Answer all requests by an error, those to come as well."""

    @abstractmethod
    def _add(self, feed: int, announcement: Announcement) -> None:
        """Give the oracle a step that all ranks have announced."""

    @abstractmethod
    def _request(self, number: int, request: PlanRequest) -> Future[Any]:
        """The answer to a request."""

    def _next(self, request: PlanRequest) -> Future[Any]:
        self._num_requests += 1
        return self._request(self._num_requests - 1, request)

    def _on_announced(self, feed: int, announced: Future[Announcement]) -> None:
        error = announced.exception()
        if error is None:
            self._add(feed, announced.result())
        else:
            self.fail(error)


class LocalPlanner(Planner):
    """An oracle in this process.

    Args:
        thread: the planner thread, on which it is kept.
        oracle: of this rank, all lanes.
    """

    announces_rows = True

    def __init__(self, thread: TaskThread, oracle: JointOracle) -> None:
        super().__init__()
        self._oracle = OracleThread(oracle, thread)

    def fail(self, error: BaseException) -> None:
        """See :class:`Planner`."""
        self._oracle.fail(error)

    def _request(self, number: int, request: PlanRequest) -> Future[Any]:
        return self._oracle.ask(number, request)

    def _add(self, feed: int, announcement: Announcement) -> None:
        rows = announcement.rows
        announcement.rows = ()
        self._oracle.add(feed, rows)
