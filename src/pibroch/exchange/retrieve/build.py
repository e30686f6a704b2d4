"""Builds the exchange: who shares memory, the lanes in it, the sockets to other hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pibroch.collectives.topology import Topology
from pibroch.errors import ConfigError
from pibroch.exchange.agreement import check_same_options
from pibroch.exchange.alltoall.build import AllToAll
from pibroch.exchange.alltoall.copies import WAYS
from pibroch.exchange.alltoall.group_lanes import GroupLanes
from pibroch.exchange.assigned import rows_of
from pibroch.exchange.base import Setup, options_of
from pibroch.exchange.layout import LaneLayout, lay_out, plan_for
from pibroch.exchange.retrieve.copies import HostCopies, LaneCopies
from pibroch.exchange.retrieve.exchange import RetrieveExchange
from pibroch.exchange.retrieve.host_memory import HostMemory
from pibroch.exchange.retrieve.lane import RetrieveLane
from pibroch.planner import Plan


@dataclass(frozen=True, slots=True)
class Retrieve(AllToAll):
    """Rows are read where they are: in shared memory within a host, by gets between hosts.

    Attributes:
        placement, plan, wire, compress, replicas, assign: see :class:`AllToAll`.
        hosts: number of each rank's host; ranks of one host share memory. Machines and network
            namespaces when absent.
    """

    exchange: ClassVar[str] = "retrieve"

    hosts: Sequence[int] | None = None


def build(setup: Setup, **options: object) -> RetrieveExchange:
    """The exchange of a rank; every rank calls it. Options as :class:`Retrieve` has them.

    Raises:
        ConfigError: for options that cannot be, or that differ between ranks.
    """
    chosen = options_of(Retrieve, "retrieve", options)
    if chosen.replicas not in WAYS:
        raise ConfigError(f"replicas {chosen.replicas!r}", f"one of {', '.join(WAYS)}")
    channel = setup.channel
    ranks = setup.channel.ranks
    declared = None if chosen.hosts is None else list(chosen.hosts)
    check_same_options(channel, {"replicas": chosen.replicas, "hosts": declared})
    if declared is not None and len(declared) != ranks.world_size:
        raise ConfigError(
            f"hosts {declared} of {ranks.world_size} ranks", "the number of each rank's host"
        )
    wire = chosen.wire_on(setup)
    plan = chosen.plan_of(setup, ranks.world_size, "ranks")
    hosts = Topology.gather(channel).host_of_rank if declared is None else declared
    host = HostMemory(ranks, hosts)

    def groups_under(of: Plan, seed: int | None = None) -> list[GroupLanes]:
        copies = HostCopies.of(of, hosts, ranks.rank)
        groups = []
        for each in setup.groups:
            lanes = [
                RetrieveLane(layout, each, seed, wire, make_room=host.room)
                for layout in under_retrieve(lay_out(each.space, of, ranks.rank))
            ]
            for lane in lanes:
                lane.replicas = chosen.replicas
                lane.copies = (
                    None if copies is None else LaneCopies.of(copies, lane.layout, wire.is_exact)
                )
            groups.append(GroupLanes(each, lanes))
        return groups

    def moved(of: Plan) -> list[GroupLanes]:
        return groups_under(plan_for(setup.tables, of, ranks.world_size, "ranks"))

    exchange = RetrieveExchange(groups_under(plan, setup.seed), wire, host, moved)
    exchange.rows_of = rows_of(setup, chosen.assign, plan, host_of_rank=hosts)
    return exchange


def under_retrieve(layouts: Sequence[LaneLayout]) -> Sequence[LaneLayout]:
    """The layouts, all of which must be of rows that are read.

    Raises:
        ConfigError: where owners pool.
    """
    if any(layout.owners_pool for layout in layouts):
        raise ConfigError(
            "a placement where owners pool", "one under which rows are read", "e.g. table_wise"
        )
    return layouts
