"""Builds an all-to-all exchange: a plan, the lanes that it leads to, the exchange over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pibroch.embedding import TableGroup
from pibroch.errors import ConfigError
from pibroch.exchange.agreement import check_same_options
from pibroch.exchange.alltoall.copies import WAYS
from pibroch.exchange.alltoall.exchange import AllToAllExchange
from pibroch.exchange.alltoall.group_lanes import GroupLanes, lane_type
from pibroch.exchange.alltoall.row_lane import RowLane
from pibroch.exchange.assigned import rows_of
from pibroch.exchange.base import ExchangeOptions, Setup, options_of
from pibroch.exchange.layout import lay_out, plan_for
from pibroch.exchange.wire import RowWire
from pibroch.planner import Plan


@dataclass(frozen=True, slots=True)
class PlacedOptions(ExchangeOptions):
    """Options that every exchange between ranks takes.

    Attributes:
        placement: a kind for all tables, kinds by table name (``""`` for those not named), or a
            :class:`Plan`.
        plan: a file with a plan, in place of ``placement``.
        wire: type in which rows and gradients travel: ``float32`` (exact), ``bfloat16``,
            ``float16`` (gradients below 6e-8 vanish).
        compress: whether they travel compressed, without loss, see
            :mod:`pibroch.exchange.compression`.
    """

    placement: str | Mapping[str, str] | Plan = "row_wise"
    plan: str | Path | None = None
    wire: str = "float32"
    compress: bool = False

    def plan_of(self, setup: Setup, num_shards: int, what: str) -> Plan:
        """Where rows lie on ``num_shards`` ranks or servers.

        Raises:
            ConfigError: for a plan that does not fit.
        """
        chosen = self.placement if self.plan is None else Plan.load(Path(self.plan))
        return plan_for(setup.tables, chosen, num_shards, what)

    def wire_on(self, setup: Setup) -> RowWire:
        """What carries rows and gradients between the ranks; every rank calls it.

        Raises:
            ConfigError: for an unknown type, or ranks with different options.
        """
        check_same_options(setup.channel, {"wire": self.wire, "compress": self.compress})
        return RowWire(setup.channel, self.wire, self.compress)


@dataclass(frozen=True, slots=True)
class AllToAll(PlacedOptions):
    """Rows lie where a plan puts them, and travel to the ranks whose samples need them.

    Attributes:
        placement, plan, wire, compress: see :class:`PlacedOptions`.
        replicas: how gradients of rows that every rank has are summed: ``gather``, ``sparse`` or
            ``dense``, see :mod:`pibroch.exchange.alltoall.copies`. The sums are the same.
        assign: which rank trains which sample: ``given``, as batches have them, or ``rows``, where
            most of its rows are, see :meth:`pibroch.Embeddings.assign`.
    """

    exchange: ClassVar[str] = "alltoall"

    replicas: str = "gather"
    assign: str = "given"


def build(setup: Setup, **options: object) -> AllToAllExchange:
    """The exchange of a rank; every rank calls it. Options as :class:`AllToAll` has them.

    Raises:
        ConfigError: for options that cannot be, or that differ between ranks.
    """
    chosen = options_of(AllToAll, "alltoall", options)
    if chosen.replicas not in WAYS:
        raise ConfigError(f"replicas {chosen.replicas!r}", f"one of {', '.join(WAYS)}")
    check_same_options(setup.channel, {"replicas": chosen.replicas})
    wire = chosen.wire_on(setup)
    ranks = setup.channel.ranks
    plan = chosen.plan_of(setup, ranks.world_size, "ranks")

    def checked(of: Plan) -> list[GroupLanes]:
        fitting = plan_for(setup.tables, of, ranks.world_size, "ranks")
        return groups_under(setup.groups, fitting, None, wire, chosen.replicas)

    groups = groups_under(setup.groups, plan, setup.seed, wire, chosen.replicas)
    exchange = AllToAllExchange(groups, wire, checked)
    exchange.rows_of = rows_of(setup, chosen.assign, plan)
    return exchange


def groups_under(
    tables: Sequence[TableGroup],
    plan: Plan,
    seed: int | None,
    wire: RowWire,
    replicas: str = "gather",
) -> list[GroupLanes]:
    """The lanes of a rank for all groups of tables, where a plan places the rows.

    Args:
        tables: in groups.
        plan: of them all.
        seed: of the rows; ``None`` to leave them to who writes them.
        wire: of all lanes; its channel says which rank this is.
        replicas: see :class:`AllToAll`.
    """
    groups = []
    for each in tables:
        lanes = [
            lane_type(layout)(layout, each, seed, wire)
            for layout in lay_out(each.space, plan, wire.channel.ranks.rank)
        ]
        for lane in lanes:
            if isinstance(lane, RowLane):
                lane.replicas = replicas
        groups.append(GroupLanes(each, lanes))
    return groups
