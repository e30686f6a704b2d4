"""Whether an exchange's samples are assigned, by what, and the assignment of a loader."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from pibroch.assignment.assigner import MOST_RANKS, RowAssigner
from pibroch.assignment.rows_of import LaneRows, RowsOf
from pibroch.assignment.schedule import RankSchedule, Schedule
from pibroch.collectives import Channel
from pibroch.collectives.topology import Topology
from pibroch.data import JaggedBatch, Loader
from pibroch.data.loader import ids_of
from pibroch.embedding.row_index import LearningIndex
from pibroch.errors import ConfigError
from pibroch.exchange.agreement import check_same_options
from pibroch.exchange.base import Setup
from pibroch.exchange.layout import LaneLayout, lay_out
from pibroch.planner import Plan

ASSIGN = ("given", "rows")
_GIVEN = "leave `assign` out"


def rows_of(
    setup: Setup,
    assign: str,
    plan: Plan,
    horizon: int = 0,
    host_of_rank: Sequence[int] | None = None,
) -> RowsOf | None:
    """What an assigner needs of an exchange; every rank calls it.

    Args:
        setup: of the exchange.
        assign: ``given`` or ``rows``.
        plan: of homes.
        horizon: see :class:`RowsOf`.
        host_of_rank: found out when absent.

    Returns:
        ``None`` where samples stay as they are given, and on one rank.

    Raises:
        ConfigError: for another word, ranks that differ in it, or tables under which samples cannot
            be assigned by their rows.
    """
    if assign not in ASSIGN:
        raise ConfigError(f"assign {assign!r}", f"one of {', '.join(ASSIGN)}")
    channel = setup.channel
    check_same_options(channel, {"assign": assign})
    num_ranks = channel.ranks.world_size
    if assign == "given" or num_ranks == 1:
        return None
    if num_ranks > MOST_RANKS:
        raise ConfigError(f"assign 'rows' on {num_ranks} ranks", f"at most {MOST_RANKS}", _GIVEN)
    learning = [
        name
        for group in setup.groups
        for name, index in group.space.indices.items()
        if isinstance(index, LearningIndex)
    ]
    if learning:
        raise ConfigError(
            f"assign 'rows' with raw ids in table {learning[0]!r}, whose rows are known only when"
            " their step comes",
            "tables whose rows follow from ids",
            _GIVEN,
        )
    layouts = [layout for group in setup.groups for layout in lay_out(group.space, plan, 0)]
    if any(layout.owners_pool for layout in layouts):
        raise ConfigError(
            "assign 'rows' under a placement where owners pool: a bag travels wherever its sample"
            " is",
            "one under which rows travel, such as row_wise or table_wise",
            _GIVEN,
        )
    if host_of_rank is None:
        host_of_rank = Topology.gather(channel).host_of_rank
    return rows_under(layouts, num_ranks, horizon, host_of_rank)


def rows_under(
    layouts: Sequence[LaneLayout],
    num_ranks: int,
    horizon: int,
    host_of_rank: Sequence[int] = (),
) -> RowsOf:
    """Rows that lie as ``layouts`` say, as rank 0 sees them; see :class:`RowsOf`."""
    lanes = [
        LaneRows(
            layout.features,
            layout.index,
            layout.homes,
            layout.bounds,
            layout.num_replicated,
            layout.width,
        )
        for layout in layouts
    ]
    return RowsOf(tuple(lanes), num_ranks, horizon, tuple(host_of_rank))


def schedule_for(loader: Loader, rows: RowsOf, channel: Channel) -> RankSchedule:
    """The assignment of a rank's loader; every rank calls it.

    Raises:
        ConfigError: on every rank, when their loaders read different data; for a part that is not
            the rank's.
    """
    ranks = channel.ranks
    whole = (ranks.rank, ranks.world_size)
    problem = None
    if loader.part != whole:
        problem = f"a loader of part {loader.part} on rank {whole[0]} of {whole[1]}"
    problems: list[str | None] = channel.gather(problem)
    if any(problems):
        raise ConfigError(
            next(filter(None, problems)),
            "part=(rank, world_size) of one data set that every rank reads",
            "pass `part`, or leave `assign` out",
        )
    position = loader.position
    own = Loader(
        loader.split, loader.batch_size, shuffle=loader.shuffle, seed=loader.seed, part=loader.part
    )
    ids = ids_of(own.split, own.samples_at(position)).values
    read = [own.state_at(position), own.batch_size, zlib.crc32(ids.numpy().tobytes())]
    every: list[object] = channel.gather(read)
    if any(each != read for each in every):
        raise ConfigError(
            "assign 'rows' where ranks read separate data, or the same in another order",
            "one data set that every rank reads: any rank may train any sample",
            _GIVEN,
        )
    return RankSchedule(ranks.rank, Schedule(own, RowAssigner(rows)), rows)


def must_be_assigned(batch: JaggedBatch) -> None:
    """Refuse a batch that a rank has read for itself.

    Raises:
        ConfigError: for such a batch.
    """
    if batch.assigned is None:
        raise ConfigError(
            "assign 'rows' of batches that each rank reads for itself, such as a stream, files of"
            " its own, or a loader of another library",
            "a pibroch.data.Loader over one data set that every rank reads",
            _GIVEN,
        )
