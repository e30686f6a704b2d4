"""The oracle (BagPipe, Algorithm 1, for any number of ranks): future ids in, plans out.

Every rank has one, feeds it the same ids, and gets its own view of the same plan; see
``docs/design/0005-lookahead.md`` for the words and rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pibroch.errors import ConfigError
from pibroch.exchange.lookahead.oracle.kernels import window as kernels
from pibroch.exchange.lookahead.oracle.kernels.window import (
    HOME,
    LRPP,
    MAX_RANKS,
    PARTITIONED,
    REPLICATED,
    Gradients,
    Places,
    Site,
    Slots,
    Transfer,
    Window,
    mask_type,
    rank_type,
    settle,
    words_for,
)
from pibroch.exchange.lookahead.oracle.row_states import MOST_ROWS_IN_FULL, RowStates
from pibroch.kernels.arrays import Ints, RowIds, distinct

DESIGNS = {"lrpp": LRPP, "partitioned": PARTITIONED, "replicated": REPLICATED}
EARLY = 0
ALL = 1
MOST_EARLY_STEPS = 32
_FIRST_TOUCHES = 1 << 16


def early_steps(lookahead: int) -> int:
    """How many steps before it is read a row may be requested of a server, 0 for not at all.

    So long may the server be late. Plans move rows two steps ahead.

    >>> [early_steps(lookahead) for lookahead in (1, 5, 6, 40, 200)]
    [0, 0, 3, 20, 32]
    """
    steps = min(MOST_EARLY_STEPS, lookahead // 2)
    return steps if steps > 2 else 0


@dataclass(frozen=True, slots=True)
class Opening:
    """What transfers before the first step that the oracle plans.

    Attributes:
        now: rows of the step.
        prefetch: rows of the one after it, but for those that the step touches.
        places: int64 ``[U]``, where this rank reads the step's rows, in the order in which they
            were given.
    """

    now: Transfer
    prefetch: Transfer | None
    places: Ints


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What happens after the embeddings' gradient of a step is known, in this order.

    Attributes:
        number: of the step.
        critical: gradients and updates of rows that the next step touches.
        is_tight: whether ``deferred`` and ``evicted`` come before ``next_step``, for want of slots.
        next_step: rows of the next step that this step has updated.
        deferred: the gradients and updates of other rows that several ranks touched.
        local: updates of rows that this rank alone touched, and that are not critical: any time
            before ``evicted``.
        evicted: records that go home, one message each.
        prefetch: rows of the step after next, but for those that the next step touches; ``None``
            when they come later.
        places: int64, where this rank reads the rows of the next step.
        lookahead: steps in force.
        used: int64 ``[P]``, slots in use on each rank afterwards.
        early: int64, rising addresses that this rank reads :func:`early_steps` later, whose records
            are at home on servers, and stay as they are until a plan moves them: a copy that is
            requested now is there by then.
    """

    number: int
    critical: Gradients
    is_tight: bool
    next_step: Transfer
    deferred: Gradients
    local: Gradients
    evicted: list[Transfer]
    prefetch: Transfer | None
    places: Ints
    lookahead: int
    used: Ints
    early: Ints


class RowsOfRanks(NamedTuple):
    """Addresses that the ranks touch in a step.

    Attributes:
        rows: of all ranks in their order.
        bounds: int64 ``[W + 1]``, of those of each.
    """

    rows: RowIds
    bounds: Ints

    @classmethod
    def of(cls, rows_of_rank: Sequence[RowIds] | RowsOfRanks) -> RowsOfRanks:
        """The same of one array a rank."""
        if isinstance(rows_of_rank, RowsOfRanks):
            return rows_of_rank
        bounds = np.zeros(len(rows_of_rank) + 1, np.int64)
        np.cumsum([len(rows) for rows in rows_of_rank], out=bounds[1:])
        return cls(np.concatenate(rows_of_rank), bounds)


@dataclass(slots=True)
class WindowStep:
    """A step in the window, as the touches that it has in the ring.

    Attributes:
        number: of its first touch.
        begin: index of its first touch in the ring.
        end: index behind its last one.
        own: touches of this rank, in the order of its rows.
        fresh: touches that the step before has not.
        again: those that it has.
        here: touches that concern this rank, of those that have arrived.
        is_begun: whether the fresh ones have arrived.
    """

    number: int
    begin: int
    end: int
    own: Places
    fresh: Places
    again: Places
    here: Places = field(default_factory=lambda: np.empty(0, np.int32))
    is_begun: bool = False

    def shift(self, by: int) -> None:
        """Move all indices ``by`` further, for a larger ring."""
        self.begin = self.begin + by
        self.end = self.end + by
        self.own, self.fresh, self.again, self.here = (
            each + np.int32(by) for each in (self.own, self.fresh, self.again, self.here)
        )


class Oracle:
    """Plans steps in their order, each once the ``lookahead`` steps after it are known, or all.

    Args:
        bounds: int64 ``[P + 1]``, the first address of each rank's home; P is W, or W and the
            number of servers.
        rank: whose view is wanted.
        lookahead: steps beyond the current one that are looked at, at least 1.
        capacity: slots of each rank for rows whose home is elsewhere.
        design: of the cache, a key of ``DESIGNS``.
        delayed: whether what the next step does not need is synchronised later (Sec. 3.3); without,
            all is critical.
        num_trainers: W, ranks that read; those beyond are servers, which have homes only. All P
            when absent.
        most_rows_in_full: up to so many rows the state of all is kept, else that of the rows in the
            window; plans are the same.

    Raises:
        ConfigError: for a lookahead, capacity or number of ranks that cannot be.
    """

    def __init__(
        self,
        bounds: Ints,
        rank: int,
        lookahead: int,
        capacity: int,
        design: str = "lrpp",
        delayed: bool = True,
        num_trainers: int | None = None,
        most_rows_in_full: int = MOST_ROWS_IN_FULL,
    ) -> None:
        num_rows = int(bounds[-1])
        num_ranks = len(bounds) - 1
        num_home = int(bounds[rank + 1] - bounds[rank])
        if lookahead < 1:
            raise ConfigError(f"lookahead {lookahead}", "at least 1 step")
        if capacity < 0:
            raise ConfigError(f"a cache of {capacity} rows", "at least 0")
        if design not in DESIGNS:
            raise ConfigError(f"cache design {design!r}", f"one of {', '.join(DESIGNS)}")
        if num_ranks > MAX_RANKS:
            raise ConfigError(
                f"{num_ranks} ranks and servers", f"at most {MAX_RANKS}", "use exchange='alltoall'"
            )
        if num_home + capacity >= 1 << 31:
            raise ConfigError(
                f"{num_home + capacity:,} rows on one rank", "fewer than 2**31", "use more ranks"
            )
        self.lookahead = lookahead
        self.capacity = capacity
        self.delayed = delayed
        self.step = 0
        """Number of the step that is planned next."""
        self.in_force = lookahead
        self._early_steps = early_steps(lookahead)
        self._site = Site(
            bounds,
            rank,
            DESIGNS[design],
            num_home,
            num_ranks if num_trainers is None else num_trainers,
        )
        self._row_type = np.dtype(np.int32 if num_rows < 1 << 31 else np.int64)
        self._num_ranks = num_ranks
        self._states = RowStates(
            num_rows, num_rows <= most_rows_in_full, self._row_type, rank_type(num_ranks)
        )
        self._window = self._ring(_FIRST_TOUCHES)
        self._slots = Slots(
            np.empty(capacity + 1, np.int32), np.zeros(1, np.int64), np.zeros(num_ranks, np.int64)
        )
        self._steps: deque[WindowStep] = deque()  # from ``step`` on, as many as are in force
        self._outside: deque[RowsOfRanks] = deque()  # of the known steps after these
        self._free_all()

    @property
    def num_known(self) -> int:
        """Steps that are known and not planned."""
        return len(self._steps) + len(self._outside)

    def window_bytes(self, num_touches: int) -> int:
        """Bytes of memory that so many touches in the window would take, but for rows' state."""
        window = self._window
        rings = [window.readers, window.behind, window.then, window.owner, window.borrowed]
        rings += [window.row, window.place, *([] if self._states.is_full else [window.number])]
        size = 1 << (max(num_touches, _FIRST_TOUCHES) - 1).bit_length()
        places = num_touches * window.place.itemsize  # of the steps' own lists
        return size * sum(each.nbytes for each in rings) // len(window.row) + places

    def add(self, rows_of_rank: Sequence[RowIds] | RowsOfRanks) -> None:
        """The addresses that each rank touches in one more step; duplicates are allowed.

        Raises:
            ConfigError: when no cache of this capacity could hold what one rank reads in the step.
        """
        of_ranks = RowsOfRanks.of(rows_of_rank)
        self.check_fits(of_ranks)
        self._outside.append(of_ranks)
        self._enter()

    def _enter(self) -> None:
        """Take known steps into the window, as many as are in force beside the next one."""
        while self._outside and len(self._steps) <= self.in_force:
            rows, bounds = self._outside.popleft()
            number = self._room_for(len(rows))
            begin = number & (len(self._window.row) - 1)
            touches = np.empty(len(rows), np.int32)
            numbers = self._states.enter(rows)
            self._window = self._window._replace(**self._states.arrays())
            end = kernels.enter(self._window, rows, numbers, bounds, begin, touches)
            gap = number - self._steps[-1].number if self._steps else 0
            fresh, again = kernels.split(self._window, begin, end, gap)
            here = slice(bounds[self._site.rank], bounds[self._site.rank + 1])
            self._steps.append(WindowStep(number, begin, end, touches[here].copy(), fresh, again))

    def check_fits(self, rows_of_rank: Sequence[RowIds] | RowsOfRanks) -> None:
        """Refuse a step of which one rank reads more rows than its cache could hold.

        Raises:
            ConfigError: for such a step.
        """
        site = self._site
        all_rows, bounds = RowsOfRanks.of(rows_of_rank)
        if len(site.bounds) == 2:  # all rows are at home
            return
        if len(all_rows) <= self.capacity:
            return
        read = np.split(all_rows, bounds[1:-1])
        if site.design == REPLICATED:
            read = [all_rows]
        elif site.design == PARTITIONED and site.num_trainers < len(site.bounds) - 1:
            owner = all_rows % site.num_trainers
            read = [
                np.concatenate([rows, all_rows[owner == rank]]) for rank, rows in enumerate(read)
            ]
        if max(map(len, read)) <= self.capacity:
            return
        counts = [len(distinct(rows)) for rows in read]
        if max(counts) > self.capacity:
            raise ConfigError(
                f"a batch of which rank {int(np.argmax(counts))} reads {max(counts):,} rows, and a"
                f" cache of {self.capacity:,}",
                "room for the rows of one batch",
                "raise cache_rows, or train with smaller batches",
            )

    def open(self) -> Opening:
        """Begin with the step that is planned next, all records being at home."""
        self._enter()
        now = self._arrive(0, ALL)
        prefetch = self._early(1) if len(self._steps) > 1 else None
        return Opening(now, prefetch, self._places(0))

    def plan(self) -> StepPlan:
        """Plan the next step."""
        self.in_force = min(self.lookahead, self.in_force + 1, max(1, self.num_known - 1))
        self._enter()
        window = self._window
        site = self._site
        slots = self._slots
        step = self._steps[0]
        critical, deferred, local = settle(
            window, site, slots, step.begin, step.end, step.here, step.own, self.delayed
        )
        last, done = kernels.close(window, slots, step.begin, step.end)
        is_tight = self._is_full(1, ALL)
        evicted = list[Transfer]()
        prefetch = None
        # records go home first, and free the slots that those of the next step take
        if is_tight:
            evicted = [kernels.go_home(window, site, slots, done), *self._shrink(1, ALL)]
        arrived = self._arrive(1, ALL)
        if not is_tight:
            evicted = [kernels.go_home(window, site, slots, done)]
            if len(self._steps) > 2 and self.in_force > 1:
                evicted += self._shrink(2, EARLY)
                prefetch = self._early(2)
        places = self._places(1)
        early = self._at_servers(self._early_steps)
        self._states.leave(window.row, last)
        self._steps.popleft()
        self.step += 1
        return StepPlan(
            self.step - 1,
            critical,
            is_tight,
            arrived,
            deferred,
            local,
            evicted,
            prefetch,
            places,
            self.in_force,
            slots.used.copy(),
            early,
        )

    def restart(self) -> None:
        """Forget all steps; all records are at home."""
        self.step += self.num_known
        for step in self._steps:
            kernels.forget(self._window, step.begin, step.end)
        self._states.clear()
        self._steps.clear()
        self._outside.clear()
        self.in_force = self.lookahead
        self._free_all()

    def _early(self, at: int) -> Transfer | None:
        """The early rows of a step, or nothing yet where there is no room for them."""
        return None if self._is_full(at, EARLY) else self._arrive(at, EARLY)

    def _arrive(self, at: int, which: int) -> Transfer:
        touches = self._arriving(at, which)
        self._fill_free(len(touches))
        transfer: Transfer
        transfer, here = kernels.arrive(self._window, self._site, self._slots, touches)
        if at < len(self._steps):
            step = self._steps[at]
            step.here = np.concatenate([step.here, here])
            step.is_begun = True
        return transfer

    def _arriving(self, at: int, which: int) -> Places:
        """The touches of a step that arrive.

        Early ones are those that the step before does not touch.
        """
        if at >= len(self._steps):
            return np.empty(0, np.int32)
        step = self._steps[at]
        if which == EARLY:
            return step.fresh
        return step.again if step.is_begun else np.concatenate([step.fresh, step.again])

    def _is_full(self, at: int, which: int) -> bool:
        """Whether some rank has too few slots for the arrival of a step's rows."""
        touches = self._arriving(at, which)
        used = self._slots.used
        if used.max() + len(touches) <= self.capacity:  # enough, whatever arrives
            return False
        needed = np.zeros_like(used)
        kernels.count_arrivals(self._window, self._site, touches, needed)
        return bool((used + needed > self.capacity).any())

    def _shrink(self, at: int, which: int) -> list[Transfer]:
        """Send home what waits for the farthest steps, until a step's rows have room.

        It ends as well where nothing is left to send.
        """
        evicted = []
        nearest = at if which == ALL else at + 1
        for later in range(len(self._steps) - 1, nearest - 1, -1):
            if not self._is_full(at, which):
                break
            step = self._steps[later]
            gap = step.number - self._steps[1].number
            waiting = kernels.waiting_for(self._window, self._arriving(later, ALL), step.begin, gap)
            if len(waiting):
                evicted.append(kernels.go_home(self._window, self._site, self._slots, waiting))
                self.in_force = max(1, later - 1)
        return evicted

    def _at_servers(self, at: int) -> Ints:
        """Of the rows that this rank reads in a step, those at home on servers until then.

        No step before it in the window touches these.
        """
        num_trainers = self._site.num_trainers
        bounds = self._site.bounds
        if not at or at >= len(self._steps) or num_trainers == len(bounds) - 1:
            return np.empty(0, np.int64)
        window = self._window
        own = self._steps[at].own
        is_new = (window.behind[own] == 0) & (window.holder[window.number[own]] == HOME)
        rows = distinct(window.row[own[is_new]]).astype(np.int64)
        return rows[np.searchsorted(rows, bounds[num_trainers]) :]

    def _places(self, at: int) -> Ints:
        if at >= len(self._steps):
            return np.empty(0, np.int64)
        places = np.empty(len(self._steps[at].own), np.int64)
        kernels.places_of(self._window, self._steps[at].own, places)
        return places

    def _free_all(self) -> None:
        self._slots.depth[0] = self.capacity
        self._slots.used[:] = 0
        self._num_unfilled = self.capacity

    def _fill_free(self, num_taken: int) -> None:
        """Write as much of the stack of free slots as may be taken now.

        What is never used of it takes no memory.
        """
        begin = max(0, int(self._slots.depth[0]) - num_taken)
        end = self._num_unfilled
        if begin < end:
            top = self._site.num_home + self.capacity - 1
            self._slots.free[begin:end] = np.arange(top - begin, top - end, -1)
            self._num_unfilled = begin

    def _room_for(self, num_touches: int) -> int:
        """The number of the first of so many touches that lie side by side.

        The ring grows where there is no room.
        """
        size = len(self._window.row)
        oldest = self._steps[0].number if self._steps else 0
        number = (
            self._steps[-1].number + self._steps[-1].end - self._steps[-1].begin
            if self._steps
            else 0
        )
        while True:
            begin = (
                number if (number & (size - 1)) + num_touches <= size else -(-number // size) * size
            )
            if begin + num_touches - oldest <= size:
                break
            size *= 2
        if size > len(self._window.row):
            self._grow(size)
        return begin

    def _grow(self, size: int) -> None:
        larger = self._ring(size)
        for step in self._steps:
            to = step.number & (size - 1)
            kernels.move(self._window, larger, step.begin, step.end, to)
            step.shift(to - step.begin)
        self._window = larger

    def _ring(self, size: int) -> Window:
        words = words_for(self._num_ranks)
        masks = mask_type(self._num_ranks)
        row = np.empty(size, self._row_type)
        owner = np.empty(size, rank_type(self._num_ranks))
        states = self._states
        readers, then, borrowed = (np.empty((len(words), size), masks) for _ in range(3))
        number, behind, place = (np.empty(size, np.int32) for _ in range(3))
        return Window(
            words,
            **states.arrays(),
            row=row,
            number=row if states.is_full else number,
            readers=readers,
            behind=behind,
            then=then,
            owner=owner,
            borrowed=borrowed,
            place=place,
        )
