"""Builds a lookahead exchange: plan, lanes, their records' carriers, the way to an oracle."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pibroch.collectives import Channel, Ranks
from pibroch.collectives.task_thread import TaskThread
from pibroch.embedding import Shard, SparseOptimizer, TableGroup
from pibroch.errors import ConfigError
from pibroch.exchange.agreement import check_same_options
from pibroch.exchange.alltoall.build import PlacedOptions
from pibroch.exchange.alltoall.exchange import AllToAllExchange
from pibroch.exchange.alltoall.group_lanes import GroupLanes
from pibroch.exchange.alltoall.row_lane import RowLane
from pibroch.exchange.assigned import rows_of
from pibroch.exchange.base import Setup, options_of
from pibroch.exchange.layout import LaneLayout, behind, lay_out, plan_for
from pibroch.exchange.lookahead.announcement import Announcer, BytesByPurpose
from pibroch.exchange.lookahead.carrier import Carrier
from pibroch.exchange.lookahead.exchange import LookaheadExchange, PlannedLanes
from pibroch.exchange.lookahead.oracle import JointOracle, Oracle, early_steps
from pibroch.exchange.lookahead.planners import LocalPlanner, Planner
from pibroch.exchange.wire import RowWire
from pibroch.observability.memory import free_memory
from pibroch.planner import Plan

if TYPE_CHECKING:
    from pibroch.exchange.lookahead.server_homes import ServerHomes

LOOKAHEAD = 200
"""Steps, where no number is given.

Beyond it the paper (Table 3) and the benchmarks found nothing more to gain.
"""
SHARE_OF_FREE_MEMORY = 0.5
"""That caches may take."""


@dataclass(frozen=True, slots=True)
class Lookahead(PlacedOptions):
    """Batches are read ahead, and rows wait where they are needed next.

    Attributes:
        placement: of the homes: ``row_wise``, ``table_wise``, such kinds by table, or a
            :class:`Plan` with these, over the ranks, or over the servers.
        plan, compress: see :class:`PlacedOptions`.
        wire: type in which gradients, and weights that are read for one step, travel between ranks.
            Records that move for good stay float32.
        lookahead: batches read ahead; ``None`` for as many as the cache holds, at most
            ``LOOKAHEAD``. Shrinks under pressure.
        cache_rows: rows of other ranks' homes that a rank can keep, of each group of tables that
            are alike; ``None`` for what fits into half of the free memory.
        cache: design of the cache: ``lrpp``, ``partitioned`` or ``replicated`` (Sec. 3.3).
        delayed_sync: whether updates that the next step does not need cross later, beside it.
        servers: names of workers of this process's RPC group that hold the homes, see
            :mod:`pibroch.servers`; without any the ranks hold them.
        oracle: name of a worker of this process's RPC group that plans for all ranks, see
            :mod:`pibroch.servers`; without, each rank plans for itself.
        assign: which rank trains which sample: ``given``, as batches have them, or ``rows``, where
            most of its rows are, see :meth:`pibroch.Embeddings.assign`.
    """

    exchange: ClassVar[str] = "lookahead"

    lookahead: int | None = None
    cache_rows: int | None = None
    cache: str = "lrpp"
    delayed_sync: bool = True
    servers: Sequence[str] = ()
    oracle: str | None = None
    assign: str = "given"


def build(setup: Setup, **options: object) -> LookaheadExchange:
    """The exchange of a rank; every rank calls it. Options as :class:`Lookahead` has them.

    Raises:
        ConfigError: for a placement whose rows are cut or copied, options that cannot be, or that
            differ between ranks.
        TrainingError: when a server or the oracle cannot be reached.
    """
    chosen = options_of(Lookahead, "lookahead", options)
    channel = setup.channel
    ranks = setup.channel.ranks
    wire = chosen.wire_on(setup)
    if chosen.servers:
        plan = behind(chosen.plan_of(setup, len(chosen.servers), "servers"), ranks.world_size)
    else:
        plan = chosen.plan_of(setup, ranks.world_size, "ranks")
    layouts = [lay_out(each.space, plan, ranks.rank) for each in setup.groups]
    for layout in (layout for of_group in layouts for layout in of_group):
        check_whole_rows(layout)
    check_same_options(
        channel,
        {name: getattr(chosen, name) for name in ("lookahead", "cache", "delayed_sync", "oracle")},
    )
    # in other designs rows are updated at home
    horizon = steps_of(chosen) if chosen.cache == "lrpp" else 0
    assigned_by = rows_of(setup, chosen.assign, plan, horizon)
    held = _Held(setup, chosen, [layout for (layout,) in layouts], wire)
    thread = ranks.thread("planner")
    planner = _planner(chosen, held, thread)
    planned = PlannedLanes(held.lanes, held.shards, held.carriers, planner)
    moves = not chosen.servers and chosen.oracle is None

    def groups_under(of: Plan) -> list[GroupLanes]:
        return held.groups_under(setup, plan_for(setup.tables, of, ranks.world_size, "ranks"))

    def planned_now() -> PlannedLanes:
        held.take(row_lane for row_lane in unplanned.lanes if isinstance(row_lane, RowLane))
        return PlannedLanes(held.lanes, held.shards, held.carriers, _planner(chosen, held, thread))

    unplanned = AllToAllExchange(held.groups(setup), wire, groups_under if moves else None)
    announcer = Announcer(channel, planner.announces_rows, held.purposes)
    exchange = LookaheadExchange(
        unplanned, planned, announcer, thread, steps_of(chosen), planned_now if moves else None
    )
    exchange.rows_of = assigned_by
    return exchange


def check_whole_rows(layout: LaneLayout) -> None:
    """Refuse a layout whose rows are cut into columns, copied, or pooled by their owners.

    Raises:
        ConfigError: for such a layout.
    """
    whole = all(len(piece.columns) == piece.table.dim for held in layout.pieces for piece in held)
    if layout.owners_pool or layout.num_replicated or not whole:
        raise ConfigError(
            "a placement that cuts, copies or pools rows",
            "row_wise or table_wise for exchange='lookahead'",
            "leave placement out; with a plan of rows, make it by --policy none: rows borrowed"
            " ahead of time do what copies would",
        )


def spare_rows(
    layouts: Sequence[LaneLayout],
    optimizers: Sequence[SparseOptimizer],
    cache_rows: int | None,
    channel: Channel,
) -> list[int]:
    """The slots of each lane's cache, the same numbers on all ranks; every rank calls it.

    Args:
        layouts: of the lanes.
        optimizers: whose state the records of each lane have.
        cache_rows: slots of each lane that the user asks for; ``None`` for as many as fit, lanes
            sharing the memory by the bytes of their rows.
        channel: to the other ranks.
    """
    if cache_rows is not None and cache_rows < 0:
        raise ConfigError(f"cache_rows {cache_rows}", "at least 0")
    if len(layouts[0].pieces) == 1:  # all rows are at home
        return [0] * len(layouts)
    offers = [cache_rows] * len(layouts)
    if cache_rows is None:
        rank = channel.ranks.rank
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", channel.ranks.world_size))
        widths = [
            4 * o.record_width(layout.width, layout.dtype)
            for o, layout in zip(optimizers, layouts, strict=True)
        ]
        homes = [sum(len(piece.rows) for piece in layout.pieces[rank]) for layout in layouts]
        own_bytes = sum(width * count for width, count in zip(widths, homes, strict=True))
        # this rank's own rows are still to be made
        free_bytes = max(0, free_memory() // neighbours - own_bytes)
        whole = [
            width * int(layout.bounds[-1]) for width, layout in zip(widths, layouts, strict=True)
        ]
        room = int(free_bytes * SHARE_OF_FREE_MEMORY)
        offers = [
            room * each // sum(whole) // width for each, width in zip(whole, widths, strict=True)
        ]
    offered: list[list[int]] = channel.gather(offers)
    least = np.min(offered, axis=0).tolist()
    return [min(int(layout.bounds[-1]), each) for layout, each in zip(layouts, least, strict=True)]


def steps_of(chosen: Lookahead) -> int:
    """Batches that are read ahead at most."""
    return LOOKAHEAD if chosen.lookahead is None else chosen.lookahead


class _Held:
    """The lanes, the shards in this rank's care, and the ways of their records."""

    def __init__(
        self, setup: Setup, chosen: Lookahead, layouts: Sequence[LaneLayout], wire: RowWire
    ) -> None:
        optimizers = [each.optimizer for each in setup.groups]
        self.purposes = BytesByPurpose()
        self._wire = wire
        self.spare = spare_rows(layouts, optimizers, chosen.cache_rows, setup.channel)
        self.lanes: list[RowLane] = []
        self.shards: list[Shard] = []
        self.carriers: list[Carrier] = []
        for layout, group, spare in zip(layouts, setup.groups, self.spare, strict=True):
            if chosen.servers:
                self._add_on_servers(layout, (group, setup.seed, wire, spare), chosen)
            else:
                lane = RowLane(layout, group, setup.seed, wire, spare)
                self._add(lane, [lane.shard], None)

    def groups(self, setup: Setup) -> list[GroupLanes]:
        """All tables, with their lanes."""
        return [
            GroupLanes(each, [lane]) for each, lane in zip(setup.groups, self.lanes, strict=True)
        ]

    def groups_under(self, setup: Setup, plan: Plan) -> list[GroupLanes]:
        """Lanes for another plan, with caches as large, whose rows nobody has filled."""
        groups = []
        for each, spare in zip(setup.groups, self.spare, strict=True):
            layouts = lay_out(each.space, plan, setup.channel.ranks.rank)
            for layout in layouts:
                check_whole_rows(layout)
            groups.append(
                GroupLanes(
                    each, [RowLane(layout, each, None, self._wire, spare) for layout in layouts]
                )
            )
        return groups

    def take(self, lanes: Iterable[RowLane]) -> None:
        """Rows have moved to these lanes."""
        self.lanes = []
        self.shards = []
        self.carriers = []
        for lane in lanes:
            self._add(lane, [lane.shard], None)

    def _add(self, lane: RowLane, shards: Sequence[Shard], homes: ServerHomes | None) -> None:
        self.lanes.append(lane)
        self.shards.extend(shards)
        self.carriers.append(Carrier(lane, self.purposes, homes))

    def _add_on_servers(
        self,
        layout: LaneLayout,
        how: tuple[TableGroup, int | None, RowWire, int],
        chosen: Lookahead,
    ) -> None:
        # these load RPC, which nobody else needs
        from pibroch.exchange.lookahead.server_homes import ServerHomes
        from pibroch.exchange.lookahead.server_lane import ServerLane
        from pibroch.servers.remote_shard import RemoteShard

        lane = ServerLane(layout, *how, chosen.servers)
        held = list(enumerate(layout.pieces[lane.world_size :]))[lane.rank :: lane.world_size]
        shards = [
            RemoteShard(lane.servers, number, pieces, lane.optimizer) for number, pieces in held
        ]
        self._add(
            lane, shards, ServerHomes(lane.servers, lane.channel, early_steps(steps_of(chosen)))
        )


def _planner(chosen: Lookahead, held: _Held, thread: TaskThread) -> Planner:
    """The way to the central oracle, or an oracle of this rank's own where there is none."""
    bounds = [lane.layout.bounds for lane in held.lanes]
    channel = held.lanes[0].channel
    ranks = channel.ranks
    how = (chosen.cache, chosen.delayed_sync)
    if chosen.oracle is None:
        lanes = zip(bounds, held.spare, strict=True)
        return LocalPlanner(
            thread,
            JointOracle(
                [
                    Oracle(homes, ranks.rank, steps_of(chosen), room, *how, ranks.world_size)
                    for homes, room in lanes
                ]
            ),
        )
    from pibroch.exchange.lookahead.remote_planner import RemotePlanner

    homes_of_lanes = [np.asarray(homes).tolist() for homes in bounds]
    settings = [homes_of_lanes, held.spare, ranks.world_size, steps_of(chosen), *how]
    count = partial(_count_plans, held.purposes, ranks)
    return RemotePlanner(thread, chosen.oracle, channel, settings, count)


def _count_plans(purposes: BytesByPurpose, ranks: Ranks, purpose: str, num_bytes: int) -> None:
    """Count what travels to and from an oracle, which keeps no account; any thread may call it."""

    def count() -> None:
        purposes.add(purpose, num_bytes)
        ranks.traffic.sent += num_bytes
        ranks.traffic.received += num_bytes

    ranks.communication.submit(count)
