"""Heaps of shards, the one with the greatest key on top; of equal keys the lower number.

A heap is an array of which the first ``size`` entries count. ``place`` says where each shard stands
in it, -1 for nowhere, so that a shard whose key has changed moves in O(log W).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.policy import kernel

Shards = NDArray[np.int16]
Floats = NDArray[np.float64]


@kernel
def _is_above(a: int, b: int, key: Floats) -> bool:
    return bool(key[a] > key[b] or (key[a] == key[b] and a < b))


@kernel
def rise(heap: Shards, place: Shards, key: Floats, shard: int) -> None:
    """Move a shard up whose key may have grown."""
    here = place[shard]
    while here > 0:
        above = (here - 1) // 2
        if not _is_above(shard, heap[above], key):
            break
        heap[here] = heap[above]
        place[heap[here]] = here
        here = above
    heap[here] = shard
    place[shard] = here


@kernel
def sink(heap: Shards, size: int, place: Shards, key: Floats, shard: int) -> None:
    """Move a shard down whose key may have shrunk."""
    here = place[shard]
    while 2 * here + 1 < size:
        below = 2 * here + 1
        if below + 1 < size and _is_above(heap[below + 1], heap[below], key):
            below += 1
        if not _is_above(heap[below], shard, key):
            break
        heap[here] = heap[below]
        place[heap[here]] = here
        here = below
    heap[here] = shard
    place[shard] = here


@kernel
def drop_top(heap: Shards, size: int, place: Shards, key: Floats) -> int:
    """Take the top away; returns the size that is left."""
    place[heap[0]] = -1
    last = heap[size - 1]
    if size > 1:
        place[last] = 0
        sink(heap, size - 1, place, key, last)
    return size - 1


@kernel
def push(heap: Shards, size: int, place: Shards, key: Floats, shard: int) -> int:
    """Add a shard that stands nowhere; returns the size with it."""
    place[shard] = size
    rise(heap, place, key, shard)
    return size + 1
