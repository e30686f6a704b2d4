"""Builds the exchange by towers: groups of hosts, their tables, the lanes inside a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pibroch.collectives import Topology
from pibroch.config.tower_groups import groups_of
from pibroch.embedding import Table, TableGroup
from pibroch.errors import ConfigError
from pibroch.exchange.agreement import check_same_options
from pibroch.exchange.alltoall.build import PlacedOptions, groups_under
from pibroch.exchange.alltoall.exchange import AllToAllExchange
from pibroch.exchange.base import Exchange, Setup, options_of
from pibroch.exchange.layout import plan_for
from pibroch.exchange.towers.exchange import TowersExchange
from pibroch.exchange.towers.peer_lookup import PeerLookup
from pibroch.exchange.towers.places import TowerPlaces, hosts_of, places_for, towers_of_groups
from pibroch.exchange.towers.tables import TablesHere, tables_of_towers, within
from pibroch.exchange.wire import RowWire
from pibroch.planner import Plan


@dataclass(frozen=True, slots=True)
class Towers(PlacedOptions):
    """Tables lie with the hosts of their tower, which work on them before anything crosses.

    Attributes:
        placement, plan, wire, compress: see :class:`PlacedOptions`; placed on the ranks of a tower.
        ranks_per_host: so many consecutive ranks count as one host; what shares a machine does when
            absent.
        hosts_per_tower: hosts whose ranks look up a tower together; as few as the number of towers
            allows when absent.
        groups: names of each tower's features; tables in turn when absent.
    """

    exchange: ClassVar[str] = "towers"

    ranks_per_host: int | None = None
    hosts_per_tower: int | None = None
    groups: Sequence[Sequence[str]] | None = None

    def check(self) -> None:
        """Raise ConfigError for numbers that cannot be."""
        for name in ("ranks_per_host", "hosts_per_tower"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} {value}", "at least 1")

    def topology(self, setup: Setup) -> Topology:
        """The hosts, as declared or as they are; every rank calls it."""
        if self.ranks_per_host is None:
            return Topology.gather(setup.channel)
        return hosts_of(setup.channel.ranks.world_size, self.ranks_per_host)


@dataclass(frozen=True, slots=True, eq=False)
class TowerLayout:
    """Which ranks hold which tables.

    Attributes:
        chosen: the options.
        tables: all.
        places: groups of hosts.
        held: tables of each group.
        here: likewise, with the places of their embeddings.
    """

    chosen: Towers
    tables: Sequence[Table]
    places: TowerPlaces
    held: Sequence[Sequence[Table]]
    here: Sequence[TablesHere]

    @classmethod
    def of(cls, chosen: Towers, groups: Sequence[TableGroup], topology: Topology) -> TowerLayout:
        """For some hosts.

        Raises:
            ConfigError: for options that cannot be.
        """
        tables = [table for group in groups for table in group.space.tables]
        of_towers = _towers(tables, chosen.groups, topology.num_hosts)
        places = places_for(topology, len(of_towers), chosen.hosts_per_tower)
        held = [
            [table for tower in numbers for table in of_towers[tower]]
            for numbers in towers_of_groups(len(of_towers), len(places.groups))
        ]
        return cls(chosen, tables, places, held, [TablesHere.of(each, groups) for each in held])

    def plan_inside(self, number: int) -> Plan:
        """Where the tables of a group of hosts lie among its members.

        Raises:
            ConfigError: for a placement or plan that does not fit.
        """
        placement = self.chosen.placement
        held = self.held[number]
        members = self.places.groups[number]
        if self.chosen.plan is not None or isinstance(placement, Plan):
            plan = Plan.load(Path(self.chosen.plan)) if self.chosen.plan is not None else placement
            fitting = plan_for(self.tables, plan, self.places.num_ranks, "ranks")
            return within(fitting, held, members)
        kinds = {"": placement} if isinstance(placement, str) else dict(placement)
        Plan.of(self.tables, 1, kinds)  # names that no table has are wrong on all ranks
        names = {table.name for table in held}
        kinds = {name: kind for name, kind in kinds.items() if name in names or not name}
        return plan_for(held, kinds, len(members), "ranks of a tower")


def build(setup: Setup, **options: object) -> Exchange[Any]:
    """The exchange of a rank; every rank calls it. Options as :class:`Towers` has them.

    Where all ranks are one group of hosts nothing crosses groups, and it is ``alltoall``.

    Raises:
        ConfigError: for options that cannot be, or that differ between ranks.
    """
    chosen = options_of(Towers, "towers", options)
    chosen.check()
    same = {
        "ranks_per_host": chosen.ranks_per_host,
        "hosts_per_tower": chosen.hosts_per_tower,
        "groups": None if chosen.groups is None else [list(tower) for tower in chosen.groups],
    }
    check_same_options(setup.channel, same)
    wire = chosen.wire_on(setup)
    layout = TowerLayout.of(chosen, setup.groups, chosen.topology(setup))
    places = layout.places
    if len(places.groups) == 1:
        plan = chosen.plan_of(setup, wire.channel.ranks.world_size, "ranks")
        return AllToAllExchange(groups_under(setup.groups, plan, setup.seed, wire), wire)
    members = setup.channel.ranks.groups(places.groups)
    assert members is not None, "every rank is in one"
    number = places.group_of(setup.channel.ranks.rank)
    inner = RowWire(members.open_channel(), compress=chosen.compress)
    plan = layout.plan_inside(number)
    inside = groups_under(layout.here[number].groups, plan, setup.seed, inner)
    peer = PeerLookup(setup.groups, places, layout.here, inside, wire)
    return TowersExchange(peer, places, inner)


def _towers(
    tables: Sequence[Table], groups: Sequence[Sequence[str]] | None, num_hosts: int
) -> list[list[Table]]:
    """The tables of each tower; as many towers as hosts where no groups are given."""
    if groups is None:
        count = min(num_hosts, len(tables))
        return [list(tables[first::count]) for first in range(count)]
    features = tuple(dict.fromkeys(feature for table in tables for feature in table.features))
    groups_of(features, len(groups), groups)
    return tables_of_towers(tables, groups)
