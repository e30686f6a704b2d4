"""The ids of a step that tables of raw ids learn, of all ranks, by table.

Wherever ids of several tables are together, they lie one table after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from pibroch.data import JaggedBatch
from pibroch.data.event_clock import runs_of
from pibroch.errors import ProtocolError
from pibroch.kernels import counted_ids
from pibroch.kernels.arrays import Bytes, Ints

_NO_TIMES = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class StepIds:
    """The ids of a global batch.

    Attributes:
        ids: int64 ``[V]``.
        bounds: of each table's, T + 1.
        counts: how often each stands there, int32 ``[V]``; ``None`` where they repeat.
        is_real: whether some rank has samples of its own, and not a filler after its last batch.
        event_runs: of event times, see :func:`pibroch.data.event_clock.runs_of`, of each rank's
            samples; none where nobody asks for them, or the batch has none.
    """

    ids: Ints
    bounds: Sequence[int]
    counts: NDArray[np.int32] | None
    is_real: bool
    event_runs: Ints


class BatchLayout:
    """Where the ids of some tables stand in a batch.

    Args:
        keys: the batch's features.
        tables: that are meant, with their features.
    """

    def __init__(self, keys: Sequence[str], tables: Mapping[str, Sequence[str]]) -> None:
        by_table = [[keys.index(each) for each in features] for features in tables.values()]
        self._num_features = [len(places) for places in by_table]
        self._places = [place for places in by_table for place in places]
        self._is_all = self._places == list(range(len(keys)))

    def taken(self, batch: JaggedBatch) -> tuple[Ints, list[int]]:
        """The tables' ids ``[v]``, not to be written to, and the bounds of each table's."""
        values: Ints = batch.values.numpy()
        spans = self._spans(batch)
        ends = [0, *accumulate(here.stop - here.start for here in spans)]
        bounds = [ends[number] for number in accumulate(self._num_features, initial=0)]
        if self._is_all:
            return values, bounds
        return np.concatenate([values[:0], *(values[here] for here in spans)]), bounds

    def parts(self, batch: JaggedBatch, of_tables: Ints) -> list[tuple[slice, Ints]]:
        """Numbers in the order of :meth:`taken`, ``[v]``, by where they stand in the batch."""
        if self._is_all:
            return [(slice(0, len(of_tables)), of_tables)]
        spans = self._spans(batch)
        ends = accumulate(here.stop - here.start for here in spans)
        return [
            (here, of_tables[end - (here.stop - here.start) : end])
            for here, end in zip(spans, ends, strict=True)
        ]

    def _spans(self, batch: JaggedBatch) -> list[slice]:
        bounds = feature_bounds(batch)
        return [slice(bounds[place], bounds[place + 1]) for place in self._places]


def feature_bounds(batch: JaggedBatch) -> list[int]:
    """Where each feature's values begin, and the last one's end."""
    size = batch.batch_size
    if not size:
        return [0] * (len(batch.keys) + 1)
    bounds: list[int] = batch.offsets.numpy()[::size].tolist()
    return bounds


def event_runs_of(batch: JaggedBatch, gap: int) -> Ints:
    """Of a rank's part of a batch; none for a ``gap`` of 0."""
    times = batch.event_times
    return runs_of(_NO_TIMES if times is None or not gap else times.numpy(), gap)


class OwnIds:
    """This rank's ids of a step, for the other ranks, in few bytes.

    Args:
        ids: ``[v]``.
        bounds: of each table's.
        is_real: unless the batch is a filler after the last one.
        event_runs: of the batch.

    Attributes:
        message: the distinct ids and their counts; before them int64 whether they are real, the
            number of runs, how many distinct ids each table has, and the runs.
    """

    def __init__(self, ids: Ints, bounds: Sequence[int], is_real: bool, event_runs: Ints) -> None:
        begin = 2 + len(bounds) - 1
        head = np.empty(begin + event_runs.size, np.int64)
        head[0] = is_real
        head[1] = len(event_runs)
        head[begin:] = event_runs.reshape(-1)
        message = np.empty(head.nbytes + counted_ids.MAX_BYTES * len(ids), np.uint8)
        self._numbers = np.empty(len(ids), np.int32)
        end = counted_ids.encode(
            ids, np.array(bounds), message[head.nbytes :], head[2:begin], self._numbers
        )
        message[: head.nbytes] = head.view(np.uint8)
        self.message: Bytes = message[: head.nbytes + end]

    def rows_in(self, rows: Ints, starts: Ints) -> Ints:
        """The row of each of this rank's ids, ``[v]``.

        Args:
            rows: of all ids of the step.
            starts: int64 ``[T, 2]``, where this rank's begin there in each table, and end.
        """
        distinct = np.concatenate([rows[:0], *(rows[begin:end] for begin, end in starts.tolist())])
        return distinct[self._numbers]


def gathered(messages: Sequence[Bytes], num_tables: int) -> tuple[StepIds, NDArray[np.int64]]:
    """The ids of all ranks, and where each rank's lie.

    Args:
        messages: of all ranks, see :class:`OwnIds`.
        num_tables: T.

    Returns:
        Of each table one rank's after the other, distinct ones each; int64 ``[ranks, T, 2]``, where
        they begin and end.

    Raises:
        ProtocolError: when a message has another length than it says.
    """
    begin = 8 * (2 + num_tables)
    heads = np.stack([message[:begin].view(np.int64) for message in messages])
    sizes = heads[:, 2:]
    ends = np.cumsum(sizes.T).reshape(sizes.T.shape).T
    places = np.stack([ends - sizes, ends], axis=-1)
    num_ids = int(sizes.sum())
    ids = np.empty(num_ids, np.int64)
    counts = np.empty(num_ids, np.int32)
    runs = []
    for rank, message in enumerate(messages):
        starts = places[rank, :, 0].copy()
        begin_of_ids = begin + 24 * int(heads[rank, 1])
        runs.append(message[begin:begin_of_ids].view(np.int64).reshape(-1, 3))
        encoded = message[begin_of_ids:]
        if counted_ids.decode(encoded, sizes[rank].copy(), starts, ids, counts) != len(encoded):
            raise ProtocolError(
                f"{len(encoded)} bytes of ids from rank {rank}", "as many ids as it announced"
            )
    bounds = [0, *ends[-1].tolist()]
    is_real = bool(heads[:, 0].any())
    return StepIds(ids, bounds, counts, is_real, np.concatenate(runs)), places
