"""How far a plan has decayed: what it costs under what is read now, beside a plan made for that.

Two sketches get batches in turns. A fresh plan is made from the one, and both plans are charged by
the other: a plan is always better on the very batches that it was made from, so one sketch would
cry wolf for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

import pibroch.planner.cost as costs
from pibroch.errors import ConfigError
from pibroch.planner.assignment import Assignment
from pibroch.planner.make import PlanOptions, make_plan
from pibroch.planner.partition import TableSize
from pibroch.planner.profile import AccessProfile
from pibroch.planner.replicate import Mode
from pibroch.planner.sketch import DecayingSketch
from pibroch.planner.topology import ClusterTopology

Floats = NDArray[np.float64]


def worst_link(
    assignment: Assignment,
    profile: AccessProfile,
    tables: Sequence[TableSize],
    topology: ClusterTopology,
    mode: Mode,
) -> float:
    """Cost a step of the dearest pair of shards; each distinct row of a batch counts once.

    Training adds gradients and sums.

    >>> from pibroch.planner.profile import TableCounts
    >>> profile = AccessProfile({"a": TableCounts(np.array([4, 4]), np.array([2, 1]))}, 8, 2, 4, "")
    >>> halves = np.array([0, 1], np.uint16)
    >>> one_each = Assignment({"a": halves}, halves, np.zeros((2, 2), np.bool_))
    >>> table = TableSize("a", 2, 8, 8)
    >>> worst_link(one_each, profile, [table], ClusterTopology.uniform(2), "inference")
    8.0
    """
    num_shards = topology.num_ranks
    num_partitions = len(assignment.home)
    reads = np.zeros(num_partitions)
    summed = np.zeros(num_partitions)
    for table in tables:
        share = profile.tables[table.name].batches / profile.num_batches
        partition = assignment.partition_of[table.name]
        reads += np.bincount(partition, table.weight_bytes * share, num_partitions)
        summed += np.bincount(
            partition, table.weight_bytes * costs.distinct(share, num_shards), num_partitions
        )
    home = assignment.home.astype(np.int64)
    everywhere = assignment.is_everywhere
    if mode == "training":
        source = np.where(everywhere[:, None], np.arange(num_shards), home[:, None]).astype(
            np.int16
        )
    elif assignment.source is not None:
        source = assignment.source.astype(np.int16)
    else:
        source = costs.sources(home, assignment.copies, topology.cost)
    bytes_got = costs.traffic(reads, source, num_shards)
    if mode == "training":
        gradients, sums = (
            np.bincount(home, each, num_shards) for each in (reads, summed * everywhere)
        )
        # a home gets gradients, and gives sums to all
        bytes_got = bytes_got + gradients[:, None] + sums[None, :]
    links = costs.links(bytes_got * topology.cost)
    return float(links.max(initial=0.0))


@dataclass(frozen=True, slots=True)
class Decay:
    """What was found at a look.

    Attributes:
        batches: seen so far.
        current: cost of the plan in force, of its worst link.
        fresh: that of a plan made for what is read now.
        assignment: that plan.
    """

    batches: int
    current: float
    fresh: float
    assignment: Assignment

    @property
    def ratio(self) -> float:
        """Current over fresh; 1 where nothing crosses."""
        return (
            self.current / self.fresh
            if self.fresh > 0
            else (1.0 if self.current == 0 else float("inf"))
        )


class DriftWatch:
    """Watches what is read under a plan.

    Args:
        assignment: the plan in force.
        tables: of the plan.
        topology: that it was made for.
        options: with which fresh ones are made.
        batch_size: of a rank.
        half_life: batches after which one counts half.
        capacity: counters of each of the two sketches.

    Raises:
        ConfigError: for a plan of other shards.
    """

    def __init__(
        self,
        assignment: Assignment,
        tables: Sequence[TableSize],
        topology: ClusterTopology,
        options: PlanOptions,
        batch_size: int,
        half_life: float = 25.0,
        capacity: int = 1 << 20,
    ) -> None:
        if assignment.num_shards != topology.num_ranks:
            raise ConfigError(
                f"a plan for {assignment.num_shards} shards and a topology of {topology.num_ranks}"
                " ranks",
                "one of each",
            )
        self.assignment = assignment
        self._tables = list(tables)
        self._topology = topology
        self._options = replace(options, steps=False, batch_size=batch_size)
        self._batch_size = batch_size
        num_rows = {table.name: table.num_rows for table in tables}
        self._sketches = [DecayingSketch(num_rows, capacity, half_life / 2) for _ in range(2)]
        self.num_batches = 0

    def add(self, ids: Mapping[str, Sequence[NDArray[np.int64]]], num_samples: int) -> None:
        """Count a batch of one rank: by table the ids that it reads."""
        self._sketches[self.num_batches % 2].add(ids, num_samples)
        self.num_batches += 1

    def profiles(self) -> tuple[AccessProfile, AccessProfile]:
        """What is read now, twice: to make a plan from, and to charge plans by.

        Raises:
            ConfigError: before two batches.
        """
        if self.num_batches < 2:
            raise ConfigError(
                f"{self.num_batches} batches", "at least two", "look at a plan after some batches"
            )
        made_from, charged_by = (sketch.profile(self._batch_size) for sketch in self._sketches)
        return made_from, charged_by

    def look(self, profiles: tuple[AccessProfile, AccessProfile] | None = None) -> Decay:
        """Make a fresh plan and compare.

        It takes as long as planning does, and may be called on another thread.

        Args:
            profiles: as of when; those of now when absent.
        """
        seen = self.num_batches
        made_from, charged_by = profiles or self.profiles()
        fresh, _ = make_plan(self._tables, made_from, self._topology, self._options)
        current, best = (
            worst_link(each, charged_by, self._tables, self._topology, self._options.mode)
            for each in (self.assignment, fresh)
        )
        return Decay(seen, current, best, fresh)
