"""From the ids of a table to its rows: which row an id has is asked here, and nowhere else.

Everything behind this (addresses, plans, caches, servers, files of rows) knows rows alone.
``docs/design/0026-row-index.md`` says why, and what a kind that learns ids will add.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from pibroch.config.row_index import ROW_INDICES, IdentityConfig, RowIndexConfig
from pibroch.errors import CheckpointError, ConfigError, RowIdError
from pibroch.kernels.arrays import Array, Ints

if TYPE_CHECKING:
    from pibroch.data import JaggedBatch


class RowIndex(ABC):
    """Which row of a table each id has.

    One object for each table of a module, the same whatever exchange asks it. Every rank has the
    whole of it, and all ranks' are equal between two steps. Lookups only read it, from several
    threads at a time.

    Args:
        capacity: rows of the table; rows are 0 to ``capacity - 1``.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @property
    def last_id(self) -> int:
        """The greatest id that may have a row."""
        return self.capacity - 1

    @abstractmethod
    def rows_of(self, ids: Ints) -> Ints:
        """The rows of some ids, int64 ``[V]`` both; a number that is no row for an id without one.

        The batch's ids are not to be written to; they may be returned as they are.
        """

    @abstractmethod
    def ids_of(self, rows: Ints) -> Ints:
        """The inverse, for rows that have an id, int64 ``[U]`` both."""

    def state(self) -> dict[str, Array]:
        """What is saved with the table: arrays by name, as they are between two steps.

        It belongs to the table, not to a rank: equal on all ranks, and the same however many there
        are, so that rank 0 writes it and any number reads it. Nothing where the kind says all.
        Shapes and types are the same for the index's life. Each checkpoint and each cut in memory
        has all of it; whoever keeps it longer than until the next step copies.
        """
        return {}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Take over a copy of what :meth:`state` gave, of the same names, shapes and types."""
        assert not state, "of a kind without state"

    def check_numbers(self, state: Mapping[str, Array]) -> None:  # noqa: B027  # most take any
        """Raise CheckpointError for numbers that no state has; names, shapes and types are right.

        Files of strangers are loaded, too.
        """

    def refusal(self, id_: int, place: str) -> RowIdError:
        """The error for an id without a row."""
        return RowIdError(
            f"id {id_} {place}",
            f"an id from 0 to {self.last_id}",
            "encode the data with the table's vocabulary, or give the table more rows",
        )


@dataclass(frozen=True, slots=True)
class RowChanges:
    """What one step changed in an index that learns ids, int64 arrays all.

    Attributes:
        fresh_ids, fresh_rows: ``[N]``, ids that have a row from this step on, rising, and the rows,
            which begin anew: with initial weights and clean optimizer state.
        evicted_ids, evicted_rows: ``[E]``, ids that lost their row to others, and the rows, rising.
        expired_ids, expired_rows: ``[X]``, ids that lost their row by age, and the rows, rising.
    """

    fresh_ids: Ints
    fresh_rows: Ints
    evicted_ids: Ints
    evicted_rows: Ints
    expired_ids: Ints
    expired_rows: Ints


_NOTHING = np.empty(0, np.int64)
NO_CHANGES = RowChanges(*6 * [_NOTHING])


class LearningIndex(RowIndex):
    """An index that gives rows to ids as steps bring them, and takes them away again.

    What a step changes follows from the ids of the steps so far and their counts alone: neither
    from their order within a step, nor from ranks, threads or clocks. An id without a row is no
    error: it has ``-1`` in :meth:`rows_of` and counts as absent from its bag, or the row that
    unknown ids share.

    Attributes:
        seed: of the initial weights of rows that begin anew; saved with the state.
        has_unknown_row: whether ids without a row of their own share row 0, which is none of
            :meth:`entries`.
        event_runs: of event times, of the step that it learns next, see
            :func:`pibroch.data.event_clock.runs_of`; set before it learns. ``None`` where events
            have no time.
        event_span_ms: the longest gap in these runs; 0 where it needs no event times.
    """

    seed = 0
    has_unknown_row = False
    event_runs: Ints | None = None
    event_span_ms = 0

    @abstractmethod
    def learn(
        self, ids: Ints, counts: NDArray[np.int32] | None = None, same_step: bool = False
    ) -> RowChanges:
        """Take the ids of one more step, of the global batch, int64 ``[V]`` in any order.

        They are not written to, and may repeat.

        Args:
            ids: of the step.
            counts: how often each stands in the batch, ``[V]``; once when absent.
            same_step: these are more ids of the last step, none of whose ids loses its row.

        Raises:
            DataError: when more distinct ids want a row than there are rows; nothing has changed
                then.
        """

    def learn_rows(
        self, ids: Ints, counts: NDArray[np.int32] | None = None, same_step: bool = False
    ) -> tuple[RowChanges, Ints]:
        """As :meth:`learn`, with the rows that the ids then have, ``-1`` for none, ``[V]``.

        For who looks up the very ids that are learned.
        """
        return self.learn(ids, counts, same_step), self.rows_of(ids)

    @classmethod
    def joint(cls, indices: Sequence[Self]) -> JointLearner:
        """What has several indices of this class learn at once."""
        return JointLearner(indices)

    @abstractmethod
    def insert(self, ids: Ints) -> Ints:
        """Give rows to those ids that have none, between two steps, as if just admitted.

        No id loses its row. Rows are taken as by :meth:`learn`.

        Args:
            ids: int64 ``[V]``, in any order.

        Returns:
            The rows that were given, int64 ``[N]``, which have what their last ids left there.

        Raises:
            DataError: when fewer rows are free; nothing has changed then.
        """

    @abstractmethod
    def copy(self) -> LearningIndex:
        """Another one that is now as this is, and goes its own way."""

    @abstractmethod
    def entries(self) -> tuple[Ints, Ints]:
        """The rows in use, rising, and the id of each, int64 ``[U]`` both."""

    @abstractmethod
    def counts_of(self, rows: Ints) -> Ints:
        """How often the ids of some rows in use were seen, as the index counts, int64 ``[U]``."""

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """How full it is and what happened so far, by name, for people to look at.

        Runs report what has a name in :class:`pibroch.observability.records.RawIdsRecord`.
        """


@dataclass(frozen=True, slots=True)
class LearnedIds:
    """What a step of several tables changed.

    Attributes:
        changes: in each one's index.
        rows: of all ids, of one table after the other, ``-1`` for none, int64 ``[V]``.
    """

    changes: Sequence[RowChanges]
    rows: Ints


class JointLearner:
    """Has several indices learn a step, for what is quicker at once.

    No step may be refused: none has more ids for an index than it has rows for.

    Args:
        indices: of one class.
    """

    def __init__(self, indices: Sequence[LearningIndex]) -> None:
        self._indices = indices

    def learn(
        self, ids: Ints, counts: NDArray[np.int32] | None, bounds: Sequence[int]
    ) -> LearnedIds:
        """As :meth:`LearningIndex.learn_rows` of each.

        Args:
            ids: of one index after the other, int64 ``[V]``.
            counts: how often each stands in the batch, ``[V]``; once when absent.
            bounds: of each index's ids.
        """
        parts = [slice(*ends) for ends in pairwise(bounds)]
        learned = [
            index.learn_rows(ids[part], None if counts is None else counts[part])
            for index, part in zip(self._indices, parts, strict=True)
        ]
        rows = np.concatenate([_NOTHING, *(rows for _, rows in learned)])
        return LearnedIds([changes for changes, _ in learned], rows)

    def follow(
        self,
        ids: Ints,
        counts: NDArray[np.int32] | None,
        bounds: Sequence[int],
        learned: LearnedIds,
    ) -> None:
        """Learn a step that other indices, which were as these are, have learned.

        Args:
            ids: as they got them.
            counts: likewise.
            bounds: likewise.
            learned: what it changed there.
        """
        self.learn(ids, counts, bounds)


@dataclass(frozen=True, slots=True)
class IndexKind(ABC):
    """What a user says of a table's index: its kind, and by the fields its settings.

    A frozen dataclass of plain values, of which checkpoints keep name and fields.
    """

    name: ClassVar[str]
    """Of the kind, for good: it stands in checkpoints."""
    section: ClassVar[type[RowIndexConfig]]
    """Its settings in a recipe, where recipes are to choose it."""

    @abstractmethod
    def index(self, capacity: int) -> RowIndex:
        """A fresh index for a table of so many rows."""

    def described(self) -> dict[str, Any]:
        """As checkpoints keep it, in JSON."""
        settings: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {"name": self.name, **settings}


class IdentityIndex(RowIndex):
    """Ids are rows."""

    def rows_of(self, ids: Ints) -> Ints:
        """See :class:`RowIndex`; costs nothing, since kernels check bounds on their way."""
        return ids

    def ids_of(self, rows: Ints) -> Ints:
        """See :class:`RowIndex`."""
        return rows


@dataclass(frozen=True, slots=True)
class Identity(IndexKind):
    """Ids are rows, as encoded data sets have them."""

    name = "identity"
    section = IdentityConfig

    def index(self, capacity: int) -> RowIndex:
        """See :class:`IndexKind`."""
        return IdentityIndex(capacity)


def kind_of(section: RowIndexConfig) -> IndexKind:
    """The kind that a recipe chose."""
    kind: IndexKind = ROW_INDICES.find(section.name).build(**section.options())
    return kind


def must_be_rows(kinds: Mapping[str, Mapping[str, Any] | None], what: str, do: str) -> None:
    """Raise ConfigError unless the ids of all tables are their rows.

    Args:
        kinds: of tables by name, as checkpoints keep them.
        what: needs it, for the message.
        do: what to do instead.
    """
    for table, kind in kinds.items():
        if kind is not None and kind.get("name") != Identity.name:
            raise ConfigError(
                f"{what} of table {table!r}, whose ids have rows by the index {kind.get('name')!r}",
                f"tables of the index {Identity.name!r} alone",
                do,
            )


class ReaderIndices:
    """The indices of the tables that some features read.

    Batches of tables whose index learns come with rows already, see
    :mod:`pibroch.exchange.raw_ids`.

    Args:
        features: names of the F features.
        indices: of each one's table.
    """

    def __init__(self, features: Sequence[str], indices: Sequence[RowIndex]) -> None:
        self._features = features
        self._indices = indices
        self._others = [
            (place, index)
            for place, index in enumerate(indices)
            if not isinstance(index, IdentityIndex | LearningIndex)
        ]

    @property
    def is_identity(self) -> bool:
        """Whether ids are rows, of all features."""
        return all(isinstance(index, IdentityIndex) for index in self._indices)

    def rows_of(self, batch: JaggedBatch) -> Ints:
        """The row of each value of a batch of exactly these features, int64 ``[V]``.

        What is no row of its table has to be noticed by the caller, for whom :meth:`error` says
        what is wrong.
        """
        values: Ints = batch.values.numpy()
        if not self._others:
            return values
        rows = values.copy()
        bounds = batch.offsets.numpy()[:: max(1, batch.batch_size)]
        for place, index in self._others if batch.batch_size else ():
            here = slice(bounds[place], bounds[place + 1])
            rows[here] = index.rows_of(values[here])
        return rows

    def error(self, batch: JaggedBatch, position: int) -> RowIdError:
        """The error for the value at ``position``, which has no row."""
        bag = int(np.searchsorted(batch.offsets.numpy(), position, side="right")) - 1
        feature, sample = divmod(bag, batch.batch_size)
        return self._indices[feature].refusal(
            int(batch.values[position]),
            f"for feature {self._features[feature]!r} in sample {sample} of the batch",
        )


def state_of(indices: Mapping[str, RowIndex]) -> dict[str, Array]:
    """The state of the indices of several tables, by ``table.name``."""
    return {
        f"{table}.{name}": array
        for table, index in indices.items()
        for name, array in _with_seed(index).items()
    }


def _with_seed(index: RowIndex) -> dict[str, Array]:
    state = index.state()
    if isinstance(index, LearningIndex):
        state["seed"] = np.array([index.seed])
    return state


def check_state(indices: Mapping[str, RowIndex], state: Mapping[str, Array]) -> None:
    """Raise CheckpointError unless a state is one that :func:`load_state` takes."""
    for name, array in state_of(indices).items():
        kind = f"{array.dtype} {list(array.shape)}"
        there = state.get(name)
        if there is None or (there.dtype, there.shape) != (array.dtype, array.shape):
            got = "none" if there is None else f"{there.dtype} {list(there.shape)}"
            raise CheckpointError(f"{got} as state {name!r} of a row index", kind)
    for table, index in indices.items():
        index.check_numbers({name: state[f"{table}.{name}"] for name in index.state()})


def load_state(indices: Mapping[str, RowIndex], state: Mapping[str, Array]) -> None:
    """Bring indices to a state that :func:`state_of` gave.

    Raises:
        CheckpointError: when something is missing, of another shape, or has numbers that no index
            has; nothing has changed then.
    """
    check_state(indices, state)
    for table, index in indices.items():
        index.load_state({name: state[f"{table}.{name}"] for name in index.state()})
        if isinstance(index, LearningIndex):
            index.seed = int(state[f"{table}.seed"][0])
