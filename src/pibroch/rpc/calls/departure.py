"""Leaving together: no worker leaves before all want to and no call is under way any more.

Threads: ``wait`` runs in the thread that calls ``shutdown``; the handlers run on the leader's loop.
The lock guards the barrier between them.
"""

from __future__ import annotations

import threading
import time

import torch

from pibroch.errors import RpcError, RpcTimeoutError, WorkerLostError
from pibroch.rpc.calls.agent import Agent
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.values.messages import Absent, Arrived

_CHECK_AGAIN_S = 0.005
_ABSENT_S = 2.0  # timeout of the leader's answer about who is missing


class Departure:
    """Rounds of a barrier at the worker with the lowest id, the leader.

    In each round every worker waits until it is idle and sends how many calls it has started so
    far. When the sum is that of the round before, no call was started since, so none is under way,
    and all may leave.

    Args:
        agent: this worker's agent.
        world_size: how many leave together; ``None`` when each leaves on its own.
    """

    def __init__(self, agent: Agent, world_size: int | None) -> None:
        self._agent = agent
        self._world_size = world_size
        self._lock = threading.Lock()
        self._waiting: dict[int, torch.futures.Future[bool]] = {}
        self._sum = 0
        self._last_sum: int | None = None
        self._lost: dict[int, str] = {}  # workers that were lost and have not arrived since
        agent.serve(Arrived, self._on_arrived)
        agent.serve(Absent, self._on_absent)
        agent.when_lost(self._on_lost)

    def wait(self, timeout_s: float) -> None:
        """Wait until this worker may leave.

        Raises:
            WorkerLostError: another one was lost first.
            RpcTimeoutError: not all arrived in time.
        """
        deadline = time.monotonic() + timeout_s
        if self._world_size is None:
            self._be_idle(deadline)
            return
        leader = self._agent.find(0)
        may_leave = False
        round_ = 0
        while not may_leave:
            self._be_idle(deadline)
            left_s = max(0.001, deadline - time.monotonic())
            # requests of the barrier itself, one a round, do not count
            message = Arrived(round_, self._agent.num_started - round_)
            try:
                may_leave = self._agent.request_sync(
                    leader, message, timeout=min(left_s, threading.TIMEOUT_MAX / 2)
                )
            except RpcTimeoutError as error:
                raise self._too_late(leader, timeout_s) from error
            round_ += 1

    def _too_late(self, leader: WorkerInfo, timeout_s: float) -> RpcTimeoutError:
        """The error with the names of those that have not arrived, or of a silent leader."""
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
        """Answer with the workers that have not arrived (at the leader, on its loop)."""
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
            time.sleep(_CHECK_AGAIN_S)

    def _on_arrived(
        self, origin: WorkerInfo, message: Arrived, value: object
    ) -> torch.futures.Future[bool]:
        """Answer all workers once the last has arrived (at the leader, on its loop)."""
        answer: torch.futures.Future[bool] = torch.futures.Future()
        with self._lock:
            self._lost.pop(origin.id, None)
            if self._lost:
                raise _lost_error(next(iter(self._lost.values())))
            is_first = not self._waiting
            self._waiting[origin.id] = answer
            self._sum += message.num_started
            if len(self._waiting) < (self._world_size or 1):
                if is_first:
                    self._reach_the_others()
                return answer
            waiting = self._waiting
            self._waiting = {}
            may_leave = self._sum == self._last_sum
            self._last_sum = self._sum
            self._sum = 0
        # its own answer last, as this worker may leave as soon as it has it
        own = waiting.pop(self._agent.info.id)
        for each in (*waiting.values(), own):
            each.set_result(may_leave)
        return answer

    def _on_lost(self, worker: WorkerInfo, incarnation: int) -> None:
        """Fail the barrier when a worker is lost; if it comes back, it arrives at the next one."""
        with self._lock:
            waiting = self._waiting
            self._waiting = {}
            self._sum = 0
            self._lost[worker.id] = worker.name
        for each in waiting.values():
            if not each.done():
                each.set_exception(_lost_error(worker.name))  # type: ignore[arg-type]

    def _reach_the_others(self) -> None:
        """Connect to each worker, which shows whether it lives (under the lock)."""
        for worker in self._agent.workers():
            if worker.id != self._agent.info.id and worker.id not in self._waiting:
                self._agent.reach(worker)


def _lost_error(name: str) -> WorkerLostError:
    return WorkerLostError(name, "it was lost before it wanted to leave")
