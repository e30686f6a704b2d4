"""A lookahead exchange from what a user asks for; its parts are put together here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pibroch.collectives.task_thread import TaskThread
from pibroch.embedding import Shard
from pibroch.exchange.agreement import check_same_options
from pibroch.exchange.alltoall.build import PlacedOptions
from pibroch.exchange.alltoall.exchange import AllToAllExchange
from pibroch.exchange.alltoall.row_lane import RowLane
from pibroch.exchange.base import Setup, options_of
from pibroch.exchange.layout import LaneLayout, behind, lay_out
from pibroch.exchange.lookahead.announcement import Announcer
from pibroch.exchange.lookahead.cache_size import check_whole_rows, spare_rows
from pibroch.exchange.lookahead.carrier import Carrier
from pibroch.exchange.lookahead.exchange import LookaheadExchange
from pibroch.exchange.lookahead.planners import LocalPlanner, Planner
from pibroch.exchange.wire import RowWire
from pibroch.lookahead import Oracle

LOOKAHEAD = 200
"""Steps, where no number is given: beyond it the paper (Table 3) and the benchmarks found nothing more to gain."""


@dataclass(frozen=True, slots=True)
class LookaheadOptions(PlacedOptions):
    """What users tell it.

    Attributes:
        placement: of the homes: ``row_wise``, ``table_wise``, such kinds by table, or a :class:`Plan` with these, over the
            ranks, or over the servers.
        plan, compress: see :class:`PlacedOptions`.
        wire: type in which gradients, and weights that are read for one step, travel between ranks. Records that move for
            good stay float32.
        lookahead: batches read ahead; ``None`` for as many as the cache holds, at most ``LOOKAHEAD``. Shrinks under pressure.
        cache_rows: rows of other ranks' homes that a rank can keep; ``None`` for what fits into half of the free memory.
        cache: design of the cache: ``lrpp``, ``partitioned`` or ``replicated`` (Sec. 3.3).
        delayed_sync: whether updates that the next step does not need cross later, beside it.
        servers: names of workers of this process's RPC group that hold the homes, see :mod:`pibroch.servers`; without any
            the ranks hold them.
        oracle: name of a worker of this process's RPC group that plans for all ranks, see :mod:`pibroch.servers`; without,
            each rank plans for itself.
    """

    lookahead: int | None = None
    cache_rows: int | None = None
    cache: str = "lrpp"
    delayed_sync: bool = True
    servers: Sequence[str] = ()
    oracle: str | None = None


def build(setup: Setup, **options: object) -> LookaheadExchange:
    """The exchange of a rank; every rank calls it. Options as :class:`LookaheadOptions` has them.

    Raises:
        ConfigError: for a placement whose rows are cut or copied, options that cannot be, or that differ between ranks.
        TrainingError: when a server or the oracle cannot be reached.
    """
    chosen = options_of(LookaheadOptions, "lookahead", options)
    channel, ranks = setup.channel, setup.channel.ranks
    wire = chosen.wire_on(setup)
    if chosen.servers:
        plan = behind(chosen.plan_of(setup, len(chosen.servers), "servers"), ranks.world_size)
    else:
        plan = chosen.plan_of(setup, ranks.world_size, "ranks")
    layouts = lay_out(setup.row_space, plan, ranks.rank)
    for each in layouts:
        check_whole_rows(each)
    (layout,) = layouts
    check_same_options(
        channel, {name: getattr(chosen, name) for name in ("lookahead", "cache", "delayed_sync", "oracle")}
    )
    lane, shards, carrier = _held(setup, chosen, layout, wire)
    thread = TaskThread("pibroch-planner")
    planner = _planner(chosen, lane, carrier, thread)
    unplanned = AllToAllExchange(setup.row_space, [lane], channel)
    announcer = Announcer(channel, planner.tells_rows, carrier.purposes)
    return LookaheadExchange(unplanned, shards, lane, carrier, planner, announcer, thread, _steps(chosen))


def _steps(chosen: LookaheadOptions) -> int:
    return LOOKAHEAD if chosen.lookahead is None else chosen.lookahead


def _held(
    setup: Setup, chosen: LookaheadOptions, layout: LaneLayout, wire: RowWire
) -> tuple[RowLane, Sequence[Shard], Carrier]:
    """The way of rows that nothing was planned for, the shards in this rank's care, and the way of the others."""
    optimizer, seed = setup.optimizer, setup.seed
    spare = spare_rows(layout, optimizer, chosen.cache_rows, setup.channel)
    if not chosen.servers:
        lane = RowLane(layout, optimizer, seed, wire, spare)
        return lane, [lane.shard], Carrier(lane.shard, layout.bounds, optimizer, wire)
    from pibroch.exchange.lookahead.server_homes import ServerHomes  # with all of RPC, which nobody else needs
    from pibroch.exchange.lookahead.server_lane import ServerLane
    from pibroch.servers.remote_shard import RemoteShard

    on_servers = ServerLane(layout, optimizer, seed, wire, spare, chosen.servers)
    held = list(enumerate(layout.pieces[on_servers.world_size :]))[on_servers.rank :: on_servers.world_size]
    shards = [RemoteShard(on_servers.servers, number, pieces, optimizer) for number, pieces in held]
    homes = ServerHomes(on_servers.servers, setup.channel)
    return on_servers, shards, Carrier(on_servers.shard, layout.bounds, optimizer, wire, homes)


def _planner(chosen: LookaheadOptions, lane: RowLane, carrier: Carrier, thread: TaskThread) -> Planner:
    """The way to the central oracle, or an oracle of this rank's own where there is none."""
    bounds, capacity = lane.layout.bounds, len(lane.shard.space) - len(lane.shard.records)
    how = (_steps(chosen), capacity, chosen.cache, chosen.delayed_sync)
    if chosen.oracle is None:
        return LocalPlanner(thread, Oracle(bounds, lane.rank, *how, lane.world_size))
    from pibroch.exchange.lookahead.remote_planner import RemotePlanner

    settings = [np.asarray(bounds).tolist(), lane.world_size, *how]
    return RemotePlanner(thread, chosen.oracle, lane.channel, settings, carrier.count_plans)
