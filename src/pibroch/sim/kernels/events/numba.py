"""Run a graph of tasks: each begins when those before it have ended, and shares its resource.

A resource of capacity c gives each of its n tasks the share ``min(1, c / n)`` of full speed. While
it has none it saves up work, to as much as its bucket holds, which it then does in no time. What
each has got since the resource was first used is its *service*, the same number for all: a task
ends when the service has grown by its work. So a resource keeps its tasks in a heap by the service
at which they end, and only the next end of each resource is an event. O(n log n) in tasks.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Ints
from pibroch.kernels.policy import kernel

Seconds = NDArray[np.float64]
NOBODY = -1
SAME = 1e-12
"""Relative: ends so close to each other are one."""


@kernel
def run(
    resource: NDArray[np.int32],
    work: Seconds,
    capacity: Seconds,
    bucket: Seconds,
    first: Ints,
    successors: NDArray[np.int32],
    begin: Seconds,
    end: Seconds,
) -> int:
    """Fill ``begin`` and ``end`` ``[N]`` with the times at which tasks begin and end.

    Args:
        resource: ``[N]``, of each task; -1 for one that shares nothing and takes ``work`` seconds.
        work: ``[N]``, in seconds of a resource that the task has to itself.
        capacity: ``[R]``, how many tasks of a resource go at full speed beside each other.
        bucket: ``[R]``, how much work a resource saves up while it has no task; full at first.
        first: ``[N + 1]``; those that wait for task n are ``successors[first[n] : first[n + 1]]``.
        successors: ``[E]``.
        begin: times.
        end: times.

    Returns:
        How many tasks have ended: fewer than N where some wait for each other.
    """
    num_tasks = len(work)
    num_resources = len(capacity)
    waiting = np.zeros(num_tasks, np.int32)
    for edge in range(len(successors)):
        waiting[successors[edge]] += 1
    service = np.zeros(num_resources)
    since = np.zeros(num_resources)
    saved = bucket.copy()
    active = np.zeros(num_resources, np.int64)
    version = np.zeros(num_resources, np.int64)
    ends_at = np.zeros(num_tasks)  # service
    # pairing heaps: the first child of each task, and the next child of its parent
    root = np.full(num_resources, NOBODY, np.int32)
    child = np.full(num_tasks, NOBODY, np.int32)
    sibling = np.full(num_tasks, NOBODY, np.int32)
    ready = np.empty(num_tasks, np.int32)
    num_ready = 0
    for task in range(num_tasks):
        if waiting[task] == 0:
            ready[num_ready] = task
            num_ready += 1
    events = [(0.0, num_resources + num_tasks, np.int64(0))]
    num_done = 0
    while len(events) > 0:
        now, source, number = heappop(events)
        ended = NOBODY
        if source < num_resources:
            if number != version[source]:  # someone has come since
                continue
            rate = min(1.0, capacity[source] / active[source])
            service[source] += (now - since[source]) * rate
            since[source] = now
            ended = root[source]
            service[source] = max(service[source], ends_at[ended])
            root[source] = _without_root(ended, ends_at, child, sibling)
            active[source] -= 1
            _announce(source, now, events, version, active, capacity, service, root, ends_at)
        elif source < num_resources + num_tasks:
            ended = source - num_resources
        if ended != NOBODY:
            num_done += 1
            end[ended] = now
            num_ready = _release(ended, first, successors, waiting, ready, num_ready)
        while num_ready > 0:
            num_ready -= 1
            task = ready[num_ready]
            begin[task] = now
            where = resource[task]
            if work[task] <= 0.0:
                num_done += 1
                end[task] = now
                num_ready = _release(task, first, successors, waiting, ready, num_ready)
            elif where < 0:
                heappush(events, (now + work[task], num_resources + task, np.int64(0)))
            else:
                if active[where] > 0:
                    rate = min(1.0, capacity[where] / active[where])
                    service[where] += (now - since[where]) * rate
                else:
                    service[where] = 0.0
                    saved[where] = min(bucket[where], saved[where] + now - since[where])
                since[where] = now
                left = work[task] - saved[where]
                saved[where] = max(0.0, -left)
                ends_at[task] = service[where] + max(0.0, left)
                root[where] = _merged(root[where], task, ends_at, child, sibling)
                active[where] += 1
                _announce(where, now, events, version, active, capacity, service, root, ends_at)
    return num_done


@kernel
def _announce(where, now, events, version, active, capacity, service, root, ends_at):  # type: ignore[no-untyped-def]
    """Make the next end of a resource's tasks an event, in place of what was one before."""
    version[where] += 1
    if active[where] == 0:
        return
    rate = min(1.0, capacity[where] / active[where])
    left = ends_at[root[where]] - service[where]
    if left <= SAME * ends_at[root[where]]:
        left = 0.0
    heappush(events, (now + left / rate, np.int64(where), version[where]))


@kernel
def _release(task, first, successors, waiting, ready, num_ready):  # type: ignore[no-untyped-def]
    """Note that a task has ended; those that waited for nothing else are ready."""
    for edge in range(first[task], first[task + 1]):
        follower = successors[edge]
        waiting[follower] -= 1
        if waiting[follower] == 0:
            ready[num_ready] = follower
            num_ready += 1
    return num_ready


@kernel
def _merged(one, other, ends_at, child, sibling):  # type: ignore[no-untyped-def]
    """The root of two heaps as one."""
    if one == NOBODY:
        return other
    if other == NOBODY:
        return one
    is_swapped = ends_at[other] < ends_at[one]
    upper = other if is_swapped else one
    lower = one if is_swapped else other
    sibling[lower] = child[upper]
    child[upper] = lower
    return upper


@kernel
def _without_root(root, ends_at, child, sibling):  # type: ignore[no-untyped-def]
    """The root of a heap whose root is taken away: its children, merged in pairs, then all."""
    pairs = NOBODY
    each = child[root]
    child[root] = NOBODY
    while each != NOBODY:
        other = sibling[each]
        sibling[each] = NOBODY
        following = NOBODY
        if other != NOBODY:
            following = sibling[other]
            sibling[other] = NOBODY
        pair = _merged(each, other, ends_at, child, sibling)
        sibling[pair] = pairs
        pairs = pair
        each = following
    result = NOBODY
    while pairs != NOBODY:
        following = sibling[pairs]
        sibling[pairs] = NOBODY
        result = _merged(result, pairs, ends_at, child, sibling)
        pairs = following
    return result
