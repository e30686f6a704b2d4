"""Copies of partitions (OPER, Sec. 4.3).

For inference they are made along the worst links, for training everywhere or nowhere.

Policies:

- ``links``: Algorithm 1. Any shard may hold a copy, so an address depends on the reader: for
  inference alone.
- ``everywhere``: the most read partitions for their bytes on all shards, while they fit.
- ``frequency``: of them, those read more often than ``BW_p2p / (B BW_ar)`` a sample (Eq. 4 and 5),
  for training. It counts accesses; where duplicates are combined before they travel, as here, it
  sends more than it saves.
- ``safe``: of them, those that every batch reads. A row that is not replicated costs ``2 (W - 1) S
  u(b)`` a step in all, fetches and gradients, a replicated one ``(W - 1) S (u(b) + u(b W))`` by a
  sparse all-reduce; both are equal where u(b) = 1, and the second is more everywhere else. So
  training loses no byte by it, and has these rows at hand without a fetch.
- ``none``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pibroch.errors import ConfigError
from pibroch.planner.balance import by_worth
from pibroch.planner.cost import distinct
from pibroch.planner.kernels import placement as kernels
from pibroch.planner.partition import Partitions
from pibroch.planner.topology import ClusterTopology

Floats = NDArray[np.float64]
Policy = Literal["links", "everywhere", "frequency", "safe", "none"]
Mode = Literal["inference", "training"]
POLICIES: dict[Mode, tuple[Policy, ...]] = {
    "inference": ("links", "everywhere", "none"),
    "training": ("safe", "frequency", "everywhere", "none"),
}
"""By mode those that it can use, the default first."""


def as_mode(name: str) -> Mode:
    """The mode of a name.

    Raises:
        ConfigError: when there is none.
    """
    for mode in POLICIES:
        if mode == name:
            return mode
    raise ConfigError(f"mode {name!r}", f"one of {', '.join(POLICIES)}", "make the plan anew")


def as_policy(name: str) -> Policy:
    """The policy of a name.

    Raises:
        ConfigError: when there is none.
    """
    for policy in {each for policies in POLICIES.values() for each in policies}:
        if policy == name:
            return policy
    raise ConfigError(f"policy {name!r}", "one of `pibroch plan --help`", "make the plan anew")


@dataclass(slots=True)
class PlacedPartitions:
    """A placement of partitions.

    Attributes:
        home: int64 ``[P]``.
        held: bool ``[P, W]``, home and copies.
        source: int16 ``[P, W]``, the shard from which each reads.
    """

    home: NDArray[np.int64]
    held: NDArray[np.bool_]
    source: NDArray[np.int16]

    @property
    def copies(self) -> NDArray[np.bool_]:
        """The holders besides the home, bool ``[P, W]``."""
        copies = self.held.copy()
        copies[np.arange(len(self.home)), self.home] = False
        return copies


def without_copies(home: NDArray[np.int64], num_shards: int) -> PlacedPartitions:
    """Homes alone."""
    held = np.zeros((len(home), num_shards), bool)
    held[np.arange(len(home)), home] = True
    return PlacedPartitions(
        home, held, np.repeat(home[:, None].astype(np.int16), num_shards, axis=1)
    )


def along_links(
    home: NDArray[np.int64], weight: Floats, memory: Floats, cost: Floats, room: Floats
) -> PlacedPartitions:
    """Algorithm 1, mended: the shard with most room copies what relieves its worst link.

    It goes on until nothing fits.

    Differs from the paper, beside what ``kernels.placement`` says: shards do not take turns, the
    one with most free memory is next. Else one that is full early keeps the links that others'
    later copies turn to.
    """
    placed = without_copies(home, len(room))
    available = np.maximum(room - np.bincount(home, memory, len(room)), 0.0)
    link = np.tile(np.bincount(home, weight, len(room)), (len(room), 1)) * cost
    order = by_worth(weight, memory)
    nearer = kernels.nearer_shards(cost)
    kernels.replicate(
        order, weight, memory, home, cost, nearer, available, placed.held, placed.source, link
    )
    return placed


def everywhere(
    home: NDArray[np.int64], chosen: NDArray[np.int64], memory: Floats, cost: Floats, room: Floats
) -> PlacedPartitions:
    """Copies of the chosen partitions, in their order, on all shards, while there is room."""
    placed = without_copies(home, len(room))
    used = np.bincount(home, memory, len(room))
    kernels.copy_everywhere(chosen, memory, room, used, placed.held)
    kernels.find_sources(home, placed.held, cost, kernels.nearer_shards(cost), placed.source)
    return placed


def candidates(
    policy: Policy, partitions: Partitions, weight: Floats, topology: ClusterTopology
) -> NDArray[np.int64]:
    """Partitions that a policy may copy everywhere, the most worthy first."""
    order = by_worth(weight, partitions.memory_bytes)
    order = order[weight[order] > 0]
    if policy == "frequency":
        most = topology.p2p_bandwidth / topology.all_reduce_bandwidth
        return order[(partitions.accesses > most * partitions.num_rows)[order]]
    if policy == "safe":
        return order[(partitions.transfers >= partitions.num_rows)[order]]
    return order if policy in ("everywhere", "links") else order[:0]


def synchronisation(partitions: Partitions, placed: PlacedPartitions, num_shards: int) -> Floats:
    """Bytes that i sends to j a step so that training's weights stay right, ``[W, W]``.

    Gradients go to the home, each distinct row once; of replicated rows the home sends the sum to
    all, if any rank read the row: ``u(b W) = 1 - (1 - u(b)) ** W``. Weights alone: ids, too,
    travel.
    """
    out = np.zeros((num_shards, num_shards))
    share = np.minimum(1.0, partitions.transfers / np.maximum(1, partitions.num_rows))
    read = partitions.transfers * partitions.weight_bytes
    summed = distinct(share, num_shards) * partitions.num_rows * partitions.weight_bytes
    is_copied = placed.held.sum(axis=1) > 1
    out += np.bincount(placed.home, read, num_shards)
    out += np.bincount(placed.home, summed * is_copied, num_shards)[:, None]
    np.fill_diagonal(out, 0.0)
    return out
