"""One shard on a server: trainers visit it in rounds.

R rows of the shard, W floats in a record, D of them weights.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.futures import Future

from pibroch.embedding import MemoryShard, SparseOptimizer
from pibroch.embedding.rows import group_rows, read_rows, update_rows
from pibroch.errors import ProtocolError
from pibroch.kernels.pack import numba as packing
from pibroch.servers.rounds import Rounds

Ints = NDArray[np.int64]
Records = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """What a trainer brings home, and what it wants after all have brought theirs.

    Attributes:
        home: rows whose records come.
        records: float32 ``[len(home) * W]``.
        whole: rows of which it wants the record.
        lent: rows of which it wants the weights.
        averaged_at: it wants the moving averages of ``lent`` as of this step instead.
    """

    home: Ints
    records: Records
    whole: Ints
    lent: Ints
    averaged_at: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """A trainer's gradients.

    Attributes:
        rows: distinct.
        gradients: float32 ``[len(rows), D]``.
        learning_rate: of the step.
        step: number of this update, from 1.
    """

    rows: Ints
    gradients: Records
    learning_rate: float
    step: int


@dataclass(frozen=True, slots=True, eq=False)
class _Visit:
    errand: Exchange | Sums
    answer: Future[torch.Tensor] = field(default_factory=Future)


class Home:
    """The rows, and the rounds in which they are read and written. Threads may call it at once; none waits for another.

    Args:
        shard: the rows.
        optimizer: of all of them.
        num_trainers: that visit.
    """

    def __init__(self, shard: MemoryShard, optimizer: SparseOptimizer, num_trainers: int) -> None:
        self.shard, self.optimizer = shard, optimizer
        self._rounds: Rounds[_Visit] = Rounds(num_trainers)
        self._lock = threading.Lock()
        self._is_busy = False
        self._failure: Exception | None = None

    def visit(self, trainer: int, number: int, errand: Exchange | Sums) -> Future[torch.Tensor]:
        """A trainer's part of a round; its answer, float32, is there once the round is done: records, then weights, flat.

        Raises:
            ProtocolError: for an errand that makes no sense; nothing was changed.
        """
        self._check(errand)
        visit = _Visit(errand)
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._rounds.add(trainer, number, visit)
            if self._is_busy:
                return visit.answer
            self._is_busy = True
        self._work()
        return visit.answer

    def fail(self, error: Exception) -> None:
        """Fail what waits, and whoever comes later."""
        with self._lock:
            self._failure = self._failure or error
            waiting = self._rounds.clear()
        for visit in waiting:
            visit.answer.set_exception(error)  # type: ignore[arg-type]  # torch's annotation asks for a type variable

    def _work(self) -> None:
        """Carry out all whole rounds; one thread does it at a time."""
        while True:
            with self._lock:
                visits = self._rounds.take()
                self._is_busy = visits is not None
            if visits is None:
                return
            try:
                answers = self._carry_out([visit.errand for visit in visits])
            except Exception as error:  # whatever it is, all trainers of this round hear of it
                for visit in visits:
                    visit.answer.set_exception(error)  # type: ignore[arg-type]
                self.fail(error)
                continue
            for visit, answer in zip(visits, answers, strict=True):
                visit.answer.set_result(torch.from_numpy(answer))

    def _carry_out(self, errands: Sequence[Exchange | Sums]) -> list[Records]:
        exchanges = [errand for errand in errands if isinstance(errand, Exchange)]
        sums = [errand for errand in errands if isinstance(errand, Sums)]
        if exchanges and sums:
            raise ProtocolError("a round of records and gradients", "one or the other, as all trainers run the same")
        if sums:
            self._update(sums)
            return [np.empty(0, np.float32)] * len(sums)
        for each in exchanges:
            self._bring_home(each)
        return [self._lend(each) for each in exchanges]

    def _bring_home(self, errand: Exchange) -> None:
        counts = np.array([[len(errand.home)], [0]])
        nothing = np.empty(0, np.int64)
        packing.unpack(errand.records, errand.home, nothing, counts, self.shard.dim, self.shard.records)
        if self.shard.touched is not None:
            self.shard.touched[errand.home] = True

    def _lend(self, errand: Exchange) -> Records:
        records, dim = self.shard.records, self.shard.dim
        if errand.averaged_at is not None:
            return read_rows(self.shard, self.optimizer, errand.lent, errand.averaged_at).ravel()
        counts = np.array([[len(errand.whole)], [len(errand.lent)]])
        out = np.empty(len(errand.whole) * records.shape[1] + len(errand.lent) * dim, np.float32)
        packing.pack(records, errand.whole, errand.lent, counts, dim, out)
        return out

    def _update(self, sums: Sequence[Sums]) -> None:
        """One update of each row, by the gradients of all trainers in their order."""
        first, grouped = sums[0], group_rows(np.concatenate([each.rows for each in sums]))
        hyper = self.optimizer.hyper(first.learning_rate, first.step)
        gradients = np.concatenate([each.gradients for each in sums])
        update_rows(self.shard, self.optimizer, grouped, gradients, hyper, first.step)

    def _check(self, errand: Exchange | Sums) -> None:
        num_rows, width = self.shard.records.shape
        if isinstance(errand, Sums):
            check_rows(errand.rows, num_rows)
            wanted: Any = (len(errand.rows), self.shard.dim)
            got: Any = errand.gradients.shape
        else:
            for rows in (errand.home, errand.whole, errand.lent):
                check_rows(rows, num_rows)
            wanted, got = (len(errand.home) * width,), errand.records.shape
            if errand.averaged_at is not None and (len(errand.whole) or self.optimizer.average is None):
                raise ProtocolError("averages wanted of rows that have none", "an optimizer that keeps averages")
        if got != wanted:
            raise ProtocolError(f"float32 {list(got)}", f"{list(wanted)}")


def check_rows(rows: Ints, num_rows: int) -> None:
    """Raise ProtocolError unless all rows are there."""
    if len(rows) and not (rows.min() >= 0 and rows.max() < num_rows):
        raise ProtocolError(f"rows {rows.min()} to {rows.max()}", f"rows from 0 to {num_rows - 1}")
