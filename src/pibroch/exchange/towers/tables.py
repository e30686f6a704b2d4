"""The tables of each group of hosts, and where their embeddings lie among those of all tables.

Shape legend: B samples of a rank, S columns of all pooled embeddings, S_g of a group's, V ids of
tables that are not pooled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.embedding import SparseOptimizer, Table, TableGroup
from pibroch.embedding.groups import group_tables
from pibroch.errors import ConfigError
from pibroch.exchange.rows import room_for, spans_of
from pibroch.planner import Plan

Pair = tuple[slice, slice]
Index = tuple[slice, ...]


@dataclass(frozen=True, eq=False)
class TablesHere:
    """The tables of one group of hosts.

    Attributes:
        groups: of tables that are alike.
        features: that read them.
        number_of: of each of the groups, its number among those of all tables.
        columns: pairs of the same pooled embeddings' columns, here and among those of all tables.
        width: S_g.
        everywhere: the groups of all tables.
    """

    groups: tuple[TableGroup, ...]
    features: tuple[str, ...]
    number_of: tuple[int, ...]
    columns: tuple[Pair, ...]
    width: int
    everywhere: Sequence[TableGroup]

    @classmethod
    def of(cls, tables: Sequence[Table], everywhere: Sequence[TableGroup]) -> TablesHere:
        """Some of all tables."""
        number = {table.name: n for n, each in enumerate(everywhere) for table in each.space.tables}
        optimizers: Mapping[str, SparseOptimizer] = {
            t.name: everywhere[number[t.name]].optimizer for t in tables
        }
        indices = {name: index for each in everywhere for name, index in each.space.indices.items()}
        groups = group_tables(tables, optimizers, indices)
        features = tuple(dict.fromkeys(feature for table in tables for feature in table.features))
        number_of = tuple(number[each.space.tables[0].name] for each in groups)
        here = _columns(groups)
        there = _columns(everywhere)
        pairs = sorted((place.start, place, there[reader]) for reader, place in here.items())
        width = max((place.stop for place in here.values()), default=0)
        return cls(
            groups, features, number_of, _joined([pair[1:] for pair in pairs]), width, everywhere
        )

    def shapes(self, batch: JaggedBatch) -> list[tuple[int, ...]]:
        """Shapes of a batch's embeddings: pooled ones once, then the others, group by group."""
        own = [
            _shape_by_id(each, batch)
            for each in self.groups
            if batch.by_id or not each.space.is_pooled
        ]
        return [(batch.batch_size, self.width), *own] if self._has_room(batch) else [*own]

    def flat(self, batch: JaggedBatch, parts: Sequence[Tensor]) -> Tensor:
        """The embeddings of a batch, a tensor for each of the groups, as floats in one row."""
        return torch.cat([part.reshape(-1) for part in self._once(batch, parts)])

    def unflat(self, batch: JaggedBatch, floats: Tensor) -> list[Tensor]:
        """The inverse of :meth:`flat`: a tensor for each group, one for all that are pooled."""
        shapes = self.shapes(batch)
        parts = [
            part.view(shape)
            for part, shape in zip(floats.split(_sizes(shapes)), shapes, strict=True)
        ]
        room = parts.pop(0) if self._has_room(batch) else None
        return [
            parts.pop(0) if room is None or not each.space.is_pooled else room
            for each in self.groups
        ]

    def num_floats(self, batch: JaggedBatch) -> int:
        """How many floats the embeddings of a batch are."""
        return sum(_sizes(self.shapes(batch)))

    def put(self, batch: JaggedBatch, floats: Tensor, whole: Sequence[Tensor]) -> None:
        """Write the embeddings of a batch, flat, to their places among those of all tables.

        The batch has the features of all tables.
        """
        parts = self.unflat(batch, floats)
        for part, target, pairs in self._parts(batch, parts, whole):
            for here, there in pairs:
                target[there] = part[here]

    def take(self, batch: JaggedBatch, whole: Sequence[Tensor]) -> Tensor:
        """The inverse of :meth:`put`, for gradients."""
        floats = torch.empty(self.num_floats(batch))
        for part, source, pairs in self._parts(batch, self.unflat(batch, floats), whole):
            for here, there in pairs:
                part[here] = source[there]
        return floats

    def _parts(
        self, batch: JaggedBatch, tensors: Sequence[Tensor], whole: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor, list[tuple[Index, Index]]]]:
        """Each tensor once, with that of all tables, and where in both the same numbers are."""
        parts: list[tuple[Tensor, Tensor, list[tuple[Index, Index]]]] = []
        rows = slice(None)
        if self._has_room(batch):
            number = next(n for n, each in enumerate(self.groups) if each.space.is_pooled)
            blocks: list[tuple[Index, Index]] = [
                ((rows, here), (rows, there)) for here, there in self.columns
            ]
            parts.append((tensors[number], whole[self.number_of[number]], blocks))
        for number, each in enumerate(self.groups):
            if batch.by_id or not each.space.is_pooled:
                there = self.everywhere[self.number_of[number]]
                spans = _spans(each, batch)
                spans_everywhere = _spans(there, batch)
                parts.append(
                    (
                        tensors[number],
                        whole[self.number_of[number]],
                        [((spans[r],), (spans_everywhere[r],)) for r in spans],
                    )
                )
        return parts

    def _once(self, batch: JaggedBatch, parts: Sequence[Tensor]) -> list[Tensor]:
        pairs = list(zip(self.groups, parts, strict=True))
        own = [part for each, part in pairs if batch.by_id or not each.space.is_pooled]
        if not self._has_room(batch):
            return own
        return [next(part for each, part in pairs if each.space.is_pooled), *own]

    def _has_room(self, batch: JaggedBatch) -> bool:
        return self.width > 0 and not batch.by_id


def empty_for(groups: Sequence[TableGroup], batch: JaggedBatch) -> list[Tensor]:
    """Room for the embeddings of all tables: a tensor for each group, one for all pooled groups."""
    room = room_for(groups, batch)
    return [
        torch.empty(_shape_by_id(each, batch)) if room is None or not each.space.is_pooled else room
        for each in groups
    ]


def tables_of_towers(tables: Sequence[Table], towers: Sequence[Sequence[str]]) -> list[list[Table]]:
    """The tables of each tower, in the order of its features.

    Raises:
        ConfigError: for a table that features of two towers read.
    """
    tower_of = {feature: number for number, tower in enumerate(towers) for feature in tower}
    place = {
        feature: n for n, feature in enumerate(feature for tower in towers for feature in tower)
    }
    by_tower: list[list[Table]] = [[] for _ in towers]
    for table in sorted(tables, key=lambda table: place[table.features[0]]):
        numbers = [tower_of[feature] for feature in table.features]
        if len(set(numbers)) > 1:
            raise ConfigError(
                f"features of towers {numbers}, {', '.join(table.features)}, that read one table"
                f" {table.name!r}",
                "all readers of a table in one tower",
                "put them together, or give each a table of its own",
            )
        by_tower[numbers[0]].append(table)
    return by_tower


def within(plan: Plan, tables: Sequence[Table], members: Sequence[int]) -> Plan:
    """The part of a plan for all ranks that is about some tables, for the ranks that hold them.

    Raises:
        ConfigError: for a table that lies elsewhere too.
    """
    placements = {}
    for table in tables:
        placement = plan.placements[table.name]
        if placement.kind in ("rows", "replicated") or not set(placement.shards) <= set(members):
            raise ConfigError(
                f"table {table.name!r} placed {placement.kind} on ranks {list(placement.shards)}",
                f"on some of the ranks {list(members)}, which have its tower",
                "make a plan for these towers, or give a placement",
            )
        shards = tuple(members.index(shard) for shard in placement.shards)
        placements[table.name] = placement.model_copy(update={"shards": shards})
    return Plan(num_shards=len(members), placements=placements)


def _columns(groups: Sequence[TableGroup]) -> dict[tuple[str, str], slice]:
    """The columns of each pooled reader, that is feature and table, among those of ``groups``."""
    columns = {}
    for each in groups:
        if each.columns is not None:
            for reader, first in zip(_readers(each), each.columns.first.tolist(), strict=True):
                columns[reader] = slice(first, first + each.columns.dim)
    return columns


def _shape_by_id(each: TableGroup, batch: JaggedBatch) -> tuple[int, int]:
    return int(batch.offsets_of(each.space.features)[-1]), each.space.dim


def _readers(each: TableGroup) -> list[tuple[str, str]]:
    return [(feature, table.name) for table in each.space.tables for feature in table.features]


def _spans(each: TableGroup, batch: JaggedBatch) -> dict[tuple[str, str], slice]:
    """For each reader the span of its ids among those of the group."""
    return dict(zip(_readers(each), spans_of(each.space, batch), strict=True))


def _joined(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    """Join pairs that are neighbours on both sides."""
    joined: list[Pair] = []
    for here, there in pairs:
        if joined and joined[-1][0].stop == here.start and joined[-1][1].stop == there.start:
            before = joined.pop()
            here = slice(before[0].start, here.stop)
            there = slice(before[1].start, there.stop)
        joined.append((here, there))
    return tuple(joined)


def _sizes(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    return [rows * columns for rows, columns in shapes]
