"""A plan under the samples of a dataset as they come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pibroch.data import JaggedBatch
from pibroch.data.dataset import EncodedDataset, SplitName
from pibroch.data.loader import Loader
from pibroch.errors import DataError
from pibroch.planner.assignment import Assignment
from pibroch.planner.drift import Decay, DriftWatch
from pibroch.planner.make import PlanOptions
from pibroch.planner.partition import TableSize
from pibroch.planner.topology import ClusterTopology


def ids_by_table(
    batch: JaggedBatch, features_of: Mapping[str, Sequence[str]]
) -> dict[str, Sequence[NDArray[np.int64]]]:
    """What a batch reads of each table, as sketches and profiles count it."""
    values = batch.values.numpy()
    offsets = batch.offsets.numpy()
    size = batch.batch_size
    place = {key: number for number, key in enumerate(batch.keys)}
    bounds = {key: slice(offsets[at * size], offsets[(at + 1) * size]) for key, at in place.items()}
    return {
        table: [values[bounds[feature]] for feature in features]
        for table, features in features_of.items()
    }


def watch_dataset(
    dataset: EncodedDataset,
    split: SplitName,
    assignment: Assignment,
    tables: Sequence[TableSize],
    topology: ClusterTopology,
    options: PlanOptions,
    batch_size: int,
    every: int,
    half_life: float,
) -> Iterator[Decay]:
    """Look at a plan every so many batches of a split, whose samples come in their order.

    Raises:
        DataError: for a plan of other tables, or too few samples.
    """
    for table in tables:
        if dataset.num_rows.get(table.name) != table.num_rows:
            got = f"a plan for {table.num_rows:,} rows of table {table.name!r}"
            raise DataError(
                got,
                f"one for its {dataset.known_num_rows.get(table.name, 0):,} rows",
                "plan for these data",
            )
    samples = dataset.split(split)
    if len(samples) < batch_size * every:
        raise DataError(
            f"{len(samples):,} samples in split {split}",
            f"{batch_size * every:,}, for {every} batches of {batch_size}",
            "choose another split, or pass --every or --batch-size",
        )
    watch = DriftWatch(assignment, tables, topology, options, batch_size, half_life)
    for batch in Loader(samples, batch_size, shuffle=False):
        watch.add(
            ids_by_table(batch, {table.name: (table.name,) for table in tables}), batch.batch_size
        )
        if watch.num_batches % every == 0:
            yield watch.look()
