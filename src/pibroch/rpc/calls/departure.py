"""Leaving together: nobody goes before all want to and nothing is under way any more."""

from __future__ import annotations

import threading
import time

import torch

from pibroch.errors import RpcError, RpcTimeoutError, WorkerLostError
from pibroch.rpc.calls.agent import Agent
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.values.messages import Absent, Arrived

_LOOK_AGAIN_S = 0.005
_ABSENT_S = 2.0  # for the leader to say who is missing


class Departure:
    """Rounds of a barrier at the worker with the lowest id.

    In each round every worker waits until it is idle and says how many calls it has started in its
    life. When the sum is that of the round before, no call was started since, so none is under way,
    and all may go.

    Args:
        agent: this worker's.
        world_size: how many leave together; ``None`` when each leaves on its own.
    """

    def __init__(self, agent: Agent, world_size: int | None) -> None:
        self._agent = agent
        self._world_size = world_size
        self._lock = threading.Lock()
        self._waiting: dict[int, torch.futures.Future[bool]] = {}
        self._sum = 0
        self._last_sum: int | None = None
        self._gone: dict[int, str] = {}  # workers that were lost, and have not come back to arrive
        agent.serve(Arrived, self._on_arrived)
        agent.serve(Absent, self._on_absent)
        agent.when_lost(self._on_lost)

    def wait(self, timeout_s: float) -> None:
        """Wait until this worker may go.

        Raises:
            WorkerLostError: another one was lost first.
            RpcTimeoutError: not all came in time.
        """
        deadline = time.monotonic() + timeout_s
        if self._world_size is None:
            self._be_idle(deadline)
            return
        leader = self._agent.find(0)
        may_go = False
        round_ = 0
        own = 0  # this worker's own part of the barrier is no work
        while not may_go:
            self._be_idle(deadline)
            left = max(0.001, deadline - time.monotonic())
            own += 1
            message = Arrived(round_, self._agent.num_started - own)
            try:
                may_go = self._agent.request_sync(
                    leader, message, timeout=min(left, threading.TIMEOUT_MAX / 2)
                )
            except RpcTimeoutError as error:
                raise self._too_late(leader, timeout_s) from error
            round_ += 1

    def _too_late(self, leader: WorkerInfo, timeout_s: float) -> RpcTimeoutError:
        """The error that names those who have not arrived.

        The leader alone when it does not answer either.
        """
        try:
            names = self._agent.request_sync(leader, Absent(), timeout=_ABSENT_S)
        except RpcError:
            names = [leader.name]
        return RpcTimeoutError(
            f"no sign within {timeout_s:g} s that {', '.join(f'worker {name!r}' for name in names)}"
            " wants to leave",
            "all workers in shutdown()",
            "see their logs: they may be at work, stopped, or still in a call; or shut down with"
            " graceful=False",
        )

    def _on_absent(self, origin: WorkerInfo, message: Absent, value: object) -> list[str]:
        """At the leader, on its loop."""
        with self._lock:
            return [
                worker.name for worker in self._agent.workers() if worker.id not in self._waiting
            ]

    def _be_idle(self, deadline: float) -> None:
        while self._agent.is_busy(but=len(self._waiting)):
            if time.monotonic() > deadline:
                raise RpcTimeoutError(
                    "calls under way",
                    "none, to leave",
                    "wait for their futures, or shut down with graceful=False",
                )
            time.sleep(_LOOK_AGAIN_S)

    def _on_arrived(
        self, origin: WorkerInfo, message: Arrived, value: object
    ) -> torch.futures.Future[bool]:
        """At the leader, on its loop."""
        answer: torch.futures.Future[bool] = torch.futures.Future()
        with self._lock:
            self._gone.pop(origin.id, None)
            if self._gone:
                raise _gone_error(next(iter(self._gone.values())))
            is_first = not self._waiting
            self._waiting[origin.id] = answer
            self._sum += message.num_started
            if len(self._waiting) < (self._world_size or 1):
                if is_first:
                    self._reach_the_others()
                return answer
            waiting = self._waiting
            self._waiting = {}
            may_go = self._sum == self._last_sum
            self._last_sum = self._sum
            self._sum = 0
        # last: as soon as it has its own answer this worker may be gone
        own = waiting.pop(self._agent.info.id)
        for each in (*waiting.values(), own):
            each.set_result(may_go)
        return answer

    def _on_lost(self, worker: WorkerInfo, incarnation: int) -> None:
        """Nobody waits for one that will never come (it may come back, but not to this barrier)."""
        with self._lock:
            waiting = self._waiting
            self._waiting = {}
            self._sum = 0
            self._gone[worker.id] = worker.name
        for each in waiting.values():
            if not each.done():
                each.set_exception(_gone_error(worker.name))  # type: ignore[arg-type]

    def _reach_the_others(self) -> None:
        """A connection to each worker shows whether it lives (under the lock)."""
        for worker in self._agent.workers():
            if worker.id != self._agent.info.id and worker.id not in self._waiting:
                self._agent.reach(worker)


def _gone_error(name: str) -> WorkerLostError:
    return WorkerLostError(name, "it was lost before it wanted to leave")
