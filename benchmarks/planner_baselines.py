"""What a plan is measured against (OPER, Sec. 6.4).

These placements look at memory, accesses or tables alone. Each is a cost, not a plan: memory,
lookups and traffic of W shards a step. None has copies.

- ``memory_greedy``: equal bytes of each table's rows on each shard, in the order of the rows.
- ``access_greedy``: row by row by falling accesses, to the shard with the fewest so far.
- ``table_wise``: whole tables, the largest first to the emptiest shard (by bytes).
- ``row_wise``: row r of each table on shard r mod W.
- ``column_wise``: a W-th of each row's columns on each shard.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.policy import kernel
from pibroch.planner.cost import distinct
from pibroch.planner.partition import Form, TableSize
from pibroch.planner.profile import AccessProfile, TableCounts

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a placement without copies costs a step.

    Attributes:
        memory_bytes: ``[W]``.
        served: by form, bytes that one reader gets from each shard, ``[W]``.
    """

    memory_bytes: Floats
    served: Mapping[Form, Floats]

    def traffic(self, form: Form) -> Floats:
        """What rank i gets from shard j, ``[W, W]``: all readers read alike."""
        return np.tile(self.served[form], (len(self.memory_bytes), 1))

    def lookup_bytes(self) -> Floats:
        """Bytes that each shard looks up for all readers, ``[W]``."""
        return self.served["accesses"] * len(self.memory_bytes)


def baselines(
    tables: Sequence[TableSize],
    profile: AccessProfile,
    num_shards: int,
    batch_size: int | None = None,
) -> dict[str, Baseline]:
    """All of them by name; O(N log N) in the rows for ``access_greedy``, O(N) for the others."""
    profile.check(tables)
    homes: dict[str, Callable[[TableSize, TableCounts], NDArray[np.integer] | None]] = {
        "memory_greedy": lambda table, counts: (
            np.arange(table.num_rows) * num_shards // table.num_rows
        ),
        "row_wise": lambda table, counts: np.arange(table.num_rows) % num_shards,
        "column_wise": lambda table, counts: None,
    }
    by_table = _table_wise(tables, num_shards)
    homes["table_wise"] = lambda table, counts: np.full(table.num_rows, by_table[table.name])
    baselines = {
        name: _sum(tables, profile, num_shards, batch_size, home) for name, home in homes.items()
    }
    baselines["access_greedy"] = _access_greedy(tables, profile, num_shards, batch_size)
    return baselines


def _table_wise(tables: Sequence[TableSize], num_shards: int) -> dict[str, int]:
    heap = [(0, shard) for shard in range(num_shards)]
    home = {}
    for table in sorted(tables, key=lambda table: -table.num_rows * table.record_bytes):
        used, shard = heapq.heappop(heap)
        home[table.name] = shard
        heapq.heappush(heap, (used + table.num_rows * table.record_bytes, shard))
    return home


def _amounts(
    table: TableSize, counts: TableCounts, profile: AccessProfile, batch_size: int | None
) -> tuple[Floats, Floats]:
    """Bytes of each row that one reader gets in a step, in both forms."""
    batch = batch_size or profile.batch_size
    accesses: Floats = np.asarray(counts.accesses * (batch / profile.num_samples), np.float64)
    share: Floats = np.asarray(counts.batches / profile.num_batches, np.float64)
    exponent = batch / min(profile.batch_size, profile.num_samples)
    if exponent != 1:
        share = distinct(share, exponent)
    return accesses * table.weight_bytes, np.asarray(
        np.minimum(share, accesses) * table.weight_bytes
    )


def _sum(
    tables: Sequence[TableSize],
    profile: AccessProfile,
    num_shards: int,
    batch_size: int | None,
    home_of: Callable[[TableSize, TableCounts], NDArray[np.integer] | None],
) -> Baseline:
    memory = np.zeros(num_shards)
    reads = np.zeros(num_shards)
    transfers = np.zeros(num_shards)
    for table in tables:
        counts = profile.tables[table.name]
        home = home_of(table, counts)
        amounts = _amounts(table, counts, profile, batch_size)
        if home is None:
            memory += table.num_rows * table.record_bytes / num_shards
            for total, amount in zip((reads, transfers), amounts, strict=True):
                total += amount.sum() / num_shards
            continue
        memory += np.bincount(home, minlength=num_shards) * table.record_bytes
        for total, amount in zip((reads, transfers), amounts, strict=True):
            total += np.bincount(home, amount, num_shards)
    return Baseline(memory, {"accesses": reads, "transfers": transfers})


def _access_greedy(
    tables: Sequence[TableSize], profile: AccessProfile, num_shards: int, batch_size: int | None
) -> Baseline:
    amounts = [_amounts(table, profile.tables[table.name], profile, batch_size) for table in tables]
    reads, transfers = (np.concatenate(parts) for parts in zip(*amounts, strict=True))
    memory = np.repeat(
        [float(table.record_bytes) for table in tables], [table.num_rows for table in tables]
    )
    order = np.argsort(-reads, kind="stable")
    sums = np.zeros((3, num_shards))
    _to_least_read(order, reads, transfers, memory, sums)
    return Baseline(sums[2], {"accesses": sums[0], "transfers": sums[1]})


@kernel
def _to_least_read(
    order: NDArray[np.int64], reads: Floats, transfers: Floats, memory: Floats, sums: Floats
) -> None:
    """Add each row to the shard with the fewest reads so far; the first of equals."""
    for place in range(len(order)):
        row = order[place]
        best = 0
        for shard in range(sums.shape[1]):
            if sums[0, shard] < sums[0, best]:
                best = shard
        sums[0, best] += reads[row]
        sums[1, best] += transfers[row]
        sums[2, best] += memory[row]
