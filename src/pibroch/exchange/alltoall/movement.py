"""Rows on their way to the homes of another plan while training goes on where they are.

Each row's record is sent ahead to its new home, a few a step. What is updated after it was sent is
sent again: first rows that nothing updates, then the others, then, between two steps, what is left.
Only then all ranks go over to the new homes at once. Until that moment the old ones are right and
checkpoints are theirs, so a run that is killed meanwhile resumes as if nothing had moved. It is how
virtual machines move between hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pibroch.embedding.row_set import ids_of
from pibroch.embedding.shard import MOVED, UNTOUCHED, UPDATED
from pibroch.errors import ConfigError
from pibroch.exchange.alltoall.group_lanes import GroupLanes
from pibroch.exchange.alltoall.row_lane import RowLane
from pibroch.exchange.layout import LaneLayout
from pibroch.exchange.messages import Counts, Messages, Values, together
from pibroch.exchange.wire import RowWire
from pibroch.kernels.arrays import Ints

EVERYWHERE = -1
ROWS_PER_LOOK = 1 << 14
COLD, HOT, READY = range(3)
"""Stages: rows that nothing has updated are sent; then those updated since; then all were sent."""


@dataclass(slots=True, eq=False)
class LaneMovement:
    """The rows of one lane on their way to the homes of another plan.

    Attributes:
        before: where they are.
        after: where they go.
        target: int64, of each row of this rank's shard the rank of its new home, or EVERYWHERE.
        place: int64, of each its number there.
        is_own: bool, whether this rank moves it: of copies each rank keeps its own.
        cursor: rows before it were looked at, see :meth:`next_cold`.
    """

    before: RowLane
    after: RowLane
    target: Ints
    place: Ints
    is_own: NDArray[np.bool_]
    cursor: int = 0

    @classmethod
    def between(cls, before: RowLane, after: RowLane) -> LaneMovement:
        """Find where each row of this rank is to go."""
        new = _places(after.layout)
        targets = []
        places = []
        for piece in before.layout.pieces[before.rank]:
            target, place = (numbers[ids_of(piece.rows)] for numbers in new[piece.table.name])
            targets.append(target)
            places.append(place)
        empty = np.empty(0, np.int64)
        target = np.concatenate([empty, *targets])
        place = np.concatenate([empty, *places])
        is_copy = np.arange(len(target)) < before.layout.num_replicated
        target = np.where(is_copy & (target == EVERYWHERE), before.rank, target)
        is_own = ~is_copy | (target == before.rank)
        before.shard.progress = np.where(is_own, UNTOUCHED, MOVED).astype(np.uint8)
        return cls(before, after, target, place, is_own)

    def restart(self) -> None:
        """Send all rows again."""
        assert self.before.shard.progress is not None, "while they move"
        self.before.shard.progress[self.is_own] = UNTOUCHED
        self.cursor = 0

    def next_cold(self, most: int) -> Ints:
        """The next rows that nothing has updated; costs what they do."""
        progress = self.before.shard.progress
        assert progress is not None, "while they move"
        parts = [np.empty(0, np.int64)]
        count = 0
        while self.cursor < len(progress) and count < most:
            rows = self.cursor + np.flatnonzero(
                progress[self.cursor : self.cursor + ROWS_PER_LOOK] == UNTOUCHED
            )
            rows = rows[: most - count]
            is_full = count + len(rows) == most
            self.cursor = (
                int(rows[-1]) + 1 if is_full else min(self.cursor + ROWS_PER_LOOK, len(progress))
            )
            parts.append(rows)
            count += len(rows)
        return np.concatenate(parts)

    def left(self, *states: int) -> Ints:
        """The rows of this rank that are in one of these states."""
        assert self.before.shard.progress is not None, "while they move"
        return np.flatnonzero(np.isin(self.before.shard.progress, states) & self.is_own)

    def send(self, rows: Ints, left: int) -> Messages[int]:
        """Send rows of this rank, and write those of other ranks to their new places.

        Returns how many all ranks have left.

        Args:
            rows: of the shard.
            left: how many this rank has still to send after these.
        """
        world_size = self.before.world_size
        shard = self.before.shard
        assert shard.progress is not None, "while they move"
        by_rank = [
            rows[(self.target[rows] == p) | (self.target[rows] == EVERYWHERE)]
            for p in range(world_size)
        ]
        counts = [len(some) for some in by_rank]
        chosen = np.concatenate(by_rank)
        answer = yield Counts(torch.tensor([[count, left] for count in counts]))
        receive_counts = answer.tensor[:, 0].tolist()
        places = yield Values(torch.from_numpy(self.place[chosen]), counts, receive_counts)
        records = yield Values(torch.from_numpy(shard.records[chosen]), counts, receive_counts)
        self.after.shard.records[places.tensor.numpy()] = records.tensor.numpy()
        shard.progress[rows] = MOVED
        return int(answer.tensor[:, 1].sum())

    def finish(self) -> None:
        """Make the new homes the valid ones, whose rows all count as updated."""
        for name in self.before.shard.marks.names:
            self.after.shard.start_marks(name)
            self.after.shard.mark_all(name)


class RowMovement:
    """Moves all rows, see the module.

    The communication thread calls its methods, on all ranks in the same order.

    Args:
        before, after: the lanes of each group, under both plans.
        wire: of all of them.
        rows_per_step: at most, of each lane.

    Raises:
        ConfigError: for plans between which rows cannot move.
    """

    def __init__(
        self,
        before: Sequence[GroupLanes],
        after: Sequence[GroupLanes],
        wire: RowWire,
        rows_per_step: int,
    ) -> None:
        self.after = after
        self._wire = wire
        self._rows_per_step = rows_per_step
        self._lanes = [LaneMovement.between(*pair) for pair in _pairs(before, after)]
        self._stage = COLD
        self._hot: list[Ints] = []
        self.rows_sent = 0

    def move_some(self) -> bool:
        """Send some rows ahead; returns whether all that can be sent ahead were."""
        if self._stage == READY:
            return True
        most = self._rows_per_step
        if self._stage == COLD:
            chosen = [lane.next_cold(most) for lane in self._lanes]
            left = sum(len(lane.target) - lane.cursor for lane in self._lanes)
        else:
            chosen = [rows[:most] for rows in self._hot]
            self._hot = [rows[most:] for rows in self._hot]
            left = sum(map(len, self._hot))
        if self._send(chosen, left) == 0:
            self._stage += 1
            self._hot = [lane.left(UPDATED) for lane in self._lanes]
        return self._stage == READY

    def move_rest(self) -> None:
        """Send what is left; nothing may be updated until the new homes are used."""
        self._send([lane.left(UNTOUCHED, UPDATED) for lane in self._lanes], 0)
        for lane in self._lanes:
            lane.finish()

    def restart(self) -> None:
        """Begin again, as rows were written from outside."""
        for lane in self._lanes:
            lane.restart()
        self._stage = COLD

    def _send(self, rows: Sequence[Ints], left: int) -> int:
        self.rows_sent += sum(map(len, rows))
        return sum(
            together(
                self._wire,
                [lane.send(some, left) for lane, some in zip(self._lanes, rows, strict=True)],
            )
        )


def _pairs(
    before: Sequence[GroupLanes], after: Sequence[GroupLanes]
) -> Iterator[tuple[RowLane, RowLane]]:
    for old, new in zip(before, after, strict=True):
        for lanes in (old.lanes, new.lanes):
            (first, *others) = lanes
            if others or not isinstance(first, RowLane) or first.layout.width != old.space.dim:
                raise ConfigError(
                    "rows to be moved from or to a placement that cuts rows, or where owners pool",
                    "plans under which whole rows travel: table_wise, row_wise, replicated, or by"
                    " rows",
                )
            assert isinstance(first, RowLane), "just looked"
        one = old.lanes[0]
        other = new.lanes[0]
        assert isinstance(one, RowLane) and isinstance(other, RowLane), "just looked"
        yield one, other


def _places(layout: LaneLayout) -> dict[str, tuple[Ints, Ints]]:
    """By table the rank and the place of each row."""
    places_by_table: dict[str, tuple[Ints, Ints]] = {}
    for rank, pieces in enumerate(layout.pieces):
        first = 0
        for piece in pieces:
            table = piece.table
            ids = ids_of(piece.rows)
            nothing = np.zeros(table.num_rows, np.int64), np.zeros(table.num_rows, np.int64)
            ranks, places = places_by_table.setdefault(table.name, nothing)
            ranks[ids] = EVERYWHERE if first < layout.num_replicated else rank
            places[ids] = np.arange(first, first + len(ids))
            first += len(ids)
    return places_by_table
