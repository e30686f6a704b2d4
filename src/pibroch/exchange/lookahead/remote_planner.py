"""The way to an oracle in another process, to which each rank sends only the rows that it touches.

An oracle that is lost takes nothing with it: each rank sends the steps and requests of this feed
to another one, which makes the same plans, and training goes on at the step where it was.

Everything here runs on the planner thread but the constructor and ``_request``, ``_add`` and
``fail``, which submit to it. RPC's network thread completes a call and hands its answer to the
planner thread, so log and connection need no lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch

from pibroch.collectives import Channel
from pibroch.collectives.task_thread import TaskThread
from pibroch.errors import TrainingError, UnknownWorkerError, WorkerLostError
from pibroch.exchange.lookahead.announcement import Announcement
from pibroch.exchange.lookahead.feed_log import FeedLog, LoggedStep
from pibroch.exchange.lookahead.oracle import PlanRequest
from pibroch.exchange.lookahead.oracle.encoding import Parts, decode_opening, decode_plan
from pibroch.exchange.lookahead.oracle.requests import Answer, RequestKind
from pibroch.exchange.lookahead.oracle.thread import Answers
from pibroch.exchange.lookahead.planners import Planner
from pibroch.observability.trace import span
from pibroch.roles.losses import out_of_reach
from pibroch.servers import plan_service
from pibroch.servers.workers import ServingWorkers

logger = logging.getLogger(__name__)
COME_BACK_S = 60.0
"""How long to wait for another oracle where one was lost."""
_POLL_S = 0.1
OnAnswer = Callable[[torch.futures.Future[Any]], None]


class RemotePlanner(Planner):
    """A central oracle. All ranks make their planners together.

    Args:
        thread: the planner thread, which makes all calls.
        name: of the worker of this process's RPC group.
        channel: between the ranks.
        settings: the arguments of :class:`pibroch.servers.plan_service.PlanService`, the same on
            all ranks.
        count: gets the purpose and the number of bytes that travel, on the planner thread.

    Raises:
        ConfigError: when ranks want different things.
        TrainingError: when the oracle cannot be reached.
    """

    announces_rows = False

    def __init__(
        self,
        thread: TaskThread,
        name: str,
        channel: Channel,
        settings: Sequence[object],
        count: Callable[[str, int], None],
    ) -> None:
        super().__init__()
        self._thread = thread
        self._name = name
        self._rank = channel.ranks.rank
        self._count = count
        self._answers = Answers()
        self._workers = ServingWorkers("oracle", [name], channel)
        self._settings = settings
        self._log = FeedLog()
        self._incarnation = 0
        with self._workers.explained(name):
            self._workers.configure(name, plan_service.configure, settings).wait()

    def fail(self, error: BaseException) -> None:
        """See :class:`Planner`."""
        self._answers.fail(error)

    def _add(self, feed: int, announcement: Announcement) -> None:
        self._answers.submit(self._thread, partial(self._send_step, feed, announcement))

    def _send_step(self, feed: int, announcement: Announcement) -> None:
        lanes = announcement.here.lanes
        encoded = np.concatenate([each.encoded for each in lanes])
        self._count("ids", encoded.nbytes)
        step = self._log.add(
            feed, [len(each.grouped.rows) for each in lanes], torch.from_numpy(encoded)
        )
        with span("add"):
            self._attempt(lambda: self._call_add(step))

    def _call_add(self, step: LoggedStep) -> None:
        arguments = step.number, step.feed, list(step.num_rows), step.encoded
        self._call(plan_service.add, *arguments, on_answer=self._fail_on_error)

    def _request(self, number: int, request: PlanRequest) -> Future[Any]:
        answer = self._answers.expect(number)
        self._answers.submit(self._thread, partial(self._send_request, number, request))
        return answer

    def _send_request(self, number: int, request: PlanRequest) -> None:
        assert number == self._log.ask(request), "requests come in their order"
        self._attempt(lambda: self._call_ask(number, request))

    def _call_ask(self, number: int, request: PlanRequest) -> None:
        def give(called: torch.futures.Future[Any]) -> None:
            self._log.answer(number)
            self._answers.give(number, partial(self._decoded, request.kind, called))

        self._call(
            plan_service.ask, number, request.kind, request.feed, request.num_steps, on_answer=give
        )

    def _decoded(self, kind: RequestKind, called: torch.futures.Future[Any]) -> Answer:
        with self._workers.explained(self._name), span(kind):
            arrays = [part.numpy() for part in called.value()]
            lanes = [Parts(*pair) for pair in zip(arrays[::2], arrays[1::2], strict=True)]
            self._count("plans", sum(parts.num_bytes for parts in lanes))
            return (
                [decode_plan(parts) for parts in lanes]
                if kind == "plan"
                else [*map(decode_opening, lanes)]
            )

    def _fail_on_error(self, called: torch.futures.Future[Any]) -> None:
        try:
            with self._workers.explained(self._name):
                called.value()
        except Exception as error:
            self.fail(error)

    def _call(self, function: Callable[..., object], *args: object, on_answer: OnAnswer) -> None:
        """Call the oracle; ``on_answer`` gets the answer on this thread.

        Where the oracle is lost before it has answered, the call is made again later, with all
        others.
        """
        incarnation = self._incarnation
        called: torch.futures.Future[Any] = self._workers.call(
            self._name, function, self._rank, *args
        )

        def take() -> None:
            if incarnation != self._incarnation:
                return  # the call was made again since, to another oracle
            try:
                called.value()
            except (WorkerLostError, UnknownWorkerError) as error:
                self._recover(out_of_reach("oracle", self._name, error))
            except Exception:  # of whatever kind, the future has it, and its reader raises it
                on_answer(called)
            else:
                on_answer(called)

        called.add_done_callback(lambda _: self._answers.submit(self._thread, take))

    def _attempt(self, call: Callable[[], None]) -> None:
        """Make a call that is in the log; where the oracle is lost, make all of them again."""
        try:
            call()
        except TrainingError as error:
            self._recover(error)

    def _recover(self, error: TrainingError) -> None:
        """Wait until another oracle is there, and send it all of this feed.

        Raises:
            TrainingError: when there is none in time, or the log was too large to keep.
        """
        deadline = time.monotonic() + COME_BACK_S
        logger.warning("%s: another one is waited for", error.got)
        while self._log.is_whole and error.is_loss and time.monotonic() < deadline:
            self._incarnation += 1
            try:
                self._replay()
            except TrainingError as again:
                error = again
                time.sleep(_POLL_S)
            else:
                logger.info("an oracle is back, and got %d steps again", len(self._log.steps))
                return
        raise error

    def _replay(self) -> None:
        workers = self._workers
        name = self._name
        log = self._log
        workers.find_again(name)
        with workers.explained(name):
            workers.configure(name, plan_service.configure, self._settings, True).wait()
        answered = [
            [number, each.kind, each.feed, each.num_steps] for number, each in log.answered()
        ]
        workers.ask(
            name,
            plan_service.go_on,
            self._rank,
            log.first_step,
            log.first_request,
            answered,
        )
        for step in log.steps:
            self._call_add(step)
        for number, request in log.unanswered():
            self._call_ask(number, request)
