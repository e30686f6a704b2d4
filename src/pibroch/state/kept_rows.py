"""A shard as it was at a step, in memory that outlives the process that trains it.

Two things lie there: all rows as they were at one step (the copy), and those that were updated
between it and a later one (the journal). A cut first brings the journal's rows into the copy, if a
thread beside training has not done so since the last one, then writes a new journal. Whatever is
killed in between, one of the two is whole: a journal may be brought into the copy again, and one
that was not finished does not count. Processes that make their cuts at the same steps, each after
all have finished the one before, always have a step in common.

R rows, W floats in a record.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np

from pibroch.embedding import MemoryShard, Shard
from pibroch.embedding.row_marks import MEMORY
from pibroch.forkserver import link_to_server
from pibroch.kernels import parallel
from pibroch.kernels import route as routing
from pibroch.kernels.arrays import Bytes, Ints, Records

HEAD_BYTES = 4096
STEPS = slice(0, 2)
"""Words of the head: the steps that are there, each plus one; 0 for none.

Of rows those of the copy and of the journal.
"""
COPY, JOURNAL, JOURNAL_ROWS = range(3)
MARKS = slice(3, 5)
"""Of which steps there are marks, plus one."""
MOST_NAMES = 8
NAME_BYTES = 32
_NAMES_AT = 1024
"""Where the head says under which names rows are marked."""
_ROWS_PER_COPY = 1 << 16


class KeptShard(Protocol):
    """A shard as it was, in memory that outlives the process that has it.

    See :class:`KeptRows`.
    """

    def steps(self) -> set[int]:
        """Of which :meth:`restore` is possible."""

    def begin(self, step: int) -> None:
        """Keep all rows as they are after a step."""

    def go_on(self) -> None:
        """As :meth:`begin`, after :meth:`restore`."""

    def cut(self, step: int) -> None:
        """Keep the rows as they are after a step; all have finished the last cut."""

    def settle(self) -> None:
        """All have finished the last cut: make room for the next one, beside what goes on."""

    def restore(self, step: int) -> None:
        """Bring the rows back to where they were."""


@runtime_checkable
class KeepsItself(Protocol):
    """Rows that are not in this process's memory alone: shards on servers, records in caches."""

    def kept(self, key: str, tag: str) -> KeptShard | None:
        """See :meth:`KeptRows.open`."""


def keep(rows: Shard | KeepsItself, key: str, tag: str) -> KeptShard | None:
    """Rows in memory that outlives the process that has them, see :meth:`KeptRows.open`."""
    if isinstance(rows, KeepsItself):
        return rows.kept(key, tag)
    assert isinstance(rows, MemoryShard), "the other shards keep themselves"
    return KeptRows.open(rows, key, tag)


def steps_in(head: Bytes) -> set[int]:
    """The steps that a process could go on from, by the head of its memory."""
    return {int(word) - 1 for word in head[:HEAD_BYTES].view(np.int64)[STEPS] if word}


def newest_common(steps: Iterable[set[int]]) -> int | None:
    """The last step that is everywhere.

    >>> newest_common([{3, 5}, {5, 7}, {5}]), newest_common([{3}, set()])
    (5, None)
    """
    each = list(steps)
    return max(set.intersection(*each), default=None) if each else None


class KeptRows:
    """See the module.

    Args:
        shard: whose rows are kept.
        memory: of :meth:`num_bytes`, all zero or what was left in it.
    """

    def __init__(self, shard: MemoryShard, memory: Bytes) -> None:
        self._shard = shard
        (num_rows, width) = shard.records.shape
        # The training thread begins, cuts and restores; a thread of settle brings the journal in
        # beside it. Only one of the two writes to this memory at a time.
        self._is_writing = threading.Lock()
        self._head = memory[:HEAD_BYTES].view(np.int64)
        sizes = np.cumsum([HEAD_BYTES, *self._sizes(num_rows, width)]).tolist()
        parts = [memory[begin:end] for begin, end in pairwise(sizes)]
        self._copy, self._journal = (
            part.view(np.float32).reshape(num_rows, width) for part in parts[:2]
        )
        self._journal_rows: Ints = parts[2].view(np.int64)
        names = memory[_NAMES_AT : _NAMES_AT + 2 * MOST_NAMES * NAME_BYTES]
        self._names = names.view(f"S{NAME_BYTES}").reshape(2, MOST_NAMES)
        self._marks = parts[3].view(np.bool_).reshape(2, MOST_NAMES, num_rows)

    @classmethod
    def open(cls, shard: MemoryShard, key: str, tag: str) -> KeptRows | None:
        """What is kept under a name, as it was left or anew; ``None`` where nobody keeps memory.

        Args:
            shard: whose rows are kept.
            key: the name.
            tag: what was kept of other rows, or for another purpose, has another one, and goes.
        """
        link = link_to_server()
        if link is None:
            return None
        num_rows, width = shard.records.shape
        memory = link.keep(
            key, f"{tag} {num_rows} x {width}", HEAD_BYTES + sum(cls._sizes(num_rows, width))
        ).memory
        return cls(shard, np.frombuffer(memory, np.uint8))

    @staticmethod
    def _sizes(num_rows: int, width: int) -> Sequence[int]:
        """Bytes of the copy, the journal, its row numbers and marks; unused pages take none."""
        records = num_rows * width * 4
        return records, records, num_rows * 8, 2 * MOST_NAMES * num_rows

    def steps(self) -> set[int]:
        """Of which :meth:`restore` is possible."""
        return steps_in(self._head.view(np.uint8))

    def begin(self, step: int) -> None:
        """Keep all rows as they are after a step, and mark from now on which ones are updated.

        Time grows with all rows.
        """
        with self._is_writing:
            self._head[:] = 0
            _copy(self._shard.records, self._copy)
            self._write_marks(step)
            self._head[COPY] = step + 1
        self._shard.marks.start(MEMORY)

    def go_on(self) -> None:
        """As :meth:`begin`, after :meth:`restore`: the rows are there already."""
        self._shard.marks.start(MEMORY)

    def cut(self, step: int) -> None:
        """Keep the rows as they are after a step; every process has finished its last cut.

        Time grows with the rows that were updated since the last one.
        """
        with self._is_writing:
            self._bring_in()
            rows = self._shard.marks.rows(MEMORY)
            self._journal_rows[: len(rows)] = rows
            routing.gather_rows(self._shard.space, rows, self._journal)
            self._write_marks(step)
            self._head[JOURNAL_ROWS] = len(rows)
            self._head[JOURNAL] = step + 1
            self._shard.marks.clear(MEMORY, rows)

    def settle(self) -> None:
        """See :class:`KeptShard`; brings the journal in on another thread."""
        threading.Thread(target=self._settle, name="kept rows", daemon=True).start()

    def _settle(self) -> None:
        with self._is_writing:
            self._bring_in()

    def restore(self, step: int) -> None:
        """Bring the rows back to where they were, and forget later steps."""
        assert step in self.steps(), "see steps"
        with self._is_writing:
            if self._head[COPY] != step + 1:
                self._bring_in()
            self._head[JOURNAL] = 0
        _copy(self._copy, self._shard.records)
        steps = self._head[MARKS]
        # marks of a cut that was cut short would count as the newer one of two
        steps[steps != step + 1] = 0
        (slot,) = np.flatnonzero(steps)[:1]
        kept = dict(zip(self._names[slot].tolist(), self._marks[slot], strict=True))
        for name in self._marked_names():
            if name.encode() in kept:
                self._shard.marks.of(name)[:] = kept[name.encode()]
            else:
                self._shard.marks.set_all(name)  # nobody marked them before

    def _bring_in(self) -> None:
        if not self._head[JOURNAL]:
            return
        # A process may be killed after any line: the copy does not count while rows are written
        # to it, and the journal counts until the copy is whole again.
        self._head[COPY] = 0
        rows = self._journal_rows[: self._head[JOURNAL_ROWS]]
        routing.scatter_rows(self._journal, rows, self._copy)
        self._head[COPY] = self._head[JOURNAL]
        self._head[JOURNAL] = 0

    def _write_marks(self, step: int) -> None:
        """Marks of all names, with the rows of cuts that may yet turn out not to be saved."""
        others = self._head[MARKS]
        slot = int(np.argmin(others))
        others[slot] = 0
        self._names[slot] = b""
        for place, name in enumerate(self._marked_names()):
            self._marks[slot, place] = self._shard.marks.of(name)
            self._marks[slot, place, self._shard.marks.unsaved(name)] = True
            self._names[slot, place] = name.encode()
        others[slot] = step + 1

    def _marked_names(self) -> list[str]:
        """Under which others want rows marked."""
        names = [name for name in self._shard.marks.names if name != MEMORY]
        assert len(names) <= MOST_NAMES and all(len(name) <= NAME_BYTES for name in names)
        return names


def _copy(source: Records, target: Records) -> None:
    """All rows, by all threads."""
    parallel.run(_copy_range, len(source), source, target, grain=_ROWS_PER_COPY)


def _copy_range(source: Records, target: Records, start: int, stop: int) -> None:
    target[start:stop] = source[start:stop]
