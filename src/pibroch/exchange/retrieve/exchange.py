"""Lookups that read rows where they are, each rank for itself; training in step, over the same.

Until something is trained each rank looks up for itself: requests to other hosts leave first, rows
of this host are read meanwhile, pooling comes last. All of that is done by the thread that calls,
and threads of their own answer other hosts, see :mod:`pibroch.exchange.retrieve.gets`.

From the first training batch on lookups keep step as those of ``alltoall`` do, so that a lookup in
the middle of a run sees the same rows on all ranks. Then rows travel in messages of the
communication thread, also from ranks of this host: the messages' memory is shared, too, and one
copy costs less than to wait for one's neighbours before each read and before each update.

A rank's rows have a *version*: it counts how often somebody has begun or ended to write them from
outside. So an odd one is being written, and rows that were read between two looks at one even
number are of one version.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.embedding.rows import read_rows
from pibroch.errors import TrainingError
from pibroch.exchange.alltoall.exchange import AllToAllExchange
from pibroch.exchange.alltoall.group_lanes import GroupLanes
from pibroch.exchange.alltoall.inference import narrowed, widened
from pibroch.exchange.prefetching import FedStep
from pibroch.exchange.retrieve.copies import LaneCopies
from pibroch.exchange.retrieve.gets import RemoteGets
from pibroch.exchange.retrieve.host_memory import COPIED, VERSION, HostMemory
from pibroch.exchange.retrieve.lane import RetrieveLane, WantedRows, share
from pibroch.exchange.wire import RowWire
from pibroch.kernels.arrays import Bytes
from pibroch.planner import Plan

ROWS_PER_GET = 1 << 16
"""Rows in one request when copies are filled."""
MOST_TRIES = 100
"""Of one lookup while tables are loaded; each begins after the load that it met."""
LOADER_STARTS_S = 3.0
"""How long a thread that has loaded rows waits for other threads; see :meth:`HeldRows.settled`."""


def whole(version: int) -> int:
    """The version itself, or where it is being written what it will be.

    >>> [whole(version) for version in range(4)]
    [0, 2, 2, 4]
    """
    return version + version % 2


class HeldRows:
    """The rows of this rank, for threads that answer requests; several may call it at once.

    Args:
        timeout_s: how long to wait for a version.

    Attributes:
        lanes: of the rows.
        version: the one in force, odd while rows are written.
    """

    def __init__(self, timeout_s: float) -> None:
        self.lanes: Sequence[RetrieveLane] = ()
        self.version = 0
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._writer = threading.get_ident()

    def advance(self) -> None:
        """Rows are going to be written, or were."""
        with self._changed:
            self.version += 1
            self._writer = threading.get_ident()
            self._changed.notify_all()

    def settled(self, least: int) -> int:
        """Wait for a version that is whole, and at least this one; returns it.

        Raises:
            TrainingError: when it is not there in time. The time is short where the calling thread
                alone has loaded rows so far: it may be the one that has to load them again.
        """
        with self._changed:
            if self._is_settled(least):
                return self.version
            is_own_load = threading.get_ident() == self._writer
            timeout_s = min(LOADER_STARTS_S, self._timeout_s) if is_own_load else self._timeout_s
            if not self._changed.wait_for(lambda: self._is_settled(least), timeout_s):
                raise TrainingError(
                    f"a lookup of rows that others have loaded {least // 2} times, and this rank"
                    f" {self.version // 2} times",
                    "tables that all ranks load equally often",
                    "load them here, too, before lookups or on another thread",
                )
            return self.version

    def answer(
        self, version: int, averaged_at: int | None, rows: Sequence[Bytes]
    ) -> list[Bytes] | int:
        """See :data:`pibroch.exchange.retrieve.gets.Reads`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_settled(version), self._timeout_s):
                raise TrainingError(
                    f"rows that this rank has loaded {self.version // 2} times, where another has"
                    f" loaded its own {version // 2} times",
                    "tables that all ranks load equally often",
                    "load them on all ranks",
                )
            if self.version != version:
                return self.version
            return [
                self._read(lane, part, averaged_at)
                for lane, part in zip(self.lanes, rows, strict=True)
            ]

    def _is_settled(self, least: int) -> bool:
        return self.version >= least and self.version % 2 == 0

    def _read(self, lane: RetrieveLane, part: Bytes, averaged_at: int | None) -> Bytes:
        rows = part.view(lane.id_type).astype(np.int64)
        return narrowed(read_rows(lane.shard, lane.optimizer, rows, averaged_at), lane.wire.dtype)


class RetrieveExchange(AllToAllExchange):
    """Retrieval of rows for lookups, ``alltoall`` for training, see the module.

    Args:
        groups: all tables, with the lanes of each group, which are :class:`RetrieveLane`.
        wire: as for :class:`AllToAllExchange`.
        host: the memory in which the lanes' rows are.
        groups_under: as for :class:`AllToAllExchange`.
    """

    def __init__(
        self,
        groups: Sequence[GroupLanes],
        wire: RowWire,
        host: HostMemory,
        groups_under: Callable[[Plan], list[GroupLanes]] | None = None,
    ) -> None:
        self._host = host
        self._held = HeldRows(wire.channel.ranks.timeout_s)
        super().__init__(groups, wire, groups_under)
        self._one_at_a_time = threading.Lock()
        self._trains = False
        self._gets = RemoteGets(wire.channel, host.hosts, self._held.answer)
        weakref.finalize(self, self._gets.close)

    def _use(self, groups: Sequence[GroupLanes]) -> None:
        super()._use(groups)
        self._row_lanes = [lane for lane in self._lanes if isinstance(lane, RetrieveLane)]
        assert len(self._row_lanes) == len(self._lanes), "see build"
        share(self._host, self._row_lanes)
        self._held.lanes = self._row_lanes
        self._has_copies = any(lane.copies is not None for lane in self._row_lanes)

    def feed(self, batches: Iterable[JaggedBatch], trains: bool) -> Iterator[JaggedBatch]:
        """See :class:`Exchange`; without training it hands out batches as they are."""
        self._trains |= trains
        yield from super().feed(batches, trains) if self._keeps_step else batches

    def lookup(
        self, batch: JaggedBatch, trains: bool, averaged_at: int | None = None
    ) -> tuple[list[Tensor], FedStep]:
        """See :class:`Exchange`."""
        self._trains |= trains
        if self._keeps_step:
            return super().lookup(batch, trains, averaged_at)
        with self._one_at_a_time:
            return self._look_up_alone(batch, averaged_at), FedStep(batch, True)

    def forget(self) -> None:
        """See :class:`Exchange`; later lookups, of whatever rank, read what was written."""
        super().forget()
        self._held.advance()
        self._host.publish(VERSION, self._held.version)

    @property
    def _keeps_step(self) -> bool:
        return self._trains or self._ranks.world_size == 1

    def _look_up_alone(self, batch: JaggedBatch, averaged_at: int | None) -> list[Tensor]:
        """Look up rows that are all of one version, which is not before this rank's.

        It begins again where some rank is loading rows.
        """
        batch.validate()
        least = 0
        for _ in range(MOST_TRIES):
            own = self._held.settled(0)
            version = max(own, least)
            by_copies = (
                self._has_copies
                and averaged_at is None
                and version == own
                and self._copies_are_there(own)
            )
            parts = [lane.wanted_rows(batch, by_copies=by_copies) for lane in self._row_lanes]
            later = self._read(parts, version, averaged_at)
            if later is None:
                room = self.room_for(batch)
                return self.assemble(batch, [each.pool(room) for each in parts])
            least = later
        raise TrainingError(
            f"tables that were loaded anew in each of {MOST_TRIES} attempts to look a batch up",
            "some time between loads",
            "load less often, or look up smaller batches",
        )

    def _read(
        self, parts: Sequence[WantedRows], version: int, averaged_at: int | None
    ) -> int | None:
        """Fill in the rows of each lane; returns a later version where some holder has one."""
        holders = sorted({holder for each in parts for holder in each.holders()})
        far = [p for p in holders if p in self._gets.peers]
        asked = [self._ask(p, parts, version, averaged_at) for p in far]
        near = (
            self._host.neighbours if any(p >= self._ranks.world_size for p in holders) else holders
        )
        near = [p for p in near if p in self._host.neighbours]
        versions = self._read_here(parts, version, averaged_at, near, self._ranks.rank in holders)
        with self._ranks.waiting():
            answers = [take() for take in asked]
        later = max(version, *versions, *(answer for answer in answers if answer is not None))
        return None if later == version else later

    def _read_here(
        self,
        parts: Sequence[WantedRows],
        version: int,
        averaged_at: int | None,
        near: Sequence[int],
        own: bool,
    ) -> list[int]:
        """Fill in the rows of this host; returns its ranks' versions before and after."""
        before = [self._held.settled(version)] if own else [version]
        for p in near:
            self._host.wait_for(p, VERSION, version)
        before += self._versions(near)
        if max(before) == version:
            for each in parts:
                each.read_near(averaged_at)
        return [*before, *self._versions(near), whole(self._held.version) if own else version]

    def _versions(self, ranks: Iterable[int]) -> list[int]:
        """The versions of neighbours; of one that is being written what it will be."""
        return [whole(self._host.published_by(p, VERSION)) for p in ranks]

    def _copies_are_there(self, version: int) -> bool:
        """Fill this rank's copies; returns whether all ranks of the host have filled theirs."""
        if self._host.published(COPIED) <= version:
            lanes = [(lane, lane.copies) for lane in self._row_lanes if lane.copies is not None]
            if not all(self._fill(*each, version) for each in lanes):
                return False
            self._host.publish(COPIED, version + 1)
        return all(self._host.published_by(p, COPIED) == version + 1 for p in self._host.neighbours)

    def _fill(self, lane: RetrieveLane, copies: LaneCopies, version: int) -> bool:
        """Get this rank's copies of a lane's rows; false where a home has a later version."""
        own = sum(p < lane.rank for p in lane.near)
        sources = copies.sources[own]
        rows = lane.copied[lane.world_size + own]
        order = np.argsort(sources)
        for start in range(0, len(order), ROWS_PER_GET):
            chosen = order[start : start + ROWS_PER_GET]
            parts = [
                WantedRows.at(
                    each, sources[chosen if each is lane else chosen[:0]], each.layout.bounds
                )
                for each in self._row_lanes
            ]
            if self._read(parts, version, None) is not None:
                return False
            rows.write(chosen, parts[self._row_lanes.index(lane)].rows)
        return True

    def _ask(
        self, p: int, parts: Sequence[WantedRows], version: int, averaged_at: int | None
    ) -> Callable[[], int | None]:
        """Ask a rank of another host for its rows.

        Returns what waits until they are where they belong, or says which later version is there.
        """
        places = [each.part(p).reshape(-1) for each in parts]
        dtype = self.wire.dtype
        rooms = [
            place.view(np.uint8)
            if self.wire.is_exact
            else np.empty(place.size * dtype.itemsize, np.uint8)
            for place in places
        ]
        rows = [each.offsets(p).astype(each.lane.id_type) for each in parts]
        answer = self._gets.ask(p, version, averaged_at, rows, rooms)

        def take() -> int | None:
            later = answer()
            if later is None and not self.wire.is_exact:
                for place, room in zip(places, rooms, strict=True):
                    place[:] = widened(room, dtype).reshape(-1)
            return later

        return take
