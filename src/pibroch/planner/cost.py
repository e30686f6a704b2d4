"""What a placement costs: OPER, Eq. 1 to 3, as array functions.

P partitions, W shards. Weights are bytes that one rank reads in a step, in one of two forms:

- *accesses*, as the paper counts: a row that is read three times in a batch counts three times, ``b
  p`` of b samples;
- *transfers*, what travels here: a row is sent to a rank once a step, ``u(b) = 1 - (1 - p) ** b``,
  or the share of batches in which it occurs.

Differs from the paper: Eq. 3 has ``L[j][j]`` where ``L[i][j]`` is meant; memory counts whole
records (weights and optimizer state), communication weights alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.planner.kernels import placement as kernels

Floats = NDArray[np.float64]
Shards = NDArray[np.int16]


def distinct(share: Floats, num_draws: float) -> Floats:
    """Probability that something of probability ``share`` occurs in ``num_draws`` draws.

    ``u(b) = 1 - (1 - p) ** b``.

    >>> distinct(np.array([0.0, 0.5, 1.0]), 2).tolist()
    [0.0, 0.75, 1.0]
    """
    with np.errstate(divide="ignore"):
        return np.asarray(-np.expm1(num_draws * np.log1p(-np.clip(share, 0.0, 1.0))))


def holders(home: NDArray[np.integer], copies: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which shards hold a partition, bool ``[P, W]``."""
    held = np.array(copies, np.bool_)
    held[np.arange(len(home)), home] = True
    return np.asarray(held, np.bool_)


def sources(home: NDArray[np.integer], copies: NDArray[np.bool_], cost: Floats) -> Shards:
    """The shard from which each reads a partition, int16 ``[P, W]``: ``comm_path`` in the paper.

    One rule for planner and exchange, so that a plan need not store paths: its own memory where it
    holds the partition; else the cheapest holder; among equally cheap ones the home, else the next
    in cyclic order after the reader.

    >>> home, copies = np.array([0]), np.array([[False, False, True, False]])
    >>> sources(home, copies, 1.0 - np.eye(4)).tolist()
    [[0, 0, 2, 0]]
    """
    held = holders(home, copies)
    source = np.empty(held.shape, np.int16)
    kernels.find_sources(home.astype(np.int64), held, cost, kernels.nearer_shards(cost), source)
    return source


def memory(record_bytes: Floats, held: NDArray[np.bool_]) -> Floats:
    """Eq. 1: bytes of records on each shard, ``[W]``, by holders ``[P, W]``."""
    used = np.zeros(held.shape[1])
    kernels.add_memory(np.asarray(record_bytes, np.float64), held, used)
    return used


def served(weight: Floats, source: Shards, num_shards: int) -> Floats:
    """Eq. 2 without its factor: what each shard looks up for all readers and itself, ``[W]``."""
    return np.asarray(traffic(weight, source, num_shards).sum(axis=0))


def traffic(weight: Floats, source: Shards, num_shards: int) -> Floats:
    """What reader i gets from shard j, ``[W, W]``; its own reads on the diagonal."""
    given = np.zeros((num_shards, num_shards))
    kernels.add_traffic(weight, source, given)
    return given.T.copy()


def workload(weight: Floats, source: Shards, cost: Floats) -> Floats:
    """Eq. 2: time of lookups on each shard, ``[W]``; their bytes where own memory is free."""
    own = np.diag(cost)
    return served(weight, source, len(cost)) * np.where(own > 0, own, 1.0)


def communication(weight: Floats, source: Shards, cost: Floats) -> Floats:
    """Eq. 3: cost of what reader i gets from shard j, ``[W, W]``, with ``L[i][j]``."""
    return traffic(weight, source, len(cost)) * cost


def links(matrix: Floats) -> Floats:
    """The entries between different shards, ``[W * (W - 1)]``."""
    return np.asarray(matrix[~np.eye(len(matrix), dtype=bool)])


def degree_of_balance(values: Floats) -> float:
    """Least over most, 1 where all are equal.

    The paper uses it for memory and workload (Sec. 4.2), and for links (Table 3).

    >>> degree_of_balance(np.array([3.0, 4.0]))
    0.75
    """
    most = float(values.max(initial=0.0))
    return float(values.min()) / most if most > 0 else 1.0
