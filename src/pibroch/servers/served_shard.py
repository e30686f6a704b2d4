"""One shard on a server: trainers send requests in rounds.

R rows of the shard, W floats in a record, D of them weights.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.futures import Future

from pibroch.embedding import MemoryShard, SparseOptimizer
from pibroch.embedding.rows import group_rows, read_rows, update_rows
from pibroch.errors import ProtocolError
from pibroch.kernels import pack as packing
from pibroch.kernels import route as routing
from pibroch.kernels.arrays import Ints, Records
from pibroch.servers.rounds import Rounds
from pibroch.state.kept_rows import KeptRows


@dataclass(frozen=True, slots=True, eq=False)
class RecordSwap:
    """What a trainer brings home, and what it wants after all have brought theirs.

    Attributes:
        home: rows whose records come.
        records: float32 ``[len(home) * W]``.
        whole: rows of which it wants the record.
        borrowed: rows of which it wants the weights.
        averaged_at: it wants the moving averages of ``borrowed`` as of this step instead.
    """

    home: Ints
    records: Records
    whole: Ints
    borrowed: Ints
    averaged_at: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GradientSums:
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


Request = RecordSwap | GradientSums
Answer = Future[torch.Tensor]


class ServedShard:
    """The rows, and the rounds in which they are read and written.

    Threads may call it at once; none waits for another.

    Attributes:
        cuts: by name copies of rows that trainers read beside what goes on; see
            :meth:`MemoryShard.cut`.
        kept: the rows in memory that outlives this process; ``None`` until a trainer asks for it.
    """

    def __init__(self, shard: MemoryShard, optimizer: SparseOptimizer, num_trainers: int) -> None:
        self.shard = shard
        self.optimizer = optimizer
        self.cuts: dict[str, MemoryShard] = {}
        self.kept: KeptRows | None = None
        self._rounds: Rounds[tuple[Request, Answer]] = Rounds(num_trainers)
        self._num_over = 0
        # rows that are wanted after a round, and by no later one before they are here
        self._early: list[tuple[int, Ints, Answer]] = []
        self._lock = threading.Lock()
        self._is_busy = False
        self._failure: Exception | None = None

    def request(self, trainer: int, number: int, request: Request) -> Answer:
        """A trainer's part of a round.

        Its answer, float32, is there once the round is done: records, then weights, flat.

        Raises:
            ProtocolError: for a request that makes no sense; nothing was changed.
        """
        self._check(request)
        answer: Answer = Future()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._rounds.add(trainer, number, (request, answer))
            if self._is_busy:
                return answer
            self._is_busy = True
        self._work()
        return answer

    def read_after(self, number: int, rows: Ints) -> Answer:
        """Records of rows, flat, as they are after a round, once it is over.

        No later round may be about them.

        Raises:
            ProtocolError: for rows that there are not.
        """
        check_rows(rows, len(self.shard.records))
        answer: Answer = Future()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._num_over <= number:
                self._early.append((number, rows, answer))
                return answer
        self._give(rows, answer)
        return answer

    def _give(self, rows: Ints, answer: Answer) -> None:
        out = np.empty((len(rows), self.shard.records.shape[1]), np.float32)
        routing.gather_rows(self.shard.space, rows, out)
        answer.set_result(torch.from_numpy(out.reshape(-1)))

    def fail(self, error: Exception) -> None:
        """Fail what waits, and whoever comes later."""
        with self._lock:
            self._failure = self._failure or error
            waiting = [answer for _, answer in self._rounds.clear()]
            waiting += [answer for _, _, answer in self._early]
            self._early = []
        _fail(waiting, error)

    def _work(self) -> None:
        """Carry out all whole rounds; one thread does it at a time."""
        while True:
            with self._lock:
                round_ = self._rounds.take()
                self._is_busy = round_ is not None
            if round_ is None:
                return
            requests, answers = zip(*round_, strict=True)
            try:
                results = self._carry_out(requests)
            except Exception as error:  # whatever it is, all trainers of this round hear of it
                _fail(answers, error)
                self.fail(error)
                continue
            for answer, result in zip(answers, results, strict=True):
                answer.set_result(torch.from_numpy(result))
            with self._lock:
                self._num_over += 1
                due = [each for each in self._early if each[0] < self._num_over]
                self._early = [each for each in self._early if each[0] >= self._num_over]
            for _, rows, answer in due:
                self._give(rows, answer)

    def _carry_out(self, requests: Sequence[Request]) -> list[Records]:
        swaps = [request for request in requests if isinstance(request, RecordSwap)]
        sums = [request for request in requests if isinstance(request, GradientSums)]
        if swaps and sums:
            raise ProtocolError(
                "a round of records and gradients", "one or the other, as all trainers run the same"
            )
        if sums:
            self._update(sums)
            return [np.empty(0, np.float32)] * len(sums)
        for each in swaps:
            self._bring_home(each)
        return [self._lend(each) for each in swaps]

    def _bring_home(self, swap: RecordSwap) -> None:
        counts = np.array([[len(swap.home)], [0]])
        nothing = np.empty(0, np.int64)
        packing.unpack(
            swap.records,
            swap.home,
            nothing,
            counts,
            self.shard.dim,
            self.shard.records,
            self.shard.stored,
        )
        self.shard.mark(swap.home)

    def _lend(self, swap: RecordSwap) -> Records:
        records = self.shard.records
        dim = self.shard.dim
        if swap.averaged_at is not None:
            return read_rows(self.shard, self.optimizer, swap.borrowed, swap.averaged_at).ravel()
        counts = np.array([[len(swap.whole)], [len(swap.borrowed)]])
        out = np.empty(len(swap.whole) * records.shape[1] + len(swap.borrowed) * dim, np.float32)
        packing.pack(records, self.shard.stored, swap.whole, swap.borrowed, counts, dim, out)
        return out

    def _update(self, sums: Sequence[GradientSums]) -> None:
        """One update of each row, by the gradients of all trainers in their order."""
        first = sums[0]
        grouped = group_rows(np.concatenate([each.rows for each in sums]))
        hyper = self.optimizer.hyper(first.learning_rate, first.step)
        gradients = np.concatenate([each.gradients for each in sums])
        update_rows(self.shard, self.optimizer, grouped, gradients, hyper, first.step)

    def _check(self, request: Request) -> None:
        num_rows, width = self.shard.records.shape
        if isinstance(request, GradientSums):
            check_rows(request.rows, num_rows)
            _check_shape(request.gradients, (len(request.rows), self.shard.dim))
            return
        for rows in (request.home, request.whole, request.borrowed):
            check_rows(rows, num_rows)
        if request.averaged_at is not None and (
            len(request.whole) or self.optimizer.average is None
        ):
            raise ProtocolError(
                "averages wanted of rows that have none", "an optimizer that keeps averages"
            )
        _check_shape(request.records, (len(request.home) * width,))


def _fail(answers: Iterable[Answer], error: Exception) -> None:
    for answer in answers:
        answer.set_exception(error)  # type: ignore[arg-type]  # torch's annotation asks for a type variable


def _check_shape(numbers: Records, shape: tuple[int, ...]) -> None:
    if numbers.shape != shape:
        raise ProtocolError(f"float32 {list(numbers.shape)}", f"{list(shape)}")


def check_rows(rows: Ints, num_rows: int) -> None:
    """Raise ProtocolError unless all rows are there."""
    if len(rows) and not (rows.min() >= 0 and rows.max() < num_rows):
        raise ProtocolError(f"rows {rows.min()} to {rows.max()}", f"rows from 0 to {num_rows - 1}")
