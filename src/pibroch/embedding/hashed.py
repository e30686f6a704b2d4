"""Tables of raw ids: an id is given one of a fixed number of rows when steps bring it.

It keeps the row until it is evicted for others or expires. What happens in a step follows from the
ids of the steps so far and how often each stood in them. In each step, in this order:

1. Ids that have a row are seen, ids without one are counted; some are admitted.
2. Ids that were not seen for too long expire.
3. When fewer rows are free than ids were admitted, others are evicted: as many as are needed and a
   sixteenth of all rows, so that the pass over all rows is seldom.
4. Admitted ids, rising, are given the lowest free rows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pibroch.config.row_index import HashedConfig
from pibroch.embedding.admission import AfterCount
from pibroch.embedding.eviction import EvictionPolicy, LeastFrequent, LeastRecent
from pibroch.embedding.row_index import NO_CHANGES, IndexKind, LearningIndex, RowChanges
from pibroch.errors import CheckpointError, ConfigError, DataError
from pibroch.integers import whole_number
from pibroch.kernels import key_table
from pibroch.kernels.arrays import Array, Ints
from pibroch.kernels.dedupe import dedupe

SPARE_SHARE = 16  # one row in so many is free again after an eviction
CHECKS_PER_EXPIRY = 16  # in the steps after which an id expires
LONGEST_SEARCH = 256  # slots, in what is counted for people to look at
COUNTERS = ("steps", "lookups", "hits", "admissions", "evictions", "expiries")
STEPS, LOOKUPS, HITS, ADMISSIONS, EVICTIONS, EXPIRIES = range(len(COUNTERS))
_NOTHING = (np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class Hashed(IndexKind):
    """Ids are any int64; the table's ``num_rows`` is how many of them have rows at a time.

    Attributes:
        admit: when an id is given a row.
        evict: who loses theirs when rows are short.
        expire_after: steps without an id after which it loses its row, looked for every sixteenth
            of them; ``None`` for never.
        expire_after_seconds: the same in event time, of which the greatest one so far counts.
        unknown_row: ids without a row read and train the table's first one, which they share, as
            the unknown token of a vocabulary. Otherwise they are absent from their bags.
    """

    admit: AfterCount = field(default_factory=AfterCount)
    evict: EvictionPolicy = field(default_factory=LeastRecent)
    expire_after: int | None = None
    unknown_row: bool = False
    expire_after_seconds: float | None = None

    name = "hashed"
    section = HashedConfig

    def __post_init__(self) -> None:
        for label, value, kind in (
            ("admit", self.admit, AfterCount),
            ("evict", self.evict, EvictionPolicy),
        ):
            if not isinstance(value, kind):
                raise ConfigError(f"hashed rows with {label} {value!r}", f"a {kind.__name__}")
        if self.expire_after is not None:
            number = whole_number(self.expire_after, "hashed rows with expire_after", 1)
            object.__setattr__(self, "expire_after", number)
        seconds = self.expire_after_seconds
        if seconds is not None and not CHECKS_PER_EXPIRY / 1000 <= seconds < math.inf:
            raise ConfigError(
                f"hashed rows with expire_after_seconds {seconds}",
                f"at least {CHECKS_PER_EXPIRY / 1000} seconds",
            )

    @classmethod
    def of_recipe(
        cls,
        *,
        admit_after: int,
        sketch: bool,
        evict: str,
        half_life: int | None,
        expire_after: int | None,
        unknown_row: bool,
        expire_after_seconds: float | None,
    ) -> Hashed:
        """By the settings of :class:`HashedConfig`."""
        policy = LeastFrequent(half_life) if evict == LeastFrequent.name else LeastRecent()
        admit = AfterCount(admit_after, sketch)
        return cls(admit, policy, expire_after, unknown_row, expire_after_seconds)

    @property
    def is_timed(self) -> bool:
        """Whether ids expire by event time."""
        return self.expire_after_seconds is not None

    def index(self, capacity: int) -> HashedIndex:
        """See :class:`IndexKind`."""
        if capacity > key_table.MOST_ROWS:
            raise ConfigError(
                f"a hashed table of {capacity} rows",
                f"at most {key_table.MOST_ROWS}",
                "split the feature over several tables",
            )
        if self.unknown_row and capacity == 1:
            raise ConfigError(
                "a hashed table of 1 row, which is the unknown ids'", "more rows, for known ones"
            )
        return HashedIndex(self, capacity)

    def described(self) -> dict[str, Any]:
        """See :class:`IndexKind`."""
        return {
            "name": self.name,
            "admit": self.admit.described(),
            "evict": self.evict.described(),
            "expire_after": self.expire_after,
            # as before there were these
            **({"unknown_row": True} if self.unknown_row else {}),
            **({"expire_after_seconds": self.expire_after_seconds} if self.is_timed else {}),
        }


def counters_in(state: Mapping[str, Array]) -> dict[str, int]:
    """The counters of an index that was saved, ``bytes`` aside; O(capacity).

    Args:
        state: which :meth:`HashedIndex.state` gave, or where it lies in a file.

    Raises:
        CheckpointError: when it is none.
    """
    try:
        totals = state["counters"][: len(COUNTERS)].tolist()
        entries = [state[name] for name in ("entries", "candidates") if name in state]
        used = [int(np.count_nonzero(each[:, 1])) for each in entries]
        return {
            **dict(zip(COUNTERS, totals, strict=True)),
            "capacity": len(state["entries"]),
            "used": used[0],
            "candidates": sum(used[1:]),
        }
    except (KeyError, IndexError, ValueError) as error:
        raise CheckpointError(
            "a row index with other arrays than hashed tables have", "its state as it was saved"
        ) from error


class HashedIndex(LearningIndex):
    """See the module.

    Args:
        kind: its settings.
        capacity: rows.
    """

    def __init__(self, kind: Hashed, capacity: int) -> None:
        super().__init__(capacity)
        self._kind = kind
        self.has_unknown_row = kind.unknown_row
        self._first = int(kind.unknown_row)  # row of the key table's first one; -1 is row 0 then
        self._num_rows = capacity - self._first
        self._table = key_table.empty_table(self._num_rows)
        self._place = key_table.place_of(self._table)
        self._waiting = kind.admit.waiting(self._num_rows)
        self._counters = np.zeros(len(COUNTERS), np.int64)
        self.needs_event_times = kind.is_timed
        seconds = kind.expire_after_seconds
        self._spans = None if seconds is None else _Spans(seconds)
        self._asked = 0  # ids of this step

    @property
    def last_id(self) -> int:
        """See :class:`RowIndex`."""
        return int(np.iinfo(np.int64).max)

    def rows_of(self, ids: Ints) -> Ints:
        """See :class:`RowIndex`."""
        return self._shifted(key_table.find(self._table, ids))

    def ids_of(self, rows: Ints) -> Ints:
        """See :class:`RowIndex`."""
        ids: Ints = self._table.entries[rows - self._first, 0]
        return ids

    def entries(self) -> tuple[Ints, Ints]:
        """See :class:`LearningIndex`."""
        rows = self._shifted(np.flatnonzero(self._table.entries[:, 1]))
        return rows, self.ids_of(rows)

    def counts_of(self, rows: Ints) -> Ints:
        """See :class:`LearningIndex`; halved as often as the eviction policy says."""
        counts: Ints = self._table.entries[rows - self._first, 1] & key_table.MOST_COUNT
        return counts

    def counters(self) -> dict[str, int]:
        """See :class:`LearningIndex`.

        ``steps``, ``lookups`` and ``hits`` of ids in these, ``admissions``, ``evictions``,
        ``expiries``; ``used`` of ``capacity`` rows, ``candidates`` that are counted exactly, and
        ``bytes`` of memory.
        """
        return {
            **dict(zip(COUNTERS, self._counters.tolist(), strict=True)),
            "capacity": self._num_rows,
            "used": int(self._table.counts[0]),
            "candidates": self._waiting.num_ids,
            "bytes": sum(array.nbytes for array in self._table) + self._waiting.num_bytes,
        }

    def search_lengths(self) -> Ints:
        """By number of slots how many ids are found after reading so many; O(capacity).

        int64 ``[L]``; longer searches are counted with the longest.
        """
        lengths = np.zeros(LONGEST_SEARCH, np.int64)
        key_table.count_distances(self._table, lengths)
        return lengths

    def longest_search(self, share: float) -> int:
        """Slots that a search reads, of this share of the ids no more; O(capacity)."""
        found = np.cumsum(self.search_lengths())
        return int(np.searchsorted(found, share * found[-1]))

    def learn(
        self, ids: Ints, counts: NDArray[np.int32] | None = None, same_step: bool = False
    ) -> RowChanges:
        """See :class:`LearningIndex`."""
        return self.learn_rows(ids, counts, same_step)[0]

    def learn_rows(
        self, ids: Ints, counts: NDArray[np.int32] | None = None, same_step: bool = False
    ) -> tuple[RowChanges, Ints]:
        """See :class:`LearningIndex`."""
        if counts is None:
            counts = np.ones(len(ids), np.int32)
        self._asked = len(ids) + (self._asked if same_step else 0)
        if self._asked <= self._num_rows:
            return self._learn(ids, counts, same_step)
        trial = self.copy()  # only so many ids can want too many rows
        result = trial._learn(ids, counts, same_step)
        self._take_over(trial)
        return result

    @classmethod
    def learn_together(
        cls,
        indices: Sequence[Self],
        ids: Sequence[Ints],
        counts: Sequence[NDArray[np.int32]] | None,
    ) -> list[tuple[RowChanges, Ints]]:
        """See :class:`LearningIndex`; all ids are looked for at once."""
        sizes = [len(each) for each in ids]
        for index, size in zip(indices, sizes, strict=True):
            index._asked = size
            index._counters[STEPS] += 1
        all_ids = np.concatenate(ids)
        num = len(all_ids)
        all_counts = np.ones(num, np.int32) if counts is None else np.concatenate(counts)
        bounds = np.cumsum([0, *sizes])
        rows, misses, num_misses = key_table.touch_tables(
            np.stack([index._place for index in indices]),
            all_ids,
            all_counts,
            bounds,
            np.array([index._counters[STEPS] for index in indices]),
            np.array([index._kind.evict.decay_steps for index in indices]),
        )
        return [
            index._settle(
                all_ids[first:end],
                all_counts[first:end],
                rows[first:end],
                misses[first : first + num],
                size if counts is None else int(all_counts[first:end].sum()),
            )
            for index, first, end, size, num in zip(
                indices, bounds[:-1].tolist(), bounds[1:].tolist(), sizes, num_misses.tolist(),
                strict=True,
            )
        ]  # fmt: skip

    def insert(self, ids: Ints) -> Ints:
        """See :class:`LearningIndex`."""
        new = np.unique(ids[key_table.find(self._table, ids) < 0])
        num_free = self._num_rows - int(self._table.counts[0])
        if len(new) > num_free:
            raise DataError(
                f"{len(new):,} more ids with {num_free:,} of {self._num_rows:,} rows free",
                "a free row for each",
                "give the table more rows, or load fewer ids",
            )
        step = int(self._counters[STEPS])
        counts = np.full(len(new), self._kind.admit.count, np.int64)
        if step:  # before the first one nobody waits
            self._waiting.add(new, counts, step)
        rows = np.empty(len(new), np.int64)
        key_table.insert(self._table, new, counts, step, rows)
        self._asked += len(new)  # none of them leaves in this step either
        self._counters[ADMISSIONS] += len(new)
        return self._shifted(rows)

    def copy(self) -> HashedIndex:
        """See :class:`LearningIndex`."""
        other = HashedIndex.__new__(HashedIndex)
        other.capacity = self.capacity
        other._kind = self._kind
        other._num_rows = self._num_rows
        other._first = self._first
        other.has_unknown_row = self.has_unknown_row
        other._table = key_table.copy_of(self._table)
        other._place = key_table.place_of(other._table)
        other._waiting = self._waiting.copy()
        other._counters = self._counters.copy()
        other._asked = self._asked
        other.event_time = self.event_time
        other.needs_event_times = self.needs_event_times
        other._spans = None if self._spans is None else self._spans.copy()
        return other

    def state(self) -> dict[str, Array]:
        """See :class:`RowIndex`."""
        return {
            "entries": self._table.entries,
            "counters": self._counters,
            **({} if self._spans is None else {"spans": self._spans.starts}),
            **self._waiting.state(),
        }

    def load_state(self, state: Mapping[str, Array]) -> None:
        """See :class:`RowIndex`."""
        self._table.entries[:] = state["entries"]
        key_table.rebuild(self._table)
        self._counters[:] = state["counters"]
        if self._spans is not None:
            self._spans.starts[:] = state["spans"]
        self._waiting.load_state(state)

    def _take_over(self, other: HashedIndex) -> None:
        self._table = other._table
        self._place = other._place
        self._waiting = other._waiting
        self._counters = other._counters
        self._spans = other._spans

    def _learn(
        self, ids: Ints, counts: NDArray[np.int32], same_step: bool
    ) -> tuple[RowChanges, Ints]:
        """As :meth:`learn_rows`, but after an error this is good for nothing."""
        self._counters[STEPS] += not same_step
        step = int(self._counters[STEPS])
        rows, missing = key_table.touch(
            self._table, ids, counts, step, self._kind.evict.decay_steps
        )
        return self._settle(ids, counts, rows, missing, int(counts.sum()))

    def _settle(
        self,
        ids: Ints,
        counts: NDArray[np.int32],
        rows: Ints,
        missing: NDArray[np.int32],
        num_lookups: int,
    ) -> tuple[RowChanges, Ints]:
        """What a step changes, once it is known which of its ids have no row.

        Args:
            ids: of the step, ``[V]``.
            counts: of each one, ``[V]``.
            rows: of each one, ``[V]``; written to, and returned.
            missing: positions of ids without one.
            num_lookups: the sum of the counts.
        """
        step = int(self._counters[STEPS])
        self._counters[LOOKUPS] += num_lookups
        self._counters[HITS] += num_lookups
        if not len(missing):
            expired = self._expire(step)
            changes = RowChanges(*_NOTHING, *_NOTHING, *expired) if len(expired[0]) else NO_CHANGES
            return changes, self._shifted(rows)
        new = _Distinct(ids, counts, missing)
        self._counters[HITS] -= int(new.counts.sum())
        totals = self._waiting.add(new.ids, new.counts, step)
        admitted = np.flatnonzero(totals >= self._kind.admit.count)
        expired = self._expire(step)
        evicted = self._evict(len(admitted), step)
        fresh_ids = new.ids[admitted]
        fresh_rows = np.empty(len(admitted), np.int64)
        key_table.insert(self._table, fresh_ids, totals[admitted], step, fresh_rows)
        self._shifted(fresh_rows)
        self._shifted(rows)
        rows_of_new = np.full(len(new.ids), self._first - 1, np.int64)
        rows_of_new[admitted] = fresh_rows
        new.write_to(rows, rows_of_new)
        self._counters[ADMISSIONS] += len(admitted)
        return RowChanges(fresh_ids, fresh_rows, *evicted, *expired), rows

    def _expire(self, step: int) -> tuple[Ints, Ints]:
        """Take their rows from ids that were not seen for too long; return both."""
        after = self._kind.expire_after
        oldest = 0  # step in which an id may have been seen last
        if after is not None and not step % max(1, after // CHECKS_PER_EXPIRY):
            oldest = step - after + 1
        if self._spans is not None and self.event_time is not None:
            oldest = max(oldest, self._spans.oldest(self.event_time, step))
        if oldest <= 0:
            return _NOTHING
        changes = self._remove(key_table.older_than(self._table, oldest, step))
        self._counters[EXPIRIES] += len(changes[0])
        return changes

    def _evict(self, num_admitted: int, step: int) -> tuple[Ints, Ints]:
        """Take rows from ids where fewer are free than needed; return both."""
        lacking = num_admitted - (self._num_rows - int(self._table.counts[0]))
        if lacking <= 0:
            return _NOTHING
        wanted = lacking + self._num_rows // SPARE_SHARE
        victims = self._kind.evict.victims(self._table, wanted, step)
        if len(victims) < lacking:
            raise DataError(
                f"{self._num_rows + lacking - len(victims)} distinct ids that want a row in step"
                f" {step}",
                f"at most {self._num_rows}, the rows of their table",
                "give the table more rows, make batches smaller, or admit ids later",
            )
        changes = self._remove(victims)
        self._counters[EVICTIONS] += len(victims)
        return changes

    def _remove(self, rows: Ints) -> tuple[Ints, Ints]:
        """Free rows; return the ids that they had, and them."""
        ids = np.empty(len(rows), np.int64)
        key_table.remove(self._table, rows, ids)
        return ids, self._shifted(rows)

    def _shifted(self, rows: Ints) -> Ints:
        """Rows of the key table, which are written to, as rows of the table."""
        if self._first:
            rows += self._first
        return rows


class _Spans:
    """In which step each of the last spans of event time began; a sixteenth of the age is one.

    Args:
        seconds: of age.

    Attributes:
        starts: int64 ``[17, 2]``: numbers of spans in which there was a step, rising, and the first
            step of each, of the first span 0; -1 before it.
    """

    def __init__(self, seconds: float) -> None:
        self._length = max(1, int(1000 * seconds) // CHECKS_PER_EXPIRY)
        self.starts = np.full((CHECKS_PER_EXPIRY + 1, 2), -1, np.int64)

    def copy(self) -> _Spans:
        """Another one that is now as this is."""
        other = copy.copy(self)
        other.starts = self.starts.copy()
        return other

    def oldest(self, event_time: int, step: int) -> int:
        """The first step after which an id that was seen has not expired; 0 where none has now.

        Args:
            event_time: the greatest of this step, in milliseconds.
            step: that is now.
        """
        span = event_time // self._length
        last_span, last_start = self.starts[-1]
        is_first = last_start < 0
        if not is_first and span <= last_span:
            return 0
        self.starts[:-1] = self.starts[1:]
        self.starts[-1] = span, 0 if is_first else step
        is_near = (self.starts[:, 1] >= 0) & (self.starts[:, 0] >= span - CHECKS_PER_EXPIRY)
        return int(self.starts[is_near, 1].min())


class _Distinct:
    """The distinct ones among some ids of a step.

    Args:
        ids: of the step, ``[V]``.
        counts: how often each was seen, ``[V]``.
        positions: of the ids that are meant, int32 ``[M]``, at least one.

    Attributes:
        ids: rising, int64 ``[N]``.
        counts: of each one, int64 ``[N]``.
    """

    def __init__(self, ids: Ints, counts: NDArray[np.int32], positions: NDArray[np.int32]) -> None:
        num = len(positions)
        distinct = np.empty(num, np.int64)
        segments = np.empty(num, np.int32)
        self._order = np.empty(num, np.int32)
        (found,) = dedupe(ids, positions, [0, num], distinct, segments, self._order)
        self.ids = distinct[:found]
        self._segments = segments[:found]
        self.counts = np.add.reduceat(counts[self._order], self._segments, dtype=np.int64)

    def write_to(self, values: Ints, values_of_distinct: Ints) -> None:
        """Write to the values of the step ``[V]`` those of the ids that are meant."""
        lengths = np.empty_like(self._segments)
        lengths[:-1] = self._segments[1:]
        lengths[-1] = len(self._order)
        lengths -= self._segments
        values[self._order] = np.repeat(values_of_distinct, lengths)
