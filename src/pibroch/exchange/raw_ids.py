"""Tables of raw ids before an exchange: what the ids of each step change, and batches as rows.

All ranks gather the ids of a step's global batch, and each lets its copies of the tables' row
indices learn them, before it asks for the batch's rows. Exchanges get batches of rows, with what
begins anew, and know nothing of ids.

A feed reads ahead, so its batches need indices that have learned steps which are not trained yet.
There is a second copy of each index for them; the first one, which lookups without training and
checkpoints see, learns a step's ids when the step begins. A feed that is left takes its copy with
it: what its batches changed there never happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.collectives import Channel, Ranks
from pibroch.collectives.task_thread import TaskThread
from pibroch.data import JaggedBatch
from pibroch.data.batch import FreshRows
from pibroch.embedding import Frozen, TableGroup
from pibroch.embedding.row_index import LearningIndex, RowChanges
from pibroch.errors import ConfigError, DataError
from pibroch.exchange.agreement import and_then_fillers
from pibroch.kernels import varint
from pibroch.kernels.arrays import Bytes, Ints
from pibroch.kernels.dedupe import dedupe

NO_TIME = np.iinfo(np.int64).min
READ_BEYOND = 2
"""Batches whose ids are gathered before the exchange asks for them."""
T = TypeVar("T")
Indices = Mapping[str, LearningIndex]
Watcher = Callable[[Mapping[str, RowChanges]], None]


@dataclass(frozen=True, slots=True)
class StepIds:
    """The ids of a global batch, by table.

    Attributes:
        ids: int64 ``[V]``.
        counts: how often each stands there, int32 ``[V]``; ``None`` where they repeat.
        is_real: whether some rank has samples of its own, and not a filler after its last batch.
        event_time: the greatest of the batch, in milliseconds; ``None`` where it has none.
    """

    ids: Mapping[str, Ints]
    counts: Mapping[str, NDArray[np.int32]] | None
    is_real: bool
    event_time: int | None


@dataclass(frozen=True, slots=True, eq=False)
class RowsOfBatch:
    """A batch as exchanges take it.

    Attributes:
        given: the batch, with ids.
        rows: the same with rows, without the ids that have none.
        kept: the positions of the batch's ids that have rows, int64; ``None`` where all have.
    """

    given: JaggedBatch
    rows: JaggedBatch
    kept: Tensor | None

    @classmethod
    def of(
        cls,
        batch: JaggedBatch,
        features: Mapping[str, str],
        indices: Indices,
        known: Mapping[str, Ints],
        fresh: FreshRows | None,
    ) -> RowsOfBatch:
        """Look up the rows of a batch's ids.

        Args:
            batch: with ids.
            features: of raw ids, with the table that each reads.
            indices: of these tables.
            known: the rows of all ids of a table, where somebody has looked them up.
            fresh: what begins anew with the batch.
        """
        size = batch.batch_size
        values: Ints = batch.values.numpy()
        rows = np.empty(len(values), np.int64)
        bounds = batch.offsets.numpy()[:: max(1, size)].tolist()
        spans = []
        num_taken = dict.fromkeys(indices, 0)
        for place, feature in enumerate(batch.keys if size else ()):
            here = slice(bounds[place], bounds[place + 1])
            if feature not in features:
                rows[here] = values[here]
            else:
                spans.append(here)
                table = features[feature]
                if table in known:
                    first = num_taken[table]
                    num_taken[table] += here.stop - here.start
                    rows[here] = known[table][first : num_taken[table]]
                else:
                    rows[here] = indices[table].rows_of(values[here])
        has_row = rows >= 0
        if not has_row.all() and len(spans) < len(batch.keys):  # others are refused later
            is_raw = np.zeros(len(rows), np.bool_)
            for here in spans:
                is_raw[here] = True
            has_row |= ~is_raw
        if has_row.all():
            whole = replace(batch, values=torch.from_numpy(rows), fresh=fresh)
            return cls(batch, whole, None)
        (kept,) = np.nonzero(has_row)
        num_kept = np.concatenate([[0], np.cumsum(has_row)])
        positions = torch.from_numpy(kept)
        left = replace(
            batch,
            values=torch.from_numpy(rows[kept]),
            offsets=torch.from_numpy(num_kept[batch.offsets.numpy()]),
            weights=None if batch.weights is None else batch.weights[positions],
            fresh=fresh,
        )
        return cls(batch, left, positions)

    def positions_of(self, features: tuple[str, ...]) -> Tensor | None:
        """Among the ids of some features, those that have rows, int64; ``None`` where all have."""
        if self.kept is None:
            return None
        has_row = torch.zeros(len(self.given.values), dtype=torch.bool)
        has_row[self.kept] = True
        size = self.given.batch_size
        bounds = self.given.offsets[:: max(1, size)]
        places = [self.given.keys.index(feature) for feature in features]
        spans = [has_row[bounds[place] : bounds[place + 1]] for place in places]
        return torch.cat(spans).nonzero().squeeze(1)


@dataclass(slots=True, eq=False)
class _Ahead:
    """A batch of the feed, from its reading until it is looked up.

    Attributes:
        batch: as exchanges take it, once its ids are learned.
        ids: of the global batch.
    """

    batch: RowsOfBatch
    ids: StepIds


class RawIds:
    """The row indices that learn, of all tables of a module; those of frozen tables are only read.

    The training thread calls it. A feed's batches are prepared by a thread of their own.

    Args:
        groups: all tables.
        channel: of the exchange. A flow of its own over the same link would slow both down.
        seed: of the initial weights.

    Attributes:
        features: that read such tables, with the tables.
        watchers: see :meth:`pibroch.Embeddings.watch_ids`.

    Raises:
        ConfigError: for a feature that reads several tables, of which one learns.
    """

    def __init__(self, groups: Sequence[TableGroup], channel: Channel, seed: int | None) -> None:
        self._indices = _learning(groups)
        if seed is not None:
            for index in self._indices.values():
                index.seed = seed
        self.features = _readers(groups, self._indices)
        frozen = {
            table.name
            for each in groups
            if isinstance(each.optimizer, Frozen)
            for table in each.space.tables
        }
        self._learned_features = {
            feature: table for feature, table in self.features.items() if table not in frozen
        }
        self._begin(channel)

    def _begin(self, channel: Channel) -> None:
        """Make what a copy has anew."""
        self._channel = channel
        self._thread = TaskThread("pibroch-ids") if self._channel.ranks.world_size > 1 else None
        self._ahead_indices: Indices | None = None
        self._ahead: deque[_Ahead] = deque()
        self._given: deque[RowsOfBatch] = deque()
        self._feed = 0
        self._is_open = False
        self.watchers: list[Watcher] = []

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and ``copy.deepcopy``, of one process."""
        names = ("_indices", "features", "_learned_features")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin(Ranks.alone().open_channel())

    @property
    def seed(self) -> int:
        """Of the initial weights of rows that begin anew."""
        return next(iter(self._indices.values())).seed

    def forget(self) -> None:
        """Leave the feed under way: its batches are prepared anew when they are looked up."""
        if self._ahead_indices is None:
            return
        self._feed += 1
        if self._thread is not None:
            self._thread.flush()
        self._ahead.clear()
        self._ahead_indices = None

    def feed(
        self, batches: Iterable[JaggedBatch], features: tuple[str, ...]
    ) -> Iterator[JaggedBatch]:
        """Batches of a feed as exchanges take them, with as many on all ranks.

        A rank that runs out of batches goes on with empty ones until all have run out.

        Args:
            batches: of this rank, with ids.
            features: of all tables.
        """
        if self._ahead or self._ahead_indices is None:
            self.forget()
            learned = set(self._learned_features.values())
            self._ahead_indices = {
                name: index.copy() if name in learned else index
                for name, index in self._indices.items()
            }
        self._feed += 1
        feed = self._feed
        indices = self._ahead_indices
        waiting: deque[Future[_Ahead]] = deque()
        for batch, is_real in and_then_fillers(batches, features):
            waiting.append(self._prepare_ahead(batch, is_real, indices, feed))
            while len(waiting) > (READ_BEYOND if self._thread else 0):
                ahead = waiting.popleft().result()
                if not ahead.ids.is_real:
                    for later in waiting:
                        later.result()
                    return
                if self._feed == feed:
                    self._ahead.append(ahead)
                self._given.append(ahead.batch)
                yield ahead.batch.rows

    def given(self, rows: JaggedBatch) -> JaggedBatch:
        """The batch with ids of which a feed made one with rows, asked for in the feed's order."""
        while self._given[0].rows is not rows:  # of a feed that was left
            self._given.popleft()
        return self._given.popleft().given

    def begin(self, batch: JaggedBatch) -> RowsOfBatch:
        """A batch of ids is looked up to be trained on: its step begins, on all ranks.

        Unless a lookup before it was not updated yet: then both are of one step.

        Raises:
            DataError: for more ids than a table has rows; nothing has changed then.
        """
        same_step = self._is_open
        if not same_step and self._ahead and self._ahead[0].batch.given is batch:
            ahead = self._ahead.popleft()
            self._is_open = True
            self._tell(_learn(self._indices, ahead.ids).changes)
            return ahead.batch
        self.forget()
        ids = self._gather(batch, True)()
        learned = _learn(self._indices, ids, same_step)
        self._is_open = True
        self._tell(learned.changes)
        return self._as_rows(batch, self._indices, ids, learned)

    def end(self) -> None:
        """The rows of a lookup were updated, or it was dropped."""
        self._is_open = False

    def read(self, batch: JaggedBatch) -> RowsOfBatch:
        """A batch of ids as exchanges take it; nothing is learned."""
        return RowsOfBatch.of(batch, self.features, self._indices, {}, None)

    def _prepare_ahead(
        self, batch: JaggedBatch, is_real: bool, indices: Indices, feed: int
    ) -> Future[_Ahead]:
        """A batch of a feed; once that was left, only whether it goes on is of interest."""
        gathered = self._gather(batch, is_real)

        def prepare() -> _Ahead:
            ids = gathered()
            if ids.is_real and feed == self._feed:
                return _Ahead(self._as_rows(batch, indices, ids, _learn(indices, ids)), ids)
            return _Ahead(RowsOfBatch.of(batch, self.features, indices, {}, None), ids)

        return self._submit(prepare)

    def _gather(self, batch: JaggedBatch, is_real: bool) -> Callable[[], StepIds]:
        """The ids of all ranks' parts of a batch, for who calls what is returned.

        The communication thread sends them, in the order of its other messages, which the training
        thread decides.
        """
        if self._thread is None:
            ids = _ids_by_table(batch, self._learned_features)
            return lambda: StepIds(ids, None, is_real, _event_time_of(batch))
        own = self._thread.submit(
            lambda: _encoded(
                _ids_by_table(batch, self._learned_features), is_real, _event_time_of(batch)
            )
        )
        gathered = self._channel.ranks.communication.submit(
            lambda: self._channel.gather_tensors(torch.from_numpy(own.result()))
        )
        tables = tuple(dict.fromkeys(self._learned_features.values()))
        return lambda: _decoded([each.numpy() for each in gathered.result()], tables)

    def _submit(self, task: Callable[[], T]) -> Future[T]:
        """Run a task on the thread of ids, where there is one."""
        if self._thread is not None:
            return self._thread.submit(task)
        done: Future[T] = Future()
        done.set_result(task())
        return done

    def _as_rows(
        self, batch: JaggedBatch, indices: Indices, ids: StepIds, learned: Learned
    ) -> RowsOfBatch:
        """A batch whose step's ids were learned."""
        fresh = {name: each for name, each in learned.changes.items() if len(each.fresh_rows)}
        begins = FreshRows(
            {name: each.fresh_rows for name, each in fresh.items()},
            {name: each.fresh_ids for name, each in fresh.items()},
            self.seed,
        )
        rows = learned.rows if ids.counts is None else {}
        return RowsOfBatch.of(batch, self.features, indices, rows, begins if fresh else None)

    def _tell(self, changes: Mapping[str, RowChanges]) -> None:
        for watcher in self.watchers:
            watcher(changes)


def learns(groups: Sequence[TableGroup]) -> bool:
    """Whether some table's row index learns its ids."""
    return bool(_learning(groups))


def with_absent_ids(
    groups: Sequence[TableGroup], batch: RowsOfBatch, embeddings: Sequence[Tensor]
) -> list[Tensor]:
    """Embeddings of each group, with zeros for ids that have no row where a vector an id is given.

    Args:
        groups: of tables.
        batch: that was looked up.
        embeddings: of each group, as an exchange gives them.
    """
    if batch.kept is None:
        return list(embeddings)
    return [
        _spread(batch, each.space.features, vectors)
        if batch.rows.by_id or not each.space.is_pooled
        else vectors
        for each, vectors in zip(groups, embeddings, strict=True)
    ]


def _spread(batch: RowsOfBatch, features: tuple[str, ...], vectors: Tensor) -> Tensor:
    positions = batch.positions_of(features)
    assert positions is not None, "some are absent"
    num_ids = int(batch.given.offsets_of(features)[-1])
    return torch.zeros(num_ids, vectors.shape[1]).index_copy_(0, positions, vectors)


def without_absent_ids(
    groups: Sequence[TableGroup], batch: RowsOfBatch, gradients: Sequence[Tensor]
) -> list[Tensor]:
    """The inverse of :func:`with_absent_ids`, for gradients."""
    if batch.kept is None:
        return list(gradients)
    of_groups = []
    for each, gradient in zip(groups, gradients, strict=True):
        if batch.rows.by_id or not each.space.is_pooled:
            positions = batch.positions_of(each.space.features)
            assert positions is not None, "some are absent"
            of_groups.append(gradient[positions])
        else:
            of_groups.append(gradient)
    return of_groups


def _learning(groups: Sequence[TableGroup]) -> dict[str, LearningIndex]:
    return {
        name: index
        for each in groups
        for name, index in each.space.indices.items()
        if isinstance(index, LearningIndex)
    }


def _readers(groups: Sequence[TableGroup], indices: Indices) -> dict[str, str]:
    """The features that read tables which learn, and the table of each."""
    tables: dict[str, list[str]] = {}
    for each in groups:
        for table in each.space.tables:
            for feature in table.features:
                tables.setdefault(feature, []).append(table.name)
    for feature, names in tables.items():
        if len(names) > 1 and any(name in indices for name in names):
            raise ConfigError(
                f"feature {feature!r}, which reads the tables {', '.join(names)}, of raw ids",
                "one table for a feature of raw ids",
                "give the other table a feature of its own",
            )
    return {feature: names[0] for feature, names in tables.items() if names[0] in indices}


def _ids_by_table(batch: JaggedBatch, features: Mapping[str, str]) -> dict[str, Ints]:
    """This rank's ids of a batch, as they stand there."""
    values: Ints = batch.values.numpy()
    bounds = batch.offsets.numpy()[:: max(1, batch.batch_size)]
    parts: dict[str, list[Ints]] = {table: [] for table in features.values()}
    for place, feature in enumerate(batch.keys):
        if feature in features and batch.batch_size:
            parts[features[feature]].append(values[bounds[place] : bounds[place + 1]])
    nothing = np.empty(0, np.int64)
    return {
        table: each[0] if len(each) == 1 else np.concatenate([nothing, *each])
        for table, each in parts.items()
    }


def _event_time_of(batch: JaggedBatch) -> int | None:
    """The greatest of a rank's part of a batch."""
    times = batch.event_times
    return int(times.max()) if times is not None and len(times) else None


def _encoded(ids: Mapping[str, Ints], is_real: bool, event_time: int | None) -> Bytes:
    """A rank's distinct ids and their counts in few bytes: distances of rising numbers.

    Before them int64: whether the part is real, its event time, and how many ids of each table.
    """
    counted = [_counted(each) for each in ids.values()]
    sizes = [len(distinct) for distinct, _ in counted]
    time = NO_TIME if event_time is None else event_time
    head = np.array([is_real, time, *sizes], np.int64).view(np.uint8)
    message = np.empty(len(head) + 2 * varint.MAX_BYTES * sum(sizes), np.uint8)
    message[: len(head)] = head
    end = len(head)
    for rising in (numbers for each in counted for numbers in each):
        end += varint.encode(rising, message[end:])
    return message[:end]


def _counted(ids: Ints) -> tuple[NDArray[np.uint64], Ints]:
    """Distinct ids, rising, and the sums of their counts up to each one, ``[U]`` both.

    From the last negative id to the first other one is a step of unsigned numbers like any other.
    """
    num = len(ids)
    distinct = np.empty(num, np.int64)
    begins = np.empty(num + 1, np.int32)
    order = np.empty(num, np.int32)
    (found,) = dedupe(ids, np.arange(num, dtype=np.int32), [0, num], distinct, begins[:-1], order)
    begins[found] = num
    return distinct[:found].view(np.uint64), begins[1 : found + 1].astype(np.int64)


def _decoded(messages: Sequence[Bytes], tables: Sequence[str]) -> StepIds:
    """The ids of all ranks from what each has encoded."""
    ids: dict[str, list[Ints]] = {name: [] for name in tables}
    counts: dict[str, list[NDArray[np.int32]]] = {name: [] for name in tables}
    are_real = False
    event_time = NO_TIME
    for message in messages:
        place = 8 * (2 + len(tables))
        is_real, time, *sizes = message[:place].copy().view(np.int64).tolist()
        are_real |= bool(is_real)
        event_time = max(event_time, time)
        for name, size in zip(tables, sizes, strict=True):
            distinct = np.empty(size, np.int64)
            ends = np.empty(size, np.int64)
            for numbers in (distinct.view(np.uint64), ends):
                place += varint.decode(message[place:], numbers)
            ids[name].append(distinct)
            counts[name].append(np.diff(ends, prepend=0).astype(np.int32))
    return StepIds(
        {name: np.concatenate(parts) for name, parts in ids.items()},
        {name: np.concatenate(parts) for name, parts in counts.items()},
        are_real,
        None if event_time == NO_TIME else event_time,
    )


@dataclass(frozen=True, slots=True)
class Learned:
    """What a step's ids changed, by table.

    Attributes:
        changes: of each index.
        rows: of the step's ids, int64 ``[V]``.
    """

    changes: Mapping[str, RowChanges]
    rows: Mapping[str, Ints]


def _learn(indices: Indices, ids: StepIds, same_step: bool = False) -> Learned:
    """Let all indices learn, or none."""
    for name, each in ids.ids.items():
        index = indices[name]
        index.event_time = ids.event_time
        if index.needs_event_times and ids.event_time is None and len(each):
            raise DataError(
                f"a batch without event times for table {name!r}, whose ids expire by them",
                "the time of each sample's event",
                "name the column of times in the data's schema, or let ids expire by steps",
            )
    may_be_refused = [
        name
        for name, each in ids.ids.items()
        if same_step or len(each) > indices[name].capacity - indices[name].has_unknown_row
    ]
    learned: dict[str, tuple[RowChanges, Ints]] = {}
    if may_be_refused:
        for name in may_be_refused if len(ids.ids) > 1 else ():
            _learn_table(name, indices[name].copy(), ids, same_step)
        learned = {name: _learn_table(name, indices[name], ids, same_step) for name in ids.ids}
    else:
        kinds: dict[type[LearningIndex], list[str]] = {}
        for name in ids.ids:
            kinds.setdefault(type(indices[name]), []).append(name)
        for kind, names in kinds.items():
            results = kind.learn_together(
                [indices[name] for name in names],
                [ids.ids[name] for name in names],
                None if ids.counts is None else [ids.counts[name] for name in names],
            )
            learned |= zip(names, results, strict=True)
    return Learned(
        {name: changes for name, (changes, _) in learned.items()},
        {name: rows for name, (_, rows) in learned.items()},
    )


def _learn_table(
    name: str, index: LearningIndex, ids: StepIds, same_step: bool
) -> tuple[RowChanges, Ints]:
    counts = None if ids.counts is None else ids.counts[name]
    try:
        return index.learn_rows(ids.ids[name], counts, same_step)
    except DataError as error:
        raise DataError(f"table {name!r}: {error.got}", error.need, error.do) from error
