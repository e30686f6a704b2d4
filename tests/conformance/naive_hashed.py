"""What a hashed table's index means: dictionaries, and one id after the other."""

import copy
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from pibroch.embedding import Hashed, IndexKind, LearningIndex, RowChanges
from pibroch.errors import DataError
from pibroch.kernels import count_min
from pibroch.kernels.count_min import naive


@dataclass
class Entry:
    count: int
    last: int


class NaiveIndex(LearningIndex):
    def __init__(self, kind, capacity):
        super().__init__(capacity)
        self.kind = kind
        self.first = int(kind.unknown_row)
        self.num_rows = capacity - self.first
        self.has_unknown_row = kind.unknown_row
        self.step = 0
        self.event_times = ()  # of the step that it learns next
        self.time = self.leap = None  # of events; where the last step says that it is
        self.span = None  # of event time, and of each id that has a row the last one
        self.span_of = {}
        self.entry = {}  # by id that has a row
        self.row = {}
        self.candidates = {}
        most = kind.admit.candidates
        self.num_candidates = most or max(1024, self.num_rows // 5)
        self.cells = np.zeros((count_min.NUM_HASHES, most or max(1024, self.num_rows)), np.uint8)
        self.num_sketched = 0

    def learn(self, ids, counts=None, same_step=False):
        may_fail = same_step or len(ids) > self.num_rows
        before = copy.deepcopy(self.__dict__) if may_fail else None
        try:
            return self._learn(ids, counts, same_step)
        except DataError:
            self.__dict__ = before
            raise

    def _learn(self, ids, counts, same_step):
        self.step += not same_step
        seen = {}
        for id_, count in zip(
            ids.tolist(), [1] * len(ids) if counts is None else counts.tolist(), strict=True
        ):
            seen[id_] = seen.get(id_, 0) + count
        decay = self.kind.evict.decay_steps
        for id_ in seen.keys() & self.entry.keys():
            entry = self.entry[id_]
            halvings = self.step // decay - entry.last // decay if decay else 0
            entry.count = (entry.count >> halvings) + seen[id_]
            entry.last = self.step
        new = {id_: seen[id_] for id_ in sorted(seen.keys() - self.entry.keys())}
        admitted = (self._sketched if self.kind.admit.sketch else self._counted)(new)
        expired = self._expire(same_step)
        evicted = self._evict(len(admitted))
        free = sorted(set(range(self.first, self.capacity)) - set(self.row.values()))
        for id_, row in zip(admitted, free, strict=False):
            self.row[id_] = row
            self.entry[id_] = Entry(admitted[id_], self.step)
            self.span_of[id_] = self.span
        fresh = {id_: self.row[id_] for id_ in admitted}
        return RowChanges(
            *arrays(fresh, by=ids_of), *arrays(evicted, by=rows_of), *arrays(expired, by=rows_of)
        )

    def _counted(self, new):
        limit = self.kind.admit.count
        for id_ in new.keys() & self.candidates.keys():
            self.candidates[id_].count += new[id_]
            self.candidates[id_].last = self.step
        totals = {
            id_: self.candidates[id_].count if id_ in self.candidates else new[id_] for id_ in new
        }
        admitted = {id_: total for id_, total in totals.items() if total >= limit}
        for id_ in admitted:
            self.candidates.pop(id_, None)
        more = [id_ for id_ in new if id_ not in admitted and id_ not in self.candidates]
        lacking = len(more) + len(self.candidates) - self.num_candidates
        if lacking > 0:
            old = sorted(
                (entry.last, id_)
                for id_, entry in self.candidates.items()
                if entry.last != self.step
            )
            for _, id_ in old[: max(lacking, self.num_candidates // 2)]:
                del self.candidates[id_]
        for id_ in more[: self.num_candidates - len(self.candidates)]:
            self.candidates[id_] = Entry(new[id_], self.step)
        return admitted

    def _sketched(self, new):
        limit = self.kind.admit.count
        counts = np.array(list(new.values()), np.int64)
        totals = naive.add(self.cells, np.array(list(new), np.int64), counts, limit)
        self.num_sketched += int(counts[totals < limit].sum())
        if self.num_sketched * 4 >= self.cells.shape[1]:
            self.cells //= 2
            self.num_sketched = 0
        return {
            id_: total for id_, total in zip(new, totals.tolist(), strict=True) if total >= limit
        }

    def _expire(self, same_step):
        after = self.kind.expire_after
        old = set()
        if after is not None and not self.step % max(1, after // 16):
            old |= {id_ for id_, entry in self.entry.items() if entry.last <= self.step - after}
        if self.kind.is_timed and len(self.event_times):
            width = max(1, int(1000 * self.kind.expire_after_seconds) // 16)
            has_leapt = self._advance(sorted(self.event_times), width, same_step)
            self.span = None if self.time is None else self.time // width
            for id_, entry in self.entry.items():
                if entry.last >= self.step - has_leapt or self.span_of[id_] is None:
                    self.span_of[id_] = self.span
            if self.span is not None:
                old |= {id_ for id_ in self.entry if self.span_of[id_] < self.span - 16}
        return self._remove(old)

    def _advance(self, times, width, same_step):
        """Move event time on; whether it leaps."""

        def followed(time):
            for each in times:
                if 0 < each - time <= width:
                    time = each
            return time

        def is_ahead(time):
            return self.time is None or time > self.time

        if self.time is not None:
            self.time = followed(self.time)
        if same_step:
            return False
        most = followed(times[(len(times) - 1) // 2])
        has_leapt = False
        if self.leap is not None and is_ahead(most) and is_ahead(min(most, self.leap)):
            self.time = followed(min(most, self.leap))
            has_leapt = True
        self.leap = most if is_ahead(most) else None
        return has_leapt

    def _evict(self, num_admitted):
        lacking = num_admitted - (self.num_rows - len(self.row))
        if lacking <= 0:
            return {}
        ids = np.array(list(self.entry), np.int64)
        entries = self.entry.values()
        scores = self.kind.evict.scores(
            ids,
            np.array([entry.count for entry in entries], np.int64),
            np.array([entry.last for entry in entries], np.int64),
            self.step,
        )
        order = sorted(
            (score, id_)
            for score, id_ in zip(scores.tolist(), ids.tolist(), strict=True)
            if self.entry[id_].last != self.step
        )
        if len(order) < lacking:
            raise DataError("more ids than rows")
        return self._remove([id_ for _, id_ in order[: lacking + self.num_rows // 16]])

    def _remove(self, ids):
        for id_ in ids:
            del self.entry[id_]
            del self.span_of[id_]
        return {id_: self.row.pop(id_) for id_ in ids}

    def rows_of(self, ids):
        return np.array([self.row.get(id_, self.first - 1) for id_ in ids.tolist()], np.int64)

    def ids_of(self, rows):
        id_of = {row: id_ for id_, row in self.row.items()}
        return np.array([id_of[row] for row in rows.tolist()], np.int64)

    def insert(self, ids):
        new = {id_: self.kind.admit.count for id_ in sorted(set(ids.tolist()) - self.row.keys())}
        free = sorted(set(range(self.first, self.capacity)) - set(self.row.values()))
        if len(new) > len(free):
            raise DataError("more ids than rows")
        if self.step:
            (self._sketched if self.kind.admit.sketch else self._counted)(new)
        for id_, row in zip(new, free, strict=False):
            self.row[id_] = row
            self.entry[id_] = Entry(new[id_], self.step)
            self.span_of[id_] = self.span
        return np.array([self.row[id_] for id_ in new], np.int64)

    def copy(self):
        return copy.deepcopy(self)

    def entries(self):
        rows = np.array(sorted(self.row.values()), np.int64)
        return rows, self.ids_of(rows)

    def counts_of(self, rows):
        return np.array([self.entry[id_].count for id_ in self.ids_of(rows).tolist()], np.int64)

    def counters(self):
        return {"used": len(self.row), "candidates": len(self.candidates)}


ids_of = itemgetter(0)
rows_of = itemgetter(1)


def arrays(row_of, by):
    """Ids and the row of each, in the order of either."""
    pairs = sorted(row_of.items(), key=by)
    return tuple(np.array([pair[place] for pair in pairs], np.int64) for place in (0, 1))


@dataclass(frozen=True)
class NaiveHashed(IndexKind):
    """A hashed table by the naive index."""

    hashed: Hashed

    name = "naive_hashed"

    def index(self, capacity):
        return NaiveIndex(self.hashed, capacity)
