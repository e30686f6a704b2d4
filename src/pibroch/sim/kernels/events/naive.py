"""What running a graph of tasks means, in plain Python: time goes on from end to end of a task."""

from __future__ import annotations

from collections.abc import Sequence


def run(
    resource: Sequence[int],
    work: Sequence[float],
    capacity: Sequence[float],
    bucket: Sequence[float],
    successors: Sequence[Sequence[int]],
) -> tuple[list[float], list[float]]:
    """When each task begins and ends; O(tasks * tasks).

    Args:
        resource: of each task; -1 for one that shares nothing and takes ``work`` seconds.
        work: of each task, in seconds of a resource that it has to itself.
        capacity: of each resource, how many tasks go at full speed beside each other.
        bucket: of each resource, how much work it saves up while it has no task; full at first.
        successors: of each task those that wait for its end.

    Example:
        >>> run([0, 0, 0], [1.0, 1.0, 1.0], [1.0], [0.0], [[2], [], []])
        ([0.0, 0.0, 2.0], [2.0, 2.0, 3.0])
    """
    size = len(work)
    waiting = [0] * size
    for after in successors:
        for each in after:
            waiting[each] += 1
    begin = [float("nan")] * size
    end = [float("nan")] * size
    left = list(map(float, work))
    saved = list(map(float, bucket))
    active: list[int] = []
    now = 0.0

    def start(task: int) -> None:
        begin[task] = now
        active.append(task)
        if resource[task] >= 0:
            at_once = min(left[task], saved[resource[task]])
            left[task] -= at_once
            saved[resource[task]] -= at_once

    for task in range(size):
        if waiting[task] == 0:
            start(task)
    while active:
        shared = {
            each: sum(resource[task] == each for task in active) for each in range(len(capacity))
        }
        speed = {
            task: 1.0
            if resource[task] < 0
            else min(1.0, capacity[resource[task]] / shared[resource[task]])
            for task in active
        }
        passed = min(left[task] / speed[task] for task in active)
        now += passed
        for each, num_tasks in shared.items():
            if num_tasks == 0:
                saved[each] = min(bucket[each], saved[each] + passed)
        for task in active:
            left[task] -= passed * speed[task]
        done = [task for task in active if left[task] <= 1e-12]
        active = [task for task in active if left[task] > 1e-12]
        for task in done:
            end[task] = now
            for each in successors[task]:
                waiting[each] -= 1
                if waiting[each] == 0:
                    start(each)
    return begin, end
