"""The plans of topic ``retrieve``, made from earlier samples than those that are measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.cases import Arrays, Case
from pibroch.planner import Placement, Plan
from pibroch.planner.assignment import Assignment
from pibroch.planner.make import PlanOptions, make_plan
from pibroch.planner.partition import TableSize
from pibroch.planner.profile import AccessProfile, TableCounts
from pibroch.planner.topology import ClusterTopology

EXTRA = 0.05
WITHIN_HOST = 0.01
"""Cost of a byte of a neighbour's memory, where one from another host costs 1."""


def profile_of(ids_NFB: NDArray[np.int64], num_rows: int) -> AccessProfile:
    """Accesses of batches of one rank, ``[N, F, B]``."""
    num_batches, num_tables, batch_size = ids_NFB.shape
    tables = {}
    for table in range(num_tables):
        accesses = np.bincount(ids_NFB[:, table].ravel(), minlength=num_rows).astype(np.int64)
        occurs = np.zeros(num_rows, np.int32)
        for ids in ids_NFB[:, table]:
            occurs[np.unique(ids)] += 1
        tables[f"C{table}"] = TableCounts(accesses, occurs)
    return AccessProfile(
        tables, num_batches * batch_size, num_batches, batch_size, "earlier samples"
    )


def elsewhere(assignment: Assignment) -> Assignment:
    """The same with each row's home on the next shard, but for rows that all have."""
    home = (assignment.home.astype(np.int64) + 1) % assignment.num_shards
    return replace(
        assignment, home=np.where(assignment.is_everywhere, assignment.home, home).astype(np.uint16)
    )


def write_plans(
    earlier: NDArray[np.int64], case: Case, num_hosts: int, ranks_per_host: int, folder: Path
) -> dict[str, str]:
    """Plans by name, as files.

    Homes alone; with copies for inference; with copies for training; training with other homes;
    tables dealt out in turn.

    Args:
        earlier: ids of one rank's batches, ``[N, F, B]``.
        case: what is measured.
        num_hosts: that there are.
        ranks_per_host: on each.
        folder: for the files.
    """
    record = 4 * (case.dim + 1)
    weights = [
        TableSize(f"C{t}", case.num_rows, 4 * case.dim, 4 * case.dim)
        for t in range(case.num_tables)
    ]
    records = [
        TableSize(f"C{t}", case.num_rows, record, 4 * case.dim) for t in range(case.num_tables)
    ]
    topology = ClusterTopology.of(
        {"hosts": [ranks_per_host] * num_hosts, "within_host": WITHIN_HOST, "between_hosts": 1.0},
        "the lab",
    )
    profile = profile_of(earlier, case.num_rows)
    world_size = num_hosts * ranks_per_host
    plans = {}
    wanted = {
        "placed": (weights, PlanOptions(extra=0.0, steps=False)),
        "copied": (weights, PlanOptions(extra=EXTRA, steps=False)),
        "training": (records, PlanOptions(extra=EXTRA, mode="training", steps=False)),
    }
    for name, (sizes, options) in wanted.items():
        assignment, _ = make_plan(sizes, profile, topology, options)
        plans[name] = Plan.by_rows(assignment)
    plans["elsewhere"] = Plan.by_rows(elsewhere(assignment))
    by_table = {
        f"C{t}": Placement(kind="table_wise", shards=(t % world_size,))
        for t in range(case.num_tables)
    }
    plans["by_table"] = Plan(num_shards=world_size, placements=by_table)
    for name, plan in plans.items():
        plan.save(folder / f"{name}.json")
    return {name: str(folder / f"{name}.json") for name in plans}


def split_in_time(
    arrays: Arrays, world_size: int, num_measured: int
) -> tuple[NDArray[np.int64], Arrays]:
    """Ids of a rank's batches that come first, and the last ones as global batches.

    Args:
        arrays: of a rank's batches, in the order of time.
        world_size: ranks that measure.
        num_measured: global batches.
    """
    count = num_measured * world_size
    last = slice(len(arrays) - count, None)

    def joined(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.ascontiguousarray(numbers[last].reshape(num_measured, -1, *numbers.shape[2:]))

    num_tables, batch_size = arrays.ids.shape[1:]
    ids = (
        arrays.ids[last]
        .reshape(num_measured, world_size, num_tables, batch_size)
        .transpose(0, 2, 1, 3)
    )
    together = np.ascontiguousarray(ids.reshape(num_measured, num_tables, -1))
    return arrays.ids[:-count], Arrays(together, joined(arrays.dense), joined(arrays.labels))
