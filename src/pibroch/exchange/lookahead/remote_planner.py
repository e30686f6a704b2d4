"""The way to an oracle in another process, which hears from each rank only what that rank touches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch

from pibroch.collectives import Channel
from pibroch.collectives.task_thread import TaskThread
from pibroch.exchange.lookahead.announcement import Announcement
from pibroch.exchange.lookahead.planners import Planner
from pibroch.lookahead import PlanRequest
from pibroch.lookahead.encoding import Parts, decode_opening, decode_plan
from pibroch.lookahead.oracle_thread import Answers
from pibroch.lookahead.requests import Answer, RequestKind
from pibroch.observability.trace import span
from pibroch.servers import plan_service
from pibroch.servers.workers import ServingWorkers


class RemotePlanner(Planner):
    """A central oracle. All ranks make their planners together.

    Args:
        thread: talks to it.
        name: of the worker of this process's RPC group.
        channel: between the ranks.
        settings: the arguments of :class:`pibroch.servers.plan_service.PlanService`, the same on all ranks.
        count: hears the purpose and the number of bytes that travel, on the planner thread.

    Raises:
        ConfigError: when ranks want different things.
        TrainingError: when the oracle cannot be reached.
    """

    tells_rows = False

    def __init__(
        self, thread: TaskThread, name: str, channel: Channel, settings: Sequence[object],
        count: Callable[[str, int], None],
    ) -> None:  # fmt: skip
        super().__init__()
        self._thread, self._name, self._rank, self._count = thread, name, channel.ranks.rank, count
        self._answers = Answers()
        self._workers = ServingWorkers("oracle", [name], channel)
        self._num_steps = 0
        with self._workers.explained(name):
            self._workers.configure(name, plan_service.configure, settings).wait()

    def fail(self, error: BaseException) -> None:
        """See :class:`Planner`."""
        self._answers.fail(error)

    def _tell(self, feed: int, announcement: Announcement) -> None:
        self._answers.submit(self._thread, partial(self._send_step, feed, announcement))

    def _send_step(self, feed: int, announcement: Announcement) -> None:
        here, number = announcement.here, self._num_steps
        self._num_steps += 1
        encoded = np.concatenate([each.encoded for each in here.lanes])
        self._count("ids", encoded.nbytes)
        with span("add"):
            counts = [len(each.grouped.rows) for each in here.lanes]
            called = self._call(plan_service.add, number, feed, counts, torch.from_numpy(encoded))
        called.add_done_callback(self._notice)

    def _ask(self, number: int, request: PlanRequest) -> Future[Any]:
        answer = self._answers.expect(number)
        self._answers.submit(self._thread, partial(self._send_request, number, request))
        return answer

    def _send_request(self, number: int, request: PlanRequest) -> None:
        called = self._call(plan_service.ask, number, request.kind, request.feed, request.num_steps)

        def give() -> None:
            self._answers.give(number, partial(self._decoded, request.kind, called))

        called.add_done_callback(lambda _: self._answers.submit(self._thread, give))

    def _decoded(self, kind: RequestKind, called: torch.futures.Future[Any]) -> Answer:
        with self._workers.explained(self._name), span(kind):
            arrays = [part.numpy() for part in called.value()]
            lanes = [Parts(*pair) for pair in zip(arrays[::2], arrays[1::2], strict=True)]
            self._count("plans", sum(parts.num_bytes for parts in lanes))
            return [decode_plan(parts) for parts in lanes] if kind == "plan" else [*map(decode_opening, lanes)]

    def _call(self, function: Callable[..., object], *args: object) -> torch.futures.Future[Any]:
        return self._workers.call(self._name, function, self._workers.key, self._rank, *args)

    def _notice(self, called: torch.futures.Future[None]) -> None:
        try:
            with self._workers.explained(self._name):
                called.value()
        except Exception as error:
            self.fail(error)
