"""Which ranks share a host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pibroch.collectives.ranks import Channel


@dataclass(frozen=True, slots=True)
class Topology:
    """The hosts of a run, numbered by their first ranks.

    >>> topology = Topology.of(["a", "a", "b", "b", "b"])
    >>> topology.ranks_by_host, topology.host_of_rank
    (((0, 1), (2, 3, 4)), (0, 0, 1, 1, 1))

    Attributes:
        host_of_rank: for each rank.
        ranks_by_host: for each host, rising.
    """

    host_of_rank: tuple[int, ...]
    ranks_by_host: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, names: Sequence[str]) -> Topology:
        """The topology of ranks whose hosts have these names; equal names are one host."""
        hosts: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            hosts.setdefault(name, []).append(rank)
        numbers = {name: host for host, name in enumerate(hosts)}
        return cls(tuple(numbers[name] for name in names), tuple(map(tuple, hosts.values())))

    @classmethod
    def gather(cls, channel: Channel) -> Topology:
        """The topology of a channel's ranks; each of them calls it.

        Hosts are machines, or network namespaces of one. Blocks.
        """
        return cls.of(channel.gather(channel.ranks.host))

    @property
    def num_hosts(self) -> int:
        """How many hosts there are."""
        return len(self.ranks_by_host)
