"""Run a kernel on several threads, each on its own range.

The threads are torch's (:mod:`pibroch.kernels.team`); a few standing Python threads where those
cannot be had. Threads take ranges, never shares of a sum, so results do not depend on their number.
Of threads beside the main one, only one at a time has others work for it: the cores of the rest are
taken.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

import torch

from pibroch.kernels import team

T = TypeVar("T")
MIN_ITEMS_PER_THREAD = 512
_beside_main = threading.Lock()  # held by the one that has its team


def num_threads() -> int:
    """Threads that kernels use: as many as torch does."""
    return torch.get_num_threads()


@lru_cache(maxsize=1)
def _pool(num_workers: int, process_id: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_workers, thread_name_prefix="pibroch-kernel")


def run(
    kernel: Callable[..., object], num_items: int, *args: object, grain: int = MIN_ITEMS_PER_THREAD
) -> list[Any]:
    """Call ``kernel(*args, start, stop)`` for disjoint ranges that cover ``range(num_items)``.

    Blocks until all are done.

    Args:
        kernel: a compiled kernel that writes only what belongs to its range.
        num_items: length of the range.
        args: the kernel's arguments before ``start`` and ``stop``.
        grain: items below which a further thread is not worth waking.

    Returns:
        The kernel's results, in the order of the ranges.
    """
    if num_items < 2 * grain:
        return [kernel(*args, 0, num_items)]
    parts = max(1, min(num_threads(), num_items // grain))
    bounds = [num_items * part // parts for part in range(parts + 1)]
    return run_ranges(kernel, bounds, *args)


def run_ranges(kernel: Callable[..., object], bounds: list[int], *args: object) -> list[Any]:
    """As :func:`run`, with the ranges given: the i-th is ``bounds[i]`` to ``bounds[i + 1]``.

    Returns their results in order.
    """
    if len(bounds) <= 2:
        return [kernel(*args, bounds[0], bounds[-1])]
    if num_threads() == 1:
        return [kernel(*args, start, stop) for start, stop in pairwise(bounds)]
    if not team.can_run(kernel):
        return _run_on_pool(kernel, bounds, *args)
    if threading.current_thread() is threading.main_thread():
        return team.run(kernel, bounds, *args)
    if not _beside_main.acquire(blocking=False):
        return [kernel(*args, start, stop) for start, stop in pairwise(bounds)]
    try:
        return team.run(kernel, bounds, *args)
    finally:
        _beside_main.release()


def _run_on_pool(kernel: Callable[..., T], bounds: list[int], *args: object) -> list[T]:
    pool = _pool(num_threads() - 1, os.getpid())
    pending: list[Future[T]] = [
        pool.submit(kernel, *args, start, stop) for start, stop in pairwise(bounds[1:])
    ]
    try:
        first = kernel(*args, bounds[0], bounds[1])
    finally:
        # without a timeout: a kernel's range is finite
        others_results = [future.result() for future in pending]
    return [first, *others_results]
