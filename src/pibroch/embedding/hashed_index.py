"""The index of a hashed table, see :mod:`pibroch.embedding.hashed`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pibroch.embedding.admission import AfterCount
from pibroch.embedding.eviction import EvictionPolicy
from pibroch.embedding.expiry import Expiry
from pibroch.embedding.row_index import (
    NO_CHANGES,
    JointLearner,
    LearnedIds,
    LearningIndex,
    RowChanges,
)
from pibroch.errors import CheckpointError, DataError
from pibroch.kernels import key_table
from pibroch.kernels.arrays import Array, Ints, distinct
from pibroch.kernels.dedupe import dedupe

SPARE_SHARE = 16  # one row in so many is free again after an eviction
LONGEST_SEARCH = 256  # slots, in what is counted for people to look at
COUNTERS = ("steps", "lookups", "hits", "admissions", "evictions", "expiries")
STEPS, LOOKUPS, HITS, ADMISSIONS, EVICTIONS, EXPIRIES = range(len(COUNTERS))
_NOTHING = (np.empty(0, np.int64), np.empty(0, np.int64))


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
    """Decides what happens in each step, and keeps who has which row.

    Args:
        capacity: rows.
        admit: when an id is given one.
        evict: who loses theirs when rows are short.
        expiry: used here alone.
        has_unknown_row: whether ids without a row share the first one.
    """

    def __init__(
        self,
        capacity: int,
        admit: AfterCount,
        evict: EvictionPolicy,
        expiry: Expiry,
        has_unknown_row: bool,
    ) -> None:
        super().__init__(capacity)
        self._admission = admit
        self._policy = evict
        self.has_unknown_row = has_unknown_row
        self._first = int(has_unknown_row)  # row of the key table's first one; -1 is row 0 then
        self._num_rows = capacity - self._first
        self._table = key_table.empty_table(self._num_rows)
        self._waiting = admit.waiting(self._num_rows)
        self._expiry = expiry
        self._counters = np.zeros(len(COUNTERS), np.int64)
        self.event_span_ms = expiry.span_ms
        self._asked = 0  # ids of this step
        # whether a step of ids that have rows changes nothing but who was seen
        self._is_quiet = not (self._first or expiry.is_wanted)

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
        ``expiries``, ``ahead`` (records whose event times were not believed); ``used`` of
        ``capacity`` rows, ``candidates`` that are counted exactly, and ``bytes`` of memory.
        """
        return {
            **dict(zip(COUNTERS, self._counters.tolist(), strict=True)),
            "ahead": self._expiry.num_ahead,
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
        self._asked = len(ids) + (self._asked if same_step else 0)
        if self._asked <= self._num_rows:
            return self._learn(ids, counts, same_step)
        trial = self.copy()  # only so many ids can want too many rows
        result = trial._learn(ids, counts, same_step)
        self._take_over(trial)
        return result

    @classmethod
    def joint(cls, indices: Sequence[Self]) -> JointHashedLearner:
        """See :class:`LearningIndex`."""
        return JointHashedLearner(indices)

    def insert(self, ids: Ints) -> Ints:
        """See :class:`LearningIndex`."""
        new = distinct(ids[key_table.find(self._table, ids) < 0])
        num_free = self._num_rows - int(self._table.counts[0])
        if len(new) > num_free:
            raise DataError(
                f"{len(new):,} more ids with {num_free:,} of {self._num_rows:,} rows free",
                "a free row for each",
                "give the table more rows, or load fewer ids",
            )
        step = int(self._counters[STEPS])
        counts = np.full(len(new), self._admission.count, np.int64)
        if step:  # before the first one nobody waits
            self._waiting.add(new, counts, step)
        rows = np.empty(len(new), np.int64)
        key_table.insert(self._table, new, counts, step, rows)
        self._asked += len(new)  # none of them leaves in this step either
        self._counters[ADMISSIONS] += len(new)
        return self._shifted(rows)

    def copy(self) -> HashedIndex:
        """See :class:`LearningIndex`."""
        other = copy.copy(self)
        other._table = key_table.copy_of(self._table)
        other._waiting = self._waiting.copy()
        other._expiry = self._expiry.copy()
        other._counters = self._counters.copy()
        return other

    def state(self) -> dict[str, Array]:
        """See :class:`RowIndex`."""
        return {
            "entries": self._table.entries,
            "counters": self._counters,
            **self._expiry.state(),
            **self._waiting.state(),
        }

    def check_numbers(self, state: Mapping[str, Array]) -> None:
        """See :class:`RowIndex`; O(capacity)."""
        steps = int(state["counters"][STEPS])
        if not 0 <= steps <= key_table.MOST_STEP:
            raise CheckpointError(
                f"a row index of {steps:,} steps",
                f"0 to {key_table.MOST_STEP:,}, which is as far as rows note when they were seen",
                "load another checkpoint",
            )
        for name in ("entries", "candidates"):
            last_steps = state[name][:, 1] >> 32 if name in state else _NOTHING[0]
            wrong = last_steps[(last_steps < 0) | (last_steps > steps)]
            if len(wrong):
                raise CheckpointError(
                    f"an id among the {name} of a row index, last seen in step {wrong[0]:,}",
                    f"a step from 0 to {steps:,}, the index's own",
                    "load another checkpoint",
                )

    def load_state(self, state: Mapping[str, Array]) -> None:
        """See :class:`RowIndex`."""
        self._table.entries[:] = state["entries"]
        key_table.rebuild(self._table)
        self._counters[:] = state["counters"]
        self._expiry.load_state(state)
        self._waiting.load_state(state)

    def _take_over(self, other: HashedIndex) -> None:
        for own, its in zip(self._table, other._table, strict=True):
            own[:] = its
        self._counters[:] = other._counters
        self._waiting = other._waiting
        self._expiry = other._expiry

    def _learn(
        self, ids: Ints, counts: NDArray[np.int32] | None, same_step: bool
    ) -> tuple[RowChanges, Ints]:
        """As :meth:`learn_rows`, but after an error this is good for nothing."""
        self.check_step(same_step)
        self._counters[STEPS] += not same_step
        step = int(self._counters[STEPS])
        rows, missing = key_table.touch(self._table, ids, counts, step, self._policy.decay_steps)
        num = len(ids) if counts is None else int(counts.sum())
        num_missing = len(missing) if counts is None else int(counts[missing].sum())
        self._counters[LOOKUPS] += num
        self._counters[HITS] += num - num_missing
        return self._settle(ids, counts, rows, missing), rows

    def check_step(self, same_step: bool = False) -> None:
        """Raise DataError where one more step is one too many."""
        if self._counters[STEPS] + (not same_step) > key_table.MOST_STEP:
            raise DataError(
                f"step {key_table.MOST_STEP + 1:,} of a table of raw ids",
                f"at most {key_table.MOST_STEP:,} steps, as rows note when they were seen",
                "write rows and ids by `pibroch checkpoint convert CHECKPOINT OUT --to"
                " safetensors`, and begin a run whose tables take them by load_weights",
            )

    def _settle(
        self,
        ids: Ints,
        counts: NDArray[np.int32] | None,
        rows: Ints,
        missing: NDArray[np.int32],
        known: RowChanges | None = None,
    ) -> RowChanges:
        """What a step changes, once it is known which of its ids have no row.

        Args:
            ids: of the step, ``[V]``.
            counts: of each one, ``[V]``; once when absent.
            rows: of each one in the key table, ``[V]``; receives those in the table.
            missing: positions of ids without one.
            known: what the step has changed in an index like this one; ``rows`` stay then.
        """
        step = int(self._counters[STEPS])
        if known is None:
            self._shifted(rows)
        expires_now = self._expiry.oldest(step, self.event_runs)
        if not len(missing):
            expired = self._expire(expires_now, step, known)
            return RowChanges(*_NOTHING, *_NOTHING, *expired) if len(expired[0]) else NO_CHANGES
        new = Distinct(ids, counts, missing)
        totals = self._waiting.add(new.ids, new.counts, step)
        admitted = np.flatnonzero(totals >= self._admission.count)
        expired = self._expire(expires_now, step, known)
        evicted = self._evict(len(admitted), step, known)
        fresh_ids = new.ids[admitted]
        fresh_rows = np.empty(len(admitted), np.int64)
        key_table.insert(self._table, fresh_ids, totals[admitted], step, fresh_rows)
        self._shifted(fresh_rows)
        self._counters[ADMISSIONS] += len(admitted)
        if known is None:
            rows_of_new = np.full(len(new.ids), self._first - 1, np.int64)
            rows_of_new[admitted] = fresh_rows
            new.write_to(rows, rows_of_new)
        return RowChanges(fresh_ids, fresh_rows, *evicted, *expired)

    def _expire(self, oldest: int, step: int, known: RowChanges | None) -> tuple[Ints, Ints]:
        """Take their rows from ids that were not seen since step ``oldest``; return both."""
        if oldest <= 0:
            return _NOTHING
        rows = (
            key_table.older_than(self._table, oldest, step)
            if known is None
            else known.expired_rows - self._first
        )
        self._counters[EXPIRIES] += len(rows)
        return self._remove(rows)

    def _evict(self, num_admitted: int, step: int, known: RowChanges | None) -> tuple[Ints, Ints]:
        """Take rows from ids where fewer are free than needed; return both."""
        lacking = num_admitted - (self._num_rows - int(self._table.counts[0]))
        if lacking <= 0:
            return _NOTHING
        if known is None:
            wanted = lacking + self._num_rows // SPARE_SHARE
            victims = self._policy.victims(self._table, wanted, step)
        else:
            victims = known.evicted_rows - self._first
        if len(victims) < lacking:
            raise DataError(
                f"{self._num_rows + lacking - len(victims)} distinct ids that want a row in step"
                f" {step}",
                f"at most {self._num_rows}, the rows of their table",
                "give the table more rows, make batches smaller, or admit ids later",
            )
        self._counters[EVICTIONS] += len(victims)
        return self._remove(victims)

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


class JointHashedLearner(JointLearner):
    """See :class:`JointLearner`: all ids are looked for at once.

    Args:
        indices: of hashed tables.
    """

    def __init__(self, indices: Sequence[HashedIndex]) -> None:
        super().__init__(indices)
        self._hashed = indices
        self._places = np.stack(
            [key_table.place_of(each._table, each._counters, each._first) for each in indices]
        )
        self._half_lives = np.array([each._policy.decay_steps for each in indices])
        # where ids that have no row are given one, and nothing else happens while rows are free
        self._are_open = np.array(
            [each._is_quiet and each._admission.count == 1 for each in indices]
        )

    def learn(
        self, ids: Ints, counts: NDArray[np.int32] | None, bounds: Sequence[int]
    ) -> LearnedIds:
        """See :class:`JointLearner`."""
        return self._learn(ids, counts, bounds, None)

    def follow(
        self,
        ids: Ints,
        counts: NDArray[np.int32] | None,
        bounds: Sequence[int],
        learned: LearnedIds,
    ) -> None:
        """See :class:`JointLearner`."""
        self._learn(ids, counts, bounds, learned)

    def _learn(
        self,
        ids: Ints,
        counts: NDArray[np.int32] | None,
        bounds: Sequence[int],
        known: LearnedIds | None,
    ) -> LearnedIds:
        for index in self._hashed:  # before any of them has learned
            index.check_step()
        limits = np.array(bounds)
        rows, misses, num_misses = key_table.touch_tables(
            self._places, ids, counts, limits, self._half_lives,
            None if known is None else known.rows,
        )  # fmt: skip
        given = key_table.admit_tables(
            self._places, ids, counts, limits, self._are_open, rows, misses, num_misses
        )
        changes = []
        spans = zip(pairwise(bounds), num_misses.tolist(), given, strict=True)
        for place, (index, ((first, end), num, fresh)) in enumerate(
            zip(self._hashed, spans, strict=True)
        ):
            index._asked = end - first
            if not num and index._is_quiet:
                changes.append(NO_CHANGES)
            elif fresh is not None:
                changes.append(RowChanges(*fresh, *_NOTHING, *_NOTHING))
            else:
                changes.append(
                    index._settle(
                        ids[first:end],
                        None if counts is None else counts[first:end],
                        rows[first:end],
                        misses[first : first + num],
                        None if known is None else known.changes[place],
                    )
                )
        return LearnedIds(changes, rows)


class Distinct:
    """The distinct ones among some ids of a step.

    Args:
        ids: of the step, ``[V]``.
        counts: how often each was seen, ``[V]``; once when absent.
        positions: of the ids that are meant, int32 ``[M]``, at least one.

    Attributes:
        ids: rising, int64 ``[N]``.
        counts: of each one, int64 ``[N]``.
    """

    def __init__(
        self, ids: Ints, counts: NDArray[np.int32] | None, positions: NDArray[np.int32]
    ) -> None:
        num = len(positions)
        distinct = np.empty(num, np.int64)
        segments = np.empty(num, np.int32)
        self._order = np.empty(num, np.int32)
        (found,) = dedupe(ids, positions, [0, num], distinct, segments, self._order)
        self.ids = distinct[:found]
        self._lengths = np.diff(segments[:found], append=np.int32(num))
        self.counts: Ints = (
            self._lengths.astype(np.int64)
            if counts is None
            else np.add.reduceat(counts[self._order], segments[:found], dtype=np.int64)
        )

    def write_to(self, values: Ints, values_of_distinct: Ints) -> None:
        """Write to the values of the step ``[V]`` those of the ids that are meant."""
        values[self._order] = np.repeat(values_of_distinct, self._lengths)
