"""Which ranks look up a tower, and for whose samples: the peers of SPTT (DMT, Sec. 3.1.1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pibroch.collectives import Topology
from pibroch.errors import ConfigError


@dataclass(frozen=True)
class TowerPlaces:
    """Ranks in groups of one or several hosts, each of which holds the tables of its towers.

    A rank's **peer** in a group looks the group's features up for that rank's samples: the one that
    has its place there. With L consecutive ranks a group that is DMT's order by (rank mod L, rank
    div L). Of a group with fewer ranks some are the peers of several.

    >>> places = TowerPlaces(((0, 1), (2, 3)))
    >>> [places.peers_of(rank) for rank in range(4)], places.served_by(3)
    ([(0, 2), (1, 3), (0, 2), (1, 3)], (1, 3))
    >>> [TowerPlaces(((0, 1), (2,))).served_by(rank) for rank in range(3)]
    [(0, 2), (1,), (0, 1, 2)]

    Attributes:
        groups: the ranks of each.
    """

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, topology: Topology, hosts_per_group: int) -> TowerPlaces:
        """Groups of ``hosts_per_group`` hosts in their order; the last may have fewer.

        >>> TowerPlaces.of(Topology.of(["a", "a", "b", "c", "c"]), 2).groups
        ((0, 1, 2), (3, 4))
        """
        hosts = topology.ranks_by_host
        firsts = range(0, len(hosts), hosts_per_group)
        return cls(tuple(sum(hosts[first : first + hosts_per_group], ()) for first in firsts))

    @property
    def num_ranks(self) -> int:
        """Ranks in all groups."""
        return sum(map(len, self.groups))

    def group_of(self, rank: int) -> int:
        """The number of a rank's group."""
        return self._place[rank][0]

    def peers_of(self, rank: int) -> tuple[int, ...]:
        """A rank's peer in each group; itself in its own."""
        place = self._place[rank][1]
        return tuple(members[place % len(members)] for members in self.groups)

    def served_by(self, rank: int) -> tuple[int, ...]:
        """The ranks whose peer this one is in its group, rising."""
        group, place = self._place[rank]
        size = len(self.groups[group])
        return tuple(
            sorted(other for other, (_, there) in self._place.items() if there % size == place)
        )

    def most_served(self, group: int) -> int:
        """The most ranks that a member of a group serves."""
        return max(len(self.served_by(rank)) for rank in self.groups[group])

    def order_of(self, group: int) -> list[tuple[int, int]]:
        """For every rank in turn its peer's place in a group, and its own among those served by it.

        >>> TowerPlaces(((0, 1), (2, 3))).order_of(1)
        [(0, 0), (1, 0), (0, 1), (1, 1)]
        """
        num_served = [0] * len(self.groups[group])
        order = []
        for rank in range(self.num_ranks):
            member = self._place[rank][1] % len(num_served)
            order.append((member, num_served[member]))
            num_served[member] += 1
        return order

    @cached_property
    def _place(self) -> dict[int, tuple[int, int]]:
        return {
            rank: (g, i) for g, members in enumerate(self.groups) for i, rank in enumerate(members)
        }


def hosts_of(num_ranks: int, ranks_per_host: int) -> Topology:
    """A declared topology: ``ranks_per_host`` consecutive ranks a host, the last perhaps fewer.

    >>> hosts_of(5, 2).ranks_by_host
    ((0, 1), (2, 3), (4,))
    """
    return Topology.of([str(rank // ranks_per_host) for rank in range(num_ranks)])


def places_for(topology: Topology, num_towers: int, hosts_per_tower: int | None) -> TowerPlaces:
    """Groups of hosts for ``num_towers`` towers; with more towers than groups each has several.

    >>> places_for(hosts_of(4, 1), 2, None).groups, places_for(hosts_of(2, 1), 4, None).groups
    (((0, 1), (2, 3)), ((0,), (1,)))

    Raises:
        ConfigError: when there are more groups than towers.
    """
    least = -(-topology.num_hosts // num_towers)
    chosen = least if hosts_per_tower is None else hosts_per_tower
    if chosen < least:
        raise ConfigError(
            f"{num_towers} towers on {topology.num_hosts} hosts, {chosen} for each tower",
            "hosts for no more towers",
            f"set hosts_per_tower to {least}, or make more towers",
        )
    return TowerPlaces.of(topology, chosen)


def towers_of_groups(num_towers: int, num_groups: int) -> list[range]:
    """The towers of each group of hosts, by number: consecutive ones, about as many each.

    >>> towers_of_groups(5, 2)
    [range(0, 2), range(2, 5)]
    """
    return [
        range(num_towers * g // num_groups, num_towers * (g + 1) // num_groups)
        for g in range(num_groups)
    ]
