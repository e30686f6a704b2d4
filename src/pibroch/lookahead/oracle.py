"""The oracle (BagPipe, Algorithm 1, for any number of ranks): ids of future batches in, a plan for each step out.

Every rank has one, feeds it the same ids, and gets its own view of the same plan; see ``docs/design/0005-lookahead.md`` for
the words and rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pibroch.errors import ConfigError
from pibroch.kernels.window import numba as kernels
from pibroch.kernels.window.numba import Gradients, Ints, Site, Slots, Travel, Window

DESIGNS = {"lrpp": kernels.LRPP, "partitioned": kernels.PARTITIONED, "replicated": kernels.REPLICATED}
MAX_RANKS = 62  # bits in a mask of readers
_FIRST_TOUCHES = 1 << 16


@dataclass(frozen=True, slots=True)
class Opening:
    """What travels before the first step that the oracle plans.

    Attributes:
        now: rows of the step.
        early: rows of the one after it, but for those that the step touches.
        places: int64 ``[U]``, where this rank reads the step's rows, in the order in which they were given.
    """

    now: Travel
    early: Travel | None
    places: Ints


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What happens after the embeddings' gradient of a step is known, in this order.

    Attributes:
        number: of the step.
        critical: gradients and updates of rows that the next step touches.
        is_tight: whether ``deferred`` and ``leaving`` come before ``soon``, for want of slots.
        soon: rows of the next step that this step has updated.
        deferred: the gradients and updates of other rows that several ranks touched.
        alone: updates of rows that this rank alone touched, and that are not critical: any time before ``leaving``.
        leaving: records that go home, one message each.
        early: rows of the step after next, but for those that the next step touches; ``None`` when they come later.
        places: int64, where this rank reads the rows of the next step.
        lookahead: steps in force.
        used: int64 ``[P]``, slots in use on each rank afterwards.
    """

    number: int
    critical: Gradients
    is_tight: bool
    soon: Travel
    deferred: Gradients
    alone: Gradients
    leaving: list[Travel]
    early: Travel | None
    places: Ints
    lookahead: int
    used: Ints


class Oracle:
    """Plans steps in their order; none before the ``lookahead`` steps after it are known, or the last of all.

    Args:
        bounds: int64 ``[P + 1]``, the first address of each rank's home; P is W, or W and the number of servers.
        rank: whose view is wanted.
        lookahead: steps beyond the current one that are looked at, at least 1.
        capacity: slots of each rank for rows whose home is elsewhere.
        design: of the cache, a key of ``DESIGNS``.
        delayed: whether what the next step does not need is synchronised later (Sec. 3.3); without, all is critical.
        num_trainers: W, ranks that read; those beyond are servers, which have homes only. All P when absent.

    Raises:
        ConfigError: for a lookahead, capacity or number of ranks that cannot be.
    """

    def __init__(
        self, bounds: Ints, rank: int, lookahead: int, capacity: int, design: str = "lrpp", delayed: bool = True,
        num_trainers: int | None = None,
    ) -> None:  # fmt: skip
        num_rows, num_ranks, num_home = int(bounds[-1]), len(bounds) - 1, int(bounds[rank + 1] - bounds[rank])
        if lookahead < 1:
            raise ConfigError(f"lookahead {lookahead}", "at least 1 step")
        if capacity < 0:
            raise ConfigError(f"a cache of {capacity} rows", "at least 0")
        if design not in DESIGNS:
            raise ConfigError(f"cache design {design!r}", f"one of {', '.join(DESIGNS)}")
        if num_ranks > MAX_RANKS:
            raise ConfigError(f"{num_ranks} ranks and servers", f"at most {MAX_RANKS}", "use exchange='alltoall'")
        if num_home + capacity >= 1 << 31:
            raise ConfigError(f"{num_home + capacity:,} rows on one rank", "fewer than 2**31", "use more ranks")
        self.lookahead, self.capacity, self.delayed = lookahead, capacity, delayed
        self.step = 0
        """Number of the step that is planned next."""
        self.in_force = lookahead
        self._site = Site(bounds, rank, DESIGNS[design], num_home, num_ranks if num_trainers is None else num_trainers)
        self._row_type = np.dtype(np.int32 if num_rows < 1 << 31 else np.int64)
        self._mask_type = next(
            np.dtype(kind) for kind, bits in ((np.uint8, 8), (np.uint16, 16), (np.int64, 64)) if num_ranks <= bits
        )
        self._window = self._ring(_FIRST_TOUCHES, np.zeros(num_rows, np.int64))
        self._slots = Slots(np.empty(capacity, np.int32), np.zeros(1, np.int64), np.zeros(num_ranks, np.int64))
        self._begins: deque[int] = deque()  # first touch of each step from ``step`` on
        self._mine: deque[Ints] = deque()
        self._end = 1
        self._free_all()

    @property
    def num_known(self) -> int:
        """Steps that are known and not planned."""
        return len(self._begins)

    def add(self, rows_of_rank: Sequence[NDArray[Any]]) -> None:
        """The addresses that each rank touches in one more step; duplicates are allowed.

        Raises:
            ConfigError: when no cache of this capacity could hold what one rank reads in the step.
        """
        self._check_fits(rows_of_rank)
        self._make_room(sum(len(rows) for rows in rows_of_rank))
        begin = self._end
        first = np.array([[*self._begins, begin][0], self._begins[-1] if self._begins else begin, begin], np.int64)
        for rank, rows in enumerate(rows_of_rank):
            numbers = np.empty(len(rows), np.int64)
            self._end = kernels.enter(self._window, rows, rank, first, self._end, numbers)
            if rank == self._site.rank:
                self._mine.append(numbers)
        self._begins.append(begin)

    def _check_fits(self, rows_of_rank: Sequence[NDArray[Any]]) -> None:
        site, read = self._site, rows_of_rank
        if len(site.bounds) == 2:  # all rows are at home
            return
        if site.design == kernels.REPLICATED:
            read = [np.concatenate(rows_of_rank)]
        elif site.design == kernels.PARTITIONED and site.num_trainers < len(site.bounds) - 1:
            everything = np.concatenate(rows_of_rank)
            owner = everything % site.num_trainers
            read = [np.concatenate([rows, everything[owner == rank]]) for rank, rows in enumerate(rows_of_rank)]
        if max(map(len, read)) <= self.capacity:
            return
        counts = [len(np.unique(rows)) for rows in read]
        if max(counts) > self.capacity:
            raise ConfigError(
                f"a batch of which rank {int(np.argmax(counts))} reads {max(counts):,} rows, and a cache of "
                f"{self.capacity:,}", "room for the rows of one batch", "raise cache_rows, or train with smaller batches",
            )  # fmt: skip

    def open(self) -> Opening:
        """Begin with the step that is planned next, all records being at home."""
        now = self._arrive(0, kernels.ALL)
        early = self._early(1) if self.num_known > 1 else None
        return Opening(now, early, self._places(0))

    def plan(self) -> StepPlan:
        """Plan the next step."""
        window, site, slots = self._window, self._site, self._slots
        self.in_force = min(self.lookahead, self.in_force + 1, max(1, self.num_known - 1))
        begin, end = self._span(0)
        soon = self._span(1)[1] if self.delayed else kernels.NEVER
        critical, deferred, alone = kernels.settle(window, site, begin, end, soon, self._mine[0])
        done = kernels.close(window, site, slots, begin, end, self._span(self.in_force)[1])
        is_tight, leaving, early = self._is_full(1, kernels.ALL), list[Travel](), None
        if is_tight:
            leaving = [kernels.go_home(window, site, slots, done), *self._shrink(1, kernels.ALL)]
        arrived = self._arrive(1, kernels.ALL)
        if not is_tight:
            leaving = [kernels.go_home(window, site, slots, done)]
            if self.num_known > 2 and self.in_force > 1:
                leaving += self._shrink(2, kernels.EARLY)
                early = self._early(2)
        places = self._places(1)
        self._begins.popleft()
        self._mine.popleft()
        self.step += 1
        return StepPlan(
            self.step - 1, critical, is_tight, arrived, deferred, alone, leaving, early, places, self.in_force,
            slots.used.copy(),
        )  # fmt: skip

    def restart(self) -> None:
        """Forget all steps; all records are at home."""
        self.step += self.num_known
        self._begins.clear()
        self._mine.clear()
        self.in_force = self.lookahead
        self._free_all()

    def _early(self, step: int) -> Travel | None:
        """The early rows of a step, or nothing yet where there is no room for them."""
        return None if self._is_full(step, kernels.EARLY) else self._arrive(step, kernels.EARLY)

    def _arrive(self, step: int, which: int) -> Travel:
        travel: Travel = kernels.arrive(self._window, self._site, self._slots, *self._span(step), which)
        return travel

    def _is_full(self, step: int, which: int) -> bool:
        """Whether some rank has too few slots for the arrival of a step's rows."""
        begin, end = self._span(step)
        used = self._slots.used
        if used.max() + end - begin <= self.capacity:  # enough, whatever arrives
            return False
        needed = np.zeros_like(used)
        kernels.count_arrivals(self._window, self._site, begin, end, which, needed)
        return bool((used + needed > self.capacity).any())

    def _shrink(self, step: int, which: int) -> list[Travel]:
        """Send home what waits for the farthest steps until there is room for a step's arrival, or nothing left to send."""
        leaving = []
        nearest = step if which == kernels.ALL else step + 1
        for later in range(self.num_known - 1, nearest - 1, -1):
            if not self._is_full(step, which):
                break
            waiting = kernels.waiting_for(self._window, *self._span(later))
            if len(waiting):
                leaving.append(kernels.go_home(self._window, self._site, self._slots, waiting))
                self.in_force = max(1, later - 1)
        return leaving

    def _places(self, step: int) -> Ints:
        if step >= self.num_known:
            return np.empty(0, np.int64)
        places = np.empty(len(self._mine[step]), np.int64)
        kernels.places_of(self._window, self._mine[step], places)
        return places

    def _span(self, step: int) -> tuple[int, int]:
        """First touch, and end, of the step that comes ``step`` after the next planned one; empty beyond the last."""
        begins = [self._begins[i] if i < len(self._begins) else self._end for i in (step, step + 1)]
        return begins[0], begins[1]

    def _free_all(self) -> None:
        self._slots.free[:] = np.arange(self._site.num_home + self.capacity - 1, self._site.num_home - 1, -1)
        self._slots.depth[0], self._slots.used[:] = self.capacity, 0

    def _make_room(self, num_touches: int) -> None:
        """A larger ring where the touches do not fit into this one."""
        begin, size = self._begins[0] if self._begins else self._end, len(self._window.row)
        if self._end - begin + num_touches <= size:
            return
        while self._end - begin + num_touches > size:
            size *= 2
        larger = self._ring(size, self._window.newest)
        kernels.move(self._window, larger, begin, self._end)
        self._window = larger

    def _ring(self, size: int, newest: Ints) -> Window:
        def room(dtype: Any) -> NDArray[Any]:
            return np.empty(size, dtype)

        return Window(
            newest, room(self._row_type), room(self._mask_type), room(np.int32), room(np.int8), room(np.int8),
            room(np.int32), room(np.uint8),
        )  # fmt: skip
