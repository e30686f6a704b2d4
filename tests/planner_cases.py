"""Profiles and problems for the planner's tests."""

import numpy as np

from pibroch.planner.partition import Partitioner, TableSize
from pibroch.planner.profile import AccessProfile, TableCounts
from pibroch.planner.topology import ClusterTopology


def zipf_profile(num_rows, num_accesses, exponent=1.05, seed=0, batch_size=256):
    """Tables of these numbers of rows, each read once a sample."""
    rng = np.random.default_rng(seed)
    tables = {}
    num_batches = -(-num_accesses // batch_size)
    for name, rows in num_rows.items():
        share = 1 / np.arange(1, rows + 1) ** exponent
        share /= share.sum()
        accesses = rng.permutation(rng.poisson(share * num_accesses).astype(np.int64))
        occurs = num_batches * -np.expm1(-accesses / num_batches)
        tables[name] = TableCounts(accesses, np.ceil(occurs - 1e-9).astype(np.int32))
    return AccessProfile(tables, num_accesses, num_batches, batch_size, f"zipf {seed}")


def sizes(profile, weight_bytes=64, record_bytes=64):
    return [
        TableSize(name, rows, weight_bytes, record_bytes) for name, rows in profile.num_rows.items()
    ]


def random_case(seed, most_rows=20_000):
    """Tables of several widths and skews, a flat or hierarchical topology, a budget.

    At least 10,000 rows.
    """
    rng = np.random.default_rng(seed)
    num_shards = int(rng.choice([2, 3, 4, 6, 8]))
    topology = ClusterTopology.uniform(num_shards)
    if num_shards % 2 == 0 and rng.random() < 0.5:
        topology = ClusterTopology.hierarchical(2, num_shards // 2, float(rng.uniform(1.5, 6)))
    num_tables = int(rng.integers(1, 6))
    num_accesses = int(rng.integers(10_000, 200_000))
    tables = []
    results = {}
    for number in range(num_tables):
        rows = int(rng.integers(10_000 // num_tables + 1, most_rows))
        name = f"t{number}"
        dim = int(rng.choice([8, 16, 32]))
        profile = zipf_profile(
            {name: rows}, num_accesses, rng.uniform(0.6, 1.3), seed * 10 + number, 100
        )
        results |= profile.tables
        tables.append(TableSize(name, rows, 4 * dim, 4 * dim + int(rng.choice([0, 4]))))
    profile = AccessProfile(results, num_accesses, -(-num_accesses // 100), 100, "random")
    return tables, profile, topology, float(rng.choice([0.01, 0.02, 0.05, 0.1, 0.2]))


def few_rows(seed):
    """At most 40 rows: weight and memory of each, a topology, room."""
    rng = np.random.default_rng(seed)
    num_shards = int(rng.choice([2, 3, 4]))
    num_rows = int(rng.integers(20, 41))
    topology = ClusterTopology.uniform(num_shards)
    if num_shards == 4 and rng.random() < 0.5:
        topology = ClusterTopology.hierarchical(2, 2, float(rng.uniform(1.5, 5)))
    counts = rng.permutation(
        np.round(1000 / np.arange(1, num_rows + 1) ** rng.uniform(0.3, 1.2)) + 1
    ).astype(np.int64)
    dims = np.ones(num_rows, int) if rng.random() < 0.5 else rng.choice([1, 2], num_rows)
    tables = []
    results = {}
    for dim in (1, 2):
        own = counts[dims == dim]
        if len(own):
            results[f"t{dim}"] = TableCounts(own, np.minimum(own, 1000).astype(np.int32))
            tables.append(TableSize(f"t{dim}", len(own), 4 * dim, 4 * dim))
    profile = AccessProfile(results, 1000, 1000, 1, "few")
    memory = 4.0 * dims.sum()
    extra = rng.choice([0.1, 0.2, 0.4])
    room = np.full(
        num_shards,
        4 * np.ceil(memory / 4 * (1 + extra) / num_shards) + (4 if dims.max() > 1 else 0),
    )
    return Partitioner(tables, profile).cut(0.0), topology, room
