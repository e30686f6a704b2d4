"""Plans drawn at random that give each row a home of its own."""

import numpy as np

import pibroch as pb
from pibroch.planner.assignment import Assignment


def random_plan(tables, num_shards, seed, copies, partial=False):
    """A plan of so many shards, on which some may hold nothing.

    ``copies`` of some partitions lie everywhere.

    ``partial`` ones of others lie on some shards.
    """
    rng = np.random.default_rng([seed, num_shards])
    num_partitions = int(rng.integers(1, 12))
    home = rng.integers(0, num_shards, num_partitions).astype(np.uint16)
    copied = rng.random((num_partitions, 1)) < (0.4 if copies else 0.0)
    copied = copied | (partial & (rng.random((num_partitions, num_shards)) < 0.5))
    assignment = Assignment(
        {
            table.name: rng.integers(0, num_partitions, table.num_rows).astype(np.uint16)
            for table in tables
        },
        home,
        copied & (home[:, None] != np.arange(num_shards)),
    )
    return pb.Plan.by_rows(assignment)
