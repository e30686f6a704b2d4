"""The row indices of a module's tables of raw ids, which learn a step together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pibroch.embedding.row_index import (
    JointLearner,
    LearnedIds,
    LearningIndex,
    RowChanges,
)
from pibroch.errors import DataError
from pibroch.exchange.step_ids import StepIds
from pibroch.kernels.arrays import Ints


class Learners:
    """All of them, in an order of the tables in which those of one class are beside each other.

    Args:
        indices: of all tables whose ids are learned.

    Attributes:
        tables: by name, in the order in which :class:`StepIds` has their ids.
        event_span_ms: the longest gap in runs of event times that suits all; 0 where none needs
            any.
    """

    def __init__(self, indices: Mapping[str, LearningIndex]) -> None:
        kinds: dict[type[LearningIndex], list[str]] = {}
        for name, index in indices.items():
            kinds.setdefault(type(index), []).append(name)
        self.tables = tuple(name for names in kinds.values() for name in names)
        self._indices = [indices[name] for name in self.tables]
        spans = [each.event_span_ms for each in self._indices if each.event_span_ms]
        self.event_span_ms = min(spans, default=0)
        self._joint: list[tuple[slice, JointLearner]] = []  # with the numbers of their tables
        first = 0
        for kind, names in kinds.items():
            here = slice(first, first + len(names))
            self._joint.append((here, kind.joint(self._indices[here])))
            first = here.stop

    def learn(self, step: StepIds, same_step: bool = False) -> LearnedIds:
        """Let all indices learn a step, or none.

        Args:
            step: its ids.
            same_step: these are more ids of the last one.

        Raises:
            DataError: for more ids than a table has rows, or without event times where ids expire
                by them; nothing has changed then.
        """
        self._tell_time(step)
        sizes = np.diff(step.bounds).tolist()
        may_be_refused = [
            number
            for number, (index, size) in enumerate(zip(self._indices, sizes, strict=True))
            if same_step or size > index.capacity - index.has_unknown_row
        ]
        if not may_be_refused:
            return _joined([joint.learn(*_part(step, here)) for here, joint in self._joint])
        for number in may_be_refused if len(self._indices) > 1 else ():
            self._learn_table(number, self._indices[number].copy(), step, same_step)
        learned = [
            self._learn_table(number, index, step, same_step)
            for number, index in enumerate(self._indices)
        ]
        return _joined([LearnedIds([changes], rows) for changes, rows in learned])

    def follow(self, step: StepIds, learned: LearnedIds) -> None:
        """Let all indices learn a step that others, which were as these are, have learned.

        Args:
            step: its ids.
            learned: what they changed there.
        """
        self._tell_time(step)
        for here, joint in self._joint:
            rows = learned.rows[step.bounds[here.start] : step.bounds[here.stop]]
            joint.follow(*_part(step, here), LearnedIds(learned.changes[here], rows))

    def _tell_time(self, step: StepIds) -> None:
        for number, (name, index) in enumerate(zip(self.tables, self._indices, strict=True)):
            index.event_runs = step.event_runs
            has_ids = step.bounds[number] < step.bounds[number + 1]
            if index.event_span_ms and not len(step.event_runs) and has_ids:
                raise DataError(
                    f"a batch without event times for table {name!r}, whose ids expire by them",
                    "the time of each sample's event",
                    "name the column of times in the data's schema, or let ids expire by steps",
                )

    def _learn_table(
        self, number: int, index: LearningIndex, step: StepIds, same_step: bool
    ) -> tuple[RowChanges, Ints]:
        ids, counts, _ = _part(step, slice(number, number + 1))
        try:
            return index.learn_rows(ids, counts, same_step)
        except DataError as error:
            raise DataError(
                f"table {self.tables[number]!r}: {error.got}", error.need, error.do
            ) from error


def _part(step: StepIds, tables: slice) -> tuple[Ints, NDArray[np.int32] | None, list[int]]:
    """The ids of some tables, their counts, and bounds."""
    first = step.bounds[tables.start]
    here = slice(first, step.bounds[tables.stop])
    counts = None if step.counts is None else step.counts[here]
    bounds = [end - first for end in step.bounds[tables.start : tables.stop + 1]]
    return step.ids[here], counts, bounds


def _joined(parts: Sequence[LearnedIds]) -> LearnedIds:
    if len(parts) == 1:
        return parts[0]
    rows = np.concatenate([np.empty(0, np.int64), *(each.rows for each in parts)])
    return LearnedIds([changes for each in parts for changes in each.changes], rows)
