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
from pibroch.exchange.retrieve.copies import CopyRows, HostCopies, LaneCopies
from pibroch.exchange.retrieve.exchange import RetrieveExchange
from pibroch.exchange.retrieve.gets import RemoteGets
from pibroch.exchange.retrieve.host_memory import HostMemory, NeighbourRows
from pibroch.exchange.retrieve.lane import RetrieveLane
from pibroch.kernels.arrays import Records


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
    row_lanes = [lane for group in groups for lane in group.lanes if isinstance(lane, RetrieveLane)]
    copies = HostCopies.of(plan, hosts, ranks.rank)
    if copies is not None:
        for lane in row_lanes:
            lane.copies = LaneCopies.of(copies, lane.layout, wire.is_exact)
    _share(host, row_lanes)
    return RetrieveExchange(groups, wire, host, RemoteGets(ranks, hosts))


def _share(host: HostMemory, lanes: Sequence[RetrieveLane]) -> None:
    """Give each lane the shards and the copies of this host."""
    own = {lane: _room_for_copies(host, lane, lane.copies) for lane in lanes if lane.copies is not None}
    memory = host.trade()
    for number, lane in enumerate(lanes):
        lane.near = {lane.rank: lane.shard}
        for p, of_rank in memory.items():
            num_bytes = lane.shard.records[:1].nbytes * int(np.diff(lane.layout.bounds)[p])
            lane.near[p] = NeighbourRows.of(of_rank[number][:num_bytes], lane.shard)
        lane.near = dict(sorted(lane.near.items()))
    for number, (lane, rows) in enumerate(own.items(), len(lanes)):
        copies, dim = lane.copies, lane.layout.width
        assert copies is not None, "chosen by it"
        copied = {}
        for holder, p in enumerate(lane.near):
            floats = len(copies.sources[holder]) * copies.width(dim)
            held = rows if p == lane.rank else memory[p][number][: 4 * floats].view(np.float32)
            copied[lane.world_size + holder] = CopyRows.of(held.reshape(-1, copies.width(dim)), dim, copies.dtype)
        lane.copied = copied


def _room_for_copies(host: HostMemory, lane: RetrieveLane, copies: LaneCopies) -> Records:
    own = sorted((*host.neighbours, lane.rank)).index(lane.rank)
    return host.room(len(copies.sources[own]), copies.width(lane.layout.width))
