"""Bytes that a step of ``alltoall`` sends from rank to rank, predicted from a profile.

A row that a rank reads costs once a step, however often the rank reads it: its number to the owner,
its weights back, and its gradient to the owner; a rank's own rows cost nothing. Numbers of copied
rows are bits where most are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pibroch.config.exchange import BITS_AT_ONCE, OWNERS_POOL
from pibroch.embedding import Table
from pibroch.embedding.row_set import ids_of
from pibroch.errors import ConfigError
from pibroch.planner.assignment import Assignment
from pibroch.planner.cost import Floats, distinct
from pibroch.planner.plan import Plan
from pibroch.planner.prediction import PartitionReads
from pibroch.planner.profile import AccessProfile

Replicas = Literal["gather", "sparse", "dense"]
ID_BYTES = 4
FLOAT_BYTES = 4
HEAD_BYTES = 4 * 8
"""Of the counts that each rank sends to each other for every group of tables."""


class _Reads(NamedTuple):
    """What one rank reads a step, part by part; a part's rows lie at one place.

    Attributes:
        place: int64 ``[K]``, the shard, or W for everywhere.
        num_rows: ``[K]``.
        read: ``[K]``, distinct rows that a rank reads, expected.
        read_by_any: ``[K]``, distinct rows that any rank reads.
        columns: ``[K]``, floats of each row that lie there.
    """

    place: NDArray[np.int64]
    num_rows: Floats
    read: Floats
    read_by_any: Floats
    columns: Floats


def step_payload(
    plan: Plan,
    tables: Sequence[Table],
    profile: AccessProfile,
    *,
    replicas: Replicas = "gather",
    num_groups: int = 1,
    trains: bool = True,
    batch_size: int | None = None,
) -> Floats:
    """Expected bytes that rank i sends to rank j in a step, ``[W, W]``.

    float32 travels, dense gradients are left out.

    Args:
        plan: of all tables; rows are placed, not pooled by their owners.
        tables: that it places.
        profile: of the same tables.
        replicas: how gradients of copied rows are summed, see
            :mod:`pibroch.exchange.alltoall.copies`.
        num_groups: of tables, each of which sends counts of its own.
        trains: with gradients.
        batch_size: samples of a rank's batch; that of the profile when absent.

    Raises:
        ConfigError: for a plan that does not fit, or owners that pool.
        DataError: for a profile of other tables.
    """
    plan.check(tables)
    profile.check(tables)
    parts = []
    for table in tables:
        if plan.placements[table.name].kind in OWNERS_POOL:
            raise ConfigError(
                f"table {table.name!r} whose owner pools", "a placement whose rows travel"
            )
        parts.append(_reads_of(plan, table, _shares(profile, table.name, batch_size)))
    reads = _Reads(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    return _payload(reads, plan.num_shards, replicas, num_groups, trains)


def partition_reads(
    assignment: Assignment, tables: Sequence[Table], profile: AccessProfile
) -> PartitionReads:
    """What a plan keeps of its profile, to predict payloads of other batches without it."""
    num_partitions = len(assignment.home)
    num_rows, accesses, batches, dims = (np.zeros(num_partitions) for _ in range(4))
    for table in tables:
        of = assignment.partition_of[table.name]
        counts = profile.tables[table.name]
        here = np.bincount(of, minlength=num_partitions)
        num_rows += here
        accesses += np.bincount(of, counts.accesses, num_partitions)
        batches += np.bincount(of, counts.batches, num_partitions)
        dims[here > 0] = table.dim  # rows of one partition have one width
    return PartitionReads(
        num_rows=num_rows.astype(int).tolist(),
        accesses=(accesses / profile.num_samples).tolist(),
        batches=(batches / profile.num_batches).tolist(),
        dims=dims.astype(int).tolist(),
        batch_size=min(profile.batch_size, profile.num_samples),
    )


def payload_of_batches(
    assignment: Assignment, reads: PartitionReads, batch_size: float, replicas: Replicas
) -> Floats:
    """As :func:`step_payload` in training, from what the plan kept.

    Rows of one partition are taken to be read alike.
    """
    num_rows = np.array(reads.num_rows, float)
    least = np.maximum(1, num_rows)
    share = _share_of_batches(
        np.array(reads.accesses) / least,
        np.array(reads.batches) / least,
        reads.batch_size,
        batch_size,
    )
    size = assignment.num_shards
    place = np.where(assignment.is_everywhere, size, assignment.home).astype(np.int64)
    read_by_any = num_rows * distinct(share, size)
    parts = _Reads(place, num_rows, num_rows * share, read_by_any, np.array(reads.dims, float))
    return _payload(parts, size, replicas, 1, True)


def _shares(profile: AccessProfile, name: str, batch_size: int | None) -> Floats:
    """The share of batches in which each row of a table occurs."""
    counts = profile.tables[name]
    share = counts.batches / profile.num_batches
    if batch_size is None:
        return np.asarray(share)
    counted = min(profile.batch_size, profile.num_samples)
    return _share_of_batches(counts.accesses / profile.num_samples, share, counted, batch_size)


def _share_of_batches(accesses: Floats, share: Floats, counted: int, batch_size: float) -> Floats:
    """The share of batches of ``batch_size`` in which rows occur.

    It is worked out from accesses a sample and from the ``share`` of batches of ``counted``.
    """
    if batch_size == counted:
        return share
    # the share of a row that was in nearly every batch says little about smaller batches; its
    # accesses do
    by_share = distinct(share, batch_size / counted)
    by_accesses = distinct(accesses, batch_size)
    return np.where(share < 0.5, by_share, by_accesses)


def _reads_of(plan: Plan, table: Table, share: Floats) -> _Reads:
    placement = plan.placements[table.name]
    row_map = plan.row_map
    size = plan.num_shards
    if placement.kind == "rows":
        # one pass over the rows for all owners, of which there may be a thousand
        assert row_map is not None, "checked with the plan"
        partition = row_map.partition[row_map.rows_of(table.name)]
        num_partitions = len(row_map.home)
        num_rows, read, read_by_any = (
            np.asarray(np.bincount(partition, amount, num_partitions), np.float64)
            for amount in (np.ones(table.num_rows), share, distinct(share, size))
        )
        place = np.array([*placement.shards, size], np.int64)[row_map.place_of]
        return _Reads(place, num_rows, read, read_by_any, np.full(num_partitions, float(table.dim)))
    parts = [*plan.homes(table), *((size, piece) for _, piece in plan.copies(table)[:1])]
    shares = [share[ids_of(piece.rows)] for _, piece in parts]
    return _Reads(
        np.array([place for place, _ in parts], np.int64),
        np.array([len(each) for each in shares], float),
        np.array([each.sum() for each in shares]),
        np.array([distinct(each, size).sum() for each in shares]),
        np.array([len(piece.columns) for _, piece in parts], float),
    )


def _payload(reads: _Reads, size: int, replicas: Replicas, num_groups: int, trains: bool) -> Floats:
    sent = np.full((size, size), float(HEAD_BYTES * num_groups))
    floats = FLOAT_BYTES * reads.columns
    to_owner = np.bincount(reads.place, reads.read * (ID_BYTES + trains * floats), size + 1)
    sent += to_owner[:size]
    sent += np.bincount(reads.place, reads.read * floats, size + 1)[:size, None]
    is_copied = reads.place == size
    for columns in np.unique(reads.columns[is_copied]) if trains else ():
        chosen = is_copied & (reads.columns == columns)
        num_rows, read, read_by_any = (
            float(amount[chosen].sum())
            for amount in (reads.num_rows, reads.read, reads.read_by_any)
        )
        sent += _copies_payload(replicas, size, num_rows, read, read_by_any, FLOAT_BYTES * columns)
    np.fill_diagonal(sent, 0.0)
    return sent


def _copies_payload(
    replicas: Replicas,
    size: int,
    num_rows: float,
    read: float,
    read_by_any: float,
    row_bytes: float,
) -> float:
    """Bytes on each link for the gradients of copied rows of one width."""
    if replicas == "gather":  # ranks send each other all of them
        return read * row_bytes + ID_BYTES * min(read, _words(num_rows))
    # owners sum; they take turns, so that each has about the same of them
    owned = num_rows / size
    read = read / size
    read_by_any = read_by_any / size
    words = _words(owned)
    ids = min(read, words) + (words if words <= BITS_AT_ONCE else read_by_any)
    return (2 * owned if replicas == "dense" else read + read_by_any) * row_bytes + ID_BYTES * ids


def _words(num_rows: float) -> float:
    """Numbers as long as an id that hold a bit for each row."""
    return float(np.ceil(num_rows / (8 * ID_BYTES)))
