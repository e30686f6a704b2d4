"""Which ranks look up which tables under ``towers``, and which run which modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pibroch.exchange.towers.build import TowerLayout
from pibroch.exchange.towers.places import TowerPlaces
from pibroch.exchange.towers.tables import TablesHere
from pibroch.planner import Plan
from pibroch.sim.timeline import Floats


@dataclass(frozen=True, slots=True)
class PlacedModules:
    """Modules of towers, on the ranks that have their tables, by group of hosts.

    Attributes:
        widths: numbers a sample that they give.
        work: their share of the work of all.
        num_bytes: of their parameters.
    """

    widths: Sequence[int]
    work: Sequence[float]
    num_bytes: Sequence[int]


@dataclass(frozen=True, slots=True)
class ByTowers:
    """Which ranks look up which tables.

    Attributes:
        places: groups of hosts.
        tables: of each of them.
        modules: between the halves of a lookup; ``None`` for towers that pass through.
    """

    places: TowerPlaces
    tables: Sequence[TablesHere]
    modules: PlacedModules | None = None

    @property
    def work(self) -> Floats:
        """Of each rank's modules, by that of all towers on the samples of one rank, ``[W]``."""
        places = self.places
        shares = np.zeros(places.num_ranks)
        if self.modules is not None:
            for rank in range(places.num_ranks):
                shares[rank] = self.modules.work[places.group_of(rank)]
                shares[rank] *= len(places.served_by(rank))
        return shares


def plan_of(layout: TowerLayout) -> Plan:
    """Where rows lie over all ranks, from the plans of the groups of hosts.

    Raises:
        ConfigError: for a placement or plan that does not fit.
    """
    placements = {}
    for number, members in enumerate(layout.places.groups):
        for name, each in layout.plan_inside(number).placements.items():
            shards = tuple(members[shard] for shard in each.shards)
            placements[name] = each.model_copy(update={"shards": shards})
    return Plan(num_shards=layout.places.num_ranks, placements=placements)
