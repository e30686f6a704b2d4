"""Tables of raw ids before an exchange: what the ids of each step change, and batches as rows.

All ranks gather the ids of a step's global batch, and each lets its copies of the tables' row
indices learn them, before it asks for the batch's rows. Exchanges get batches of rows, with what
begins anew, and know nothing of ids.

A feed reads ahead, so its batches need indices that have learned steps which are not trained yet.
There is a second copy of each index for them; the first one, which lookups without training and
checkpoints see, follows when the step begins: what the copy has found and decided is not searched
and decided again. A feed that is left takes its copy with it: what its batches changed there never
happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.collectives import Channel, Ranks
from pibroch.data import JaggedBatch
from pibroch.data.batch import FreshRows
from pibroch.embedding import Frozen, TableGroup
from pibroch.embedding.row_index import LearnedIds, LearningIndex, RowChanges
from pibroch.errors import ConfigError
from pibroch.exchange.agreement import and_then_fillers
from pibroch.exchange.learning import Learners
from pibroch.exchange.rows_of_batch import RowsOfBatch, looked_up
from pibroch.exchange.schedule import Moment, Queue, Schedule, Task
from pibroch.exchange.step_ids import BatchLayout, OwnIds, StepIds, event_runs_of, gathered
from pibroch.kernels.arrays import Ints
from pibroch.observability.watch import watched

SCHEDULE = Schedule(
    Task("take ids", Queue.IDS, Moment.READ),
    Task("share ids", Queue.NETWORK, Moment.READ, after=("take ids",)),
    Task("learn ids", Queue.IDS, Moment.READ, after=("share ids",)),
    Task("follow ids", Queue.CALLER, Moment.LOOKUP),
)
"""What is done with the ids of a batch of a feed between several ranks, before its exchange."""
READ_BEYOND = 2
"""Batches whose ids are gathered before the exchange asks for them."""
T = TypeVar("T")
Watcher = Callable[[Mapping[str, RowChanges]], None]


@dataclass(slots=True, eq=False)
class _Gathered:
    """The ids of all ranks' parts of a batch.

    Attributes:
        ids: of the global batch.
        own_rows: given the row of each of these, the row of each id of this rank's part.
    """

    ids: StepIds
    own_rows: Callable[[Ints], Ints]


@dataclass(slots=True, eq=False)
class _Ahead:
    """A batch of the feed, from its reading until it is looked up.

    Attributes:
        batch: as exchanges take it, once its ids are learned.
        ids: of the global batch.
        learned: what they changed in the indices that are ahead; ``None`` for a filler.
    """

    batch: RowsOfBatch
    ids: StepIds
    learned: LearnedIds | None


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
        self._learned = {name: index for name, index in self._indices.items() if name not in frozen}
        self._begin(channel)

    def _begin(self, channel: Channel) -> None:
        """Make what a copy has anew."""
        self._channel = channel
        ranks = channel.ranks
        self._thread = ranks.thread("ids") if ranks.world_size > 1 else None
        self._learners = Learners(self._learned)
        self._frozen = {
            feature: self._indices[table]
            for feature, table in self.features.items()
            if table not in self._learned
        }
        self._learners_ahead: Learners | None = None
        self._layout_of = lru_cache(maxsize=4)(self._new_layout)
        self._ahead: deque[_Ahead] = deque()
        self._given: deque[RowsOfBatch] = deque()
        self._feed = 0
        self._is_open = False
        self.watchers: list[Watcher] = []

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and ``copy.deepcopy``, of one process."""
        names = ("_indices", "features", "_learned")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin(Ranks.alone().open_channel())

    @property
    def seed(self) -> int:
        """Of the initial weights of rows that begin anew."""
        return next(iter(self._indices.values())).seed

    def has_rows(self, feature: str, ids: Ints) -> NDArray[np.bool_]:
        """Which ids of a feature, int64 ``[V]``, have a row of their own."""
        index = self._indices[self.features[feature]]
        return np.asarray(index.rows_of(ids) >= int(index.has_unknown_row))

    def forget(self) -> None:
        """Leave the feed under way: its batches are prepared anew when they are looked up."""
        if self._learners_ahead is None:
            return
        self._feed += 1
        if self._thread is not None:
            self._thread.flush()
        self._ahead.clear()
        self._learners_ahead = None

    def feed(
        self, batches: Iterable[JaggedBatch], features: tuple[str, ...]
    ) -> Iterator[JaggedBatch]:
        """Batches of a feed as exchanges take them, with as many on all ranks.

        A rank that runs out of batches goes on with empty ones until all have run out.

        Args:
            batches: of this rank, with ids.
            features: of all tables.
        """
        if self._ahead or self._learners_ahead is None:
            self.forget()
            self._learners_ahead = Learners(
                {name: index.copy() for name, index in self._learned.items()}
            )
        self._feed += 1
        feed = self._feed
        learners = self._learners_ahead
        waiting: deque[Future[_Ahead]] = deque()
        for batch, is_real in and_then_fillers(batches, features):
            waiting.append(self._prepare_ahead(batch, is_real, learners, feed))
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
            assert ahead.learned is not None, "real"
            self._is_open = True
            follow = partial(self._learners.follow, ahead.ids, ahead.learned)
            watched("follow ids", self, None, follow)
            self._tell(ahead.learned)
            return ahead.batch
        self.forget()
        given = self._gather(batch, True)()
        learned = self._learners.learn(given.ids, same_step)
        self._is_open = True
        self._tell(learned)
        return self._as_rows(batch, given, learned)

    def end(self) -> None:
        """The rows of a lookup were updated, or it was dropped."""
        self._is_open = False

    def read(self, batch: JaggedBatch) -> RowsOfBatch:
        """A batch of ids as exchanges take it; nothing is learned."""
        readers = {feature: self._indices[table] for feature, table in self.features.items()}
        return RowsOfBatch.of(batch, looked_up(batch, readers), None)

    def _prepare_ahead(
        self, batch: JaggedBatch, is_real: bool, learners: Learners, feed: int
    ) -> Future[_Ahead]:
        """A batch of a feed; once that was left, only whether it goes on is of interest."""
        gather = self._gather(batch, is_real)

        def prepare() -> _Ahead:
            given = gather()
            return watched("learn ids", self, None, partial(learn, given))

        def learn(given: _Gathered) -> _Ahead:
            if given.ids.is_real and feed == self._feed:
                learned = learners.learn(given.ids)
                return _Ahead(self._as_rows(batch, given, learned), given.ids, learned)
            return _Ahead(self.read(batch), given.ids, None)

        return self._submit(prepare)

    def _gather(self, batch: JaggedBatch, is_real: bool) -> Callable[[], _Gathered]:
        """The ids of all ranks' parts of a batch, for who calls what is returned.

        The communication thread sends them, in the order of its other messages, which the training
        thread decides.
        """
        layout = self._layout_of(batch.keys)
        gap = self._learners.event_span_ms
        if self._thread is None:
            ids, bounds = layout.taken(batch)
            step = StepIds(ids, bounds, None, is_real, event_runs_of(batch, gap))
            return lambda: _Gathered(step, lambda rows: rows)

        def take() -> OwnIds:
            return OwnIds(*layout.taken(batch), is_real, event_runs_of(batch, gap))

        def share() -> list[Tensor]:
            return self._channel.gather_tensors(torch.from_numpy(own.result().message))

        own = self._thread.submit(partial(watched, "take ids", self, None, take))
        received = self._channel.ranks.communication.submit(
            partial(watched, "share ids", self, None, share)
        )
        rank = self._channel.ranks.rank

        def result() -> _Gathered:
            messages = [each.numpy() for each in received.result()]
            step, places = gathered(messages, len(self._learners.tables))
            here = own.result()
            return _Gathered(step, lambda rows: here.rows_in(rows, places[rank]))

        return result

    def _new_layout(self, keys: tuple[str, ...]) -> BatchLayout:
        """Where the ids that are learned stand in batches of these features."""
        tables: dict[str, list[str]] = {name: [] for name in self._learners.tables}
        for feature in keys:
            if self.features.get(feature) in tables:
                tables[self.features[feature]].append(feature)
        return BatchLayout(keys, tables)

    def _submit(self, task: Callable[[], T]) -> Future[T]:
        """Run a task on the thread of ids, where there is one."""
        if self._thread is not None:
            return self._thread.submit(task)
        done: Future[T] = Future()
        done.set_result(task())
        return done

    def _as_rows(self, batch: JaggedBatch, given: _Gathered, learned: LearnedIds) -> RowsOfBatch:
        """A batch whose step's ids were learned."""
        found = given.own_rows(learned.rows)
        parts = self._layout_of(batch.keys).parts(batch, found)
        parts += looked_up(batch, self._frozen)
        fresh = {
            name: changes
            for name, changes in zip(self._learners.tables, learned.changes, strict=True)
            if len(changes.fresh_rows)
        }
        if not fresh:
            return RowsOfBatch.of(batch, parts, None)
        begins = FreshRows(
            {name: each.fresh_rows for name, each in fresh.items()},
            {name: each.fresh_ids for name, each in fresh.items()},
            self.seed,
        )
        return RowsOfBatch.of(batch, parts, begins)

    def _tell(self, learned: LearnedIds) -> None:
        if self.watchers:
            changes = dict(zip(self._learners.tables, learned.changes, strict=True))
            for watcher in self.watchers:
                watcher(changes)


def learns(groups: Sequence[TableGroup]) -> bool:
    """Whether some table's row index learns its ids."""
    return bool(_learning(groups))


def _learning(groups: Sequence[TableGroup]) -> dict[str, LearningIndex]:
    return {
        name: index
        for each in groups
        for name, index in each.space.indices.items()
        if isinstance(index, LearningIndex)
    }


def _readers(groups: Sequence[TableGroup], indices: Mapping[str, LearningIndex]) -> dict[str, str]:
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
