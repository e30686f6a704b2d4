"""The way to an oracle in another process, which hears from each rank only what that rank touches.

An oracle that is lost takes nothing with it that the ranks could not tell another one: each tells
again what it told and asked in this feed, the other one makes the same plans, and training goes on
at the step where it was.
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
OnHeard = Callable[[torch.futures.Future[Any]], None]


class RemotePlanner(Planner):
    """A central oracle. All ranks make their planners together.

    Args:
        thread: talks to it.
        name: of the worker of this process's RPC group.
        channel: between the ranks.
        settings: the arguments of :class:`pibroch.servers.plan_service.PlanService`, the same on
            all ranks.
        count: hears the purpose and the number of bytes that travel, on the planner thread.

    Raises:
        ConfigError: when ranks want different things.
        TrainingError: when the oracle cannot be reached.
    """

    tells_rows = False

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
        self._life = 0
        with self._workers.explained(name):
            self._workers.configure(name, plan_service.configure, settings).wait()

    def fail(self, error: BaseException) -> None:
        """See :class:`Planner`."""
        self._answers.fail(error)

    def _tell(self, feed: int, announcement: Announcement) -> None:
        self._answers.submit(self._thread, partial(self._send_step, feed, announcement))

    def _send_step(self, feed: int, announcement: Announcement) -> None:
        lanes = announcement.here.lanes
        encoded = np.concatenate([each.encoded for each in lanes])
        self._count("ids", encoded.nbytes)
        step = self._log.add(
            feed, [len(each.grouped.rows) for each in lanes], torch.from_numpy(encoded)
        )
        with span("add"):
            self._say(lambda: self._tell_step(step))

    def _tell_step(self, step: LoggedStep) -> None:
        arguments = step.number, step.feed, list(step.num_rows), step.encoded
        self._call(plan_service.add, *arguments, heard=self._notice)

    def _ask(self, number: int, request: PlanRequest) -> Future[Any]:
        answer = self._answers.expect(number)
        self._answers.submit(self._thread, partial(self._send_request, number, request))
        return answer

    def _send_request(self, number: int, request: PlanRequest) -> None:
        assert number == self._log.ask(request), "requests come in their order"
        self._say(lambda: self._ask_for(number, request))

    def _ask_for(self, number: int, request: PlanRequest) -> None:
        def give(called: torch.futures.Future[Any]) -> None:
            self._log.answer(number)
            self._answers.give(number, partial(self._decoded, request.kind, called))

        self._call(
            plan_service.ask, number, request.kind, request.feed, request.num_steps, heard=give
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

    def _notice(self, called: torch.futures.Future[Any]) -> None:
        try:
            with self._workers.explained(self._name):
                called.value()
        except Exception as error:
            self.fail(error)

    def _call(self, function: Callable[..., object], *args: object, heard: OnHeard) -> None:
        """Call the oracle; ``heard`` gets the answer on this thread, unless the oracle is lost before it has given one."""
        life = self._life
        called: torch.futures.Future[Any] = self._workers.call(
            self._name, function, self._workers.key, self._rank, *args
        )

        def take() -> None:
            if life != self._life:
                return  # said again since
            try:
                called.value()
            except (WorkerLostError, UnknownWorkerError) as error:
                self._recover(out_of_reach("oracle", self._name, error))
            except Exception:
                heard(called)
            else:
                heard(called)

        called.add_done_callback(lambda _: self._answers.submit(self._thread, take))

    def _say(self, call: Callable[[], None]) -> None:
        """Make a call of what was noted before.

        With an oracle that is lost it is made with all the others.
        """
        try:
            call()
        except TrainingError as error:
            self._recover(error)

    def _recover(self, error: TrainingError) -> None:
        """Wait until another oracle is there, and tell it all again.

        Raises:
            TrainingError: when none comes, or there was too much to keep.
        """
        deadline = time.monotonic() + COME_BACK_S
        logger.warning("%s: another one is waited for", error.got)
        while self._log.is_whole and error.is_loss and time.monotonic() < deadline:
            self._life += 1
            try:
                self._tell_again()
            except TrainingError as again:
                error = again
                time.sleep(_POLL_S)
            else:
                logger.info("an oracle is back, and heard of %d steps again", len(self._log.steps))
                return
        raise error

    def _tell_again(self) -> None:
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
            workers.key,
            self._rank,
            log.first_step,
            log.first_request,
            answered,
        )
        for step in log.steps:
            self._tell_step(step)
        for number, request in log.unanswered():
            self._ask_for(number, request)
