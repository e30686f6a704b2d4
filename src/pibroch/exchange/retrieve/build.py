"""The exchange from what a user asks for: who shares memory, the lanes in it, the sockets to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pibroch.collectives.topology import Topology
from pibroch.errors import ConfigError
from pibroch.exchange.agreement import check_same_options
from pibroch.exchange.alltoall.build import AllToAllOptions
from pibroch.exchange.alltoall.copies import WAYS
from pibroch.exchange.alltoall.group_lanes import GroupLanes
from pibroch.exchange.base import Setup, options_of
from pibroch.exchange.layout import lay_out
from pibroch.exchange.retrieve.exchange import RetrieveExchange
from pibroch.exchange.retrieve.gets import RemoteGets
from pibroch.exchange.retrieve.host_memory import HostMemory, NeighbourRows
from pibroch.exchange.retrieve.lane import RetrieveLane


@dataclass(frozen=True, slots=True)
class RetrieveOptions(AllToAllOptions):
    """What users tell this exchange besides.

    Attributes:
        hosts: number of each rank's host; ranks of one host share memory. Machines and network namespaces when absent.
    """

    hosts: Sequence[int] | None = None


def build(setup: Setup, **options: object) -> RetrieveExchange:
    """The exchange of a rank; every rank calls it. Options as :class:`RetrieveOptions` has them.

    Raises:
        ConfigError: for options that cannot be, or that differ between ranks.
    """
    chosen = options_of(RetrieveOptions, "retrieve", options)
    if chosen.replicas not in WAYS:
        raise ConfigError(f"replicas {chosen.replicas!r}", f"one of {', '.join(WAYS)}")
    channel, ranks = setup.channel, setup.channel.ranks
    declared = None if chosen.hosts is None else list(chosen.hosts)
    check_same_options(channel, {"replicas": chosen.replicas, "hosts": declared})
    if declared is not None and len(declared) != ranks.world_size:
        raise ConfigError(f"hosts {declared} of {ranks.world_size} ranks", "the number of each rank's host")
    wire, plan = chosen.wire_on(setup), chosen.plan_of(setup, ranks.world_size, "ranks")
    layouts = [lay_out(each.space, plan, ranks.rank) for each in setup.groups]
    if any(layout.owners_pool for of_group in layouts for layout in of_group):
        raise ConfigError("the placement table_wise_pooled, where owners pool", "one under which rows are read",
                          "e.g. table_wise")  # fmt: skip
    hosts = Topology.gather(channel).host_of_rank if declared is None else declared
    host = HostMemory(ranks, hosts)
    groups = []
    for each, of_group in zip(setup.groups, layouts, strict=True):
        lanes = [RetrieveLane(layout, each, setup.seed, wire, make_room=host.room) for layout in of_group]
        for lane in lanes:
            lane.replicas = chosen.replicas
        groups.append(GroupLanes(each, lanes))
    _map_neighbours(host, [lane for group in groups for lane in group.lanes if isinstance(lane, RetrieveLane)])
    return RetrieveExchange(groups, wire, host, RemoteGets(ranks, hosts))


def _map_neighbours(host: HostMemory, lanes: Sequence[RetrieveLane]) -> None:
    """Give each lane the shards of this host."""
    found = host.trade()
    for number, lane in enumerate(lanes):
        lane.near = {lane.rank: lane.shard}
        width = lane.shard.records.shape[1]
        for p, memory in found.items():
            num_bytes = 4 * width * int(np.diff(lane.layout.bounds)[p])
            lane.near[p] = NeighbourRows.of(memory[number][:num_bytes], lane.shard)
