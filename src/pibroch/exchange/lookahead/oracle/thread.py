"""An oracle on a thread: steps and plan requests in, answers in futures.

The runtime around the plain objects of this package.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from pibroch.collectives.task_thread import TaskThread
from pibroch.errors import ProtocolError
from pibroch.exchange.lookahead.oracle.joint import JointOracle
from pibroch.exchange.lookahead.oracle.requests import Answer, PlanQueue, PlanRequest
from pibroch.kernels.arrays import RowIds
from pibroch.observability.trace import span
from pibroch.observability.watch import watched

T = TypeVar("T")


class Answers:
    """Answers to requests, by their numbers.

    After a failure all open requests, and all later ones, are answered by its error. Threads may
    call it at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Future[Answer]] = {}
        self._failure: BaseException | None = None

    def expect(self, number: int) -> Future[Answer]:
        """The answer to request ``number``.

        Raises:
            ProtocolError: when it is expected already.
        """
        answer = Future[Answer]()
        with self._lock:
            if number in self._open:
                raise ProtocolError(f"a second request {number}", "one of each number")
            if self._failure is None:
                self._open[number] = answer
                return answer
        # outside of the lock: callbacks run here, and may ask again
        answer.set_exception(self._failure)
        return answer

    def give(self, number: int, make: Callable[[], Answer]) -> None:
        """Answer by what ``make`` returns or raises; without effect where all have failed."""
        made = Future[Answer]()
        try:
            made.set_result(make())
        except Exception as error:  # it is the answer
            made.set_exception(error)
        with self._lock:
            # after `make`: a failure meanwhile has answered already, and is not to be answered
            # twice
            answer = self._open.pop(number, None)
        if answer is not None:
            pass_on(answer, made)

    def fail(self, error: BaseException) -> None:
        """Answer all requests by an error, of several by the first."""
        with self._lock:
            # the first error is the cause, later ones mostly follow from it
            self._failure = self._failure or error
            waiting = list(self._open.values())
            self._open = {}
        for answer in waiting:
            answer.set_exception(error)

    def submit(self, thread: TaskThread, task: Callable[[], None]) -> None:
        """Run a task on a thread; if that fails, all requests fail."""
        thread.submit(task).add_done_callback(self.notice)

    def notice(self, done: Future[None]) -> None:
        """Fail by the error of what is done, if it has one."""
        error = done.exception()
        if error is not None:
            self.fail(error)


def pass_on(answer: Future[T], done: Future[T]) -> None:
    """Answer by what another future has, or by its error."""
    error = done.exception()
    if error is None:
        answer.set_result(done.result())
    else:
        answer.set_exception(error)


class OracleThread:
    """Keeps one rank's oracle on a thread; its methods never block, and any thread may call them.

    Args:
        oracle: of all lanes; is touched by ``thread`` alone from now on.
        thread: may do other tasks besides.
    """

    def __init__(self, oracle: JointOracle, thread: TaskThread) -> None:
        self._queue = PlanQueue(oracle)
        self._thread = thread
        self._answers = Answers()
        self.fail = self._answers.fail

    def begin(self, num_steps: int, number: int) -> None:
        """See :meth:`PlanQueue.begin`; before steps are added."""
        self._answers.submit(self._thread, partial(self._queue.begin, num_steps, number))

    def add(self, feed: int, rows: Sequence[Sequence[RowIds]]) -> None:
        """One more step, see :meth:`PlanQueue.add`."""
        self._answers.submit(self._thread, partial(self._add, feed, rows))

    def ask(self, number: int, request: PlanRequest) -> Future[Answer]:
        """The answer to request ``number``: an ``Opening`` or ``StepPlan`` for each lane.

        Raises:
            ProtocolError: when this number was given to another one that still waits.
        """
        answer = self._answers.expect(number)
        self._answers.submit(self._thread, partial(self._ask, number, request))
        return answer

    def _add(self, feed: int, rows: Sequence[Sequence[RowIds]]) -> None:
        with span("add"):
            watched("add", self, None, partial(self._queue.add, feed, rows))
        self._answer_due()

    def _ask(self, number: int, request: PlanRequest) -> None:
        self._queue.ask(number, request)
        self._answer_due()

    def _answer_due(self) -> None:
        # one step may be what several requests waited for
        while (due := self._queue.take()) is not None:
            number, request = due
            with span(request.kind):
                self._answers.give(number, partial(self._queue.answer, request))
