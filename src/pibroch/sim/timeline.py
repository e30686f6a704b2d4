"""A graph of tasks of many ranks, made rank by rank in arrays, and its times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pibroch.errors import PibrochError
from pibroch.sim.kernels import events

Tasks = NDArray[np.int64]
Floats = NDArray[np.float64]
ALONE = -1
"""In place of a resource: the task shares nothing."""


class Timeline:
    """Tasks that begin when those before them have ended, and share resources evenly.

    Args:
        capacity: of each resource: how many tasks go at full speed beside each other.
        bucket: of each resource, seconds of work that it saves up while it has none, and then does
            at once: a link under a token bucket; none when absent.

    Example:
        >>> line = Timeline([1.0])
        >>> both = line.add(np.array([0, 0]), np.array([1.0, 1.0]))
        >>> last = line.add(np.array([ALONE]), np.array([0.5]), [line.join([both])])
        >>> line.run()[1].tolist()
        [2.0, 2.0, 2.0, 2.5]
    """

    def __init__(self, capacity: Sequence[float], bucket: Sequence[float] | None = None) -> None:
        self._capacity = np.array(capacity, np.float64)
        self._bucket = np.zeros(len(capacity)) if bucket is None else np.array(bucket, np.float64)
        self._resource: list[NDArray[np.int32]] = []
        self._work: list[Floats] = []
        self._before: list[Tasks] = []
        self._after: list[Tasks] = []
        self._num_tasks = 0

    def add(
        self, resource: NDArray[np.integer], work: Floats, after: Sequence[Tasks] = ()
    ) -> Tasks:
        """As many tasks as there are resources; returns their numbers.

        Args:
            resource: of each, or ``ALONE``.
            work: of each, in seconds of the resource alone.
            after: what they wait for: an array with one task for each, or with one for all.
        """
        tasks = np.arange(self._num_tasks, self._num_tasks + len(resource))
        self._num_tasks += len(resource)
        self._resource.append(np.asarray(resource, np.int32))
        self._work.append(np.maximum(0.0, np.broadcast_to(work, len(resource))))
        for each in after:
            self._before.append(np.broadcast_to(each, len(tasks)))
            self._after.append(tasks)
        return tasks

    def join(self, waited_for: Sequence[Tasks]) -> Tasks:
        """One task without work after all of several; ``[1]``."""
        task = self.add(np.array([ALONE]), np.zeros(1))
        for each in waited_for:
            self._before.append(each)
            self._after.append(np.broadcast_to(task, len(each)))
        return task

    def run(self) -> tuple[Floats, Floats]:
        """When each task begins and ends; O(n log n)."""
        before = np.concatenate([np.empty(0, np.int64), *self._before])
        after = np.concatenate([np.empty(0, np.int64), *self._after])
        order = np.argsort(before, kind="stable")
        first = np.searchsorted(before[order], np.arange(self._num_tasks + 1))
        begin, end = (np.zeros(self._num_tasks) for _ in range(2))
        num_done = events.run(
            np.concatenate(self._resource),
            np.concatenate(self._work),
            self._capacity,
            self._bucket,
            first,
            after[order].astype(np.int32),
            begin,
            end,
        )
        if num_done < self._num_tasks:
            raise PibrochError(
                f"{self._num_tasks - num_done} tasks that wait for each other", "an order of tasks"
            )
        return begin, end
