"""A central oracle: trainers tell it the rows of their parts of batches, and ask for their views of the plan.

Each function is called by name through :mod:`pibroch.rpc`.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.futures import Future

from pibroch.collectives.task_thread import TaskThread
from pibroch.errors import ProtocolError
from pibroch.kernels.varint import numba as varint
from pibroch.lookahead import Oracle, Question, Questions
from pibroch.lookahead.encoding import encode
from pibroch.lookahead.questions import What
from pibroch.rpc import functions
from pibroch.servers.holdings import Holdings
from pibroch.servers.home import check_rows
from pibroch.servers.rounds import Rounds

Ints = NDArray[np.int64]
Plan = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """A trainer's part of a step.

    Attributes:
        feed: number of the feed that it belongs to.
        rows: distinct addresses.
    """

    feed: int
    rows: Ints


class View:
    """One trainer's oracle, on a thread of its own.

    Args:
        oracle: of the trainer.
        name: of the thread.
    """

    def __init__(self, oracle: Oracle, name: str) -> None:
        self._questions, self._thread = Questions(oracle), TaskThread(name)
        self._lock = threading.Lock()
        self._answers: dict[int, Future[Plan]] = {}
        self._failure: Exception | None = None

    def add(self, feed: int, rows_of_rank: list[Ints]) -> None:
        """One more step; returns at once."""
        self._send(lambda: self._add(feed, rows_of_rank))

    def ask(self, number: int, question: Question) -> Future[Plan]:
        """Question ``number``; its answer is there as soon as it can be."""
        answer: Future[Plan] = Future()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if number in self._answers:
                raise ProtocolError(f"a second question {number}", "one of each number")
            self._answers[number] = answer
        self._send(lambda: self._ask(number, question))
        return answer

    def fail(self, error: Exception) -> None:
        """Fail what waits, and whoever comes later."""
        with self._lock:
            self._failure = self._failure or error
            waiting, self._answers = list(self._answers.values()), {}
        for answer in waiting:
            answer.set_exception(error)  # type: ignore[arg-type]  # torch's annotation asks for a type variable

    def _send(self, errand: Callable[[], None]) -> None:
        def notice(done: concurrent.futures.Future[None]) -> None:
            error = done.exception()
            if error is not None:
                self.fail(RuntimeError(f"an oracle's thread ended: {error!r}"))

        self._thread.submit(errand).add_done_callback(notice)

    def _add(self, feed: int, rows_of_rank: list[Ints]) -> None:
        self._questions.add(feed, rows_of_rank)
        self._answer()

    def _ask(self, number: int, question: Question) -> None:
        self._questions.ask(number, question)
        self._answer()

    def _answer(self) -> None:
        """Answer what can be answered by now."""
        while (due := self._questions.take()) is not None:
            number, question = due
            value: Any
            try:
                value = tuple(map(torch.from_numpy, encode(self._questions.answer(question))))
            except Exception as error:  # the trainer hears of it
                value = error
            with self._lock:
                answer = self._answers.pop(number, None)
            if answer is None:  # all have failed
                continue
            if isinstance(value, Exception):
                answer.set_exception(value)  # type: ignore[arg-type]
            else:
                answer.set_result(value)


class Central:
    """The oracles of all trainers of one exchange. Threads may call it at once; none waits for another.

    Args:
        bounds: int64 ``[P + 1]``, the first address of each home.
        num_trainers: W.
        lookahead, capacity, design, delayed: see :class:`Oracle`.
    """

    def __init__(
        self, bounds: Ints, num_trainers: int, lookahead: int, capacity: int, design: str, delayed: bool
    ) -> None:  # fmt: skip
        self._num_rows = int(bounds[-1])
        options = (lookahead, capacity, design, delayed, num_trainers)
        self._views = [View(Oracle(bounds, rank, *options), f"pibroch-oracle-{rank}") for rank in range(num_trainers)]
        self._rounds: Rounds[Told] = Rounds(num_trainers)
        self._lock = threading.Lock()
        self._failure: Exception | None = None

    def add(self, trainer: int, number: int, feed: int, rows: Ints) -> None:
        """A trainer's part of step ``number``.

        Raises:
            ProtocolError: for rows that are not there, or a step that was told already.
        """
        check_rows(rows, self._num_rows)
        with self._lock:  # oracles hear of the steps in their order
            if self._failure is not None:
                raise self._failure
            self._rounds.add(trainer, number, Told(feed, rows))
            while (parts := self._rounds.take()) is not None:
                if len({part.feed for part in parts}) > 1:
                    raise ProtocolError(f"step {number} of several feeds", "the same program on all trainers")
                for view in self._views:
                    view.add(parts[0].feed, [part.rows for part in parts])

    def ask(self, trainer: int, number: int, question: Question) -> Future[Plan]:
        """A trainer's question."""
        if not 0 <= trainer < len(self._views):
            raise ProtocolError(f"trainer {trainer}", f"one below {len(self._views)}")
        return self._views[trainer].ask(number, question)

    def fail(self, error: Exception) -> None:
        """Fail what waits, and whoever comes later."""
        with self._lock:
            self._failure = self._failure or error
            self._rounds.clear()
        for view in self._views:
            view.fail(error)


ORACLES: Holdings[Central] = Holdings("an oracle", "homes, lookahead or cache")


def configure(run: str, trainer: list[Any], key: str, wanted: list[Any], forgotten: list[str]) -> None:
    """Make the oracles ``key``, see :class:`Holdings`; ``wanted`` are the arguments of :class:`Central`, bounds as a list."""

    def make() -> Central:
        bounds, *others = wanted
        return Central(np.array(bounds, np.int64), *others)

    ORACLES.configure(run, trainer, key, wanted, forgotten, make)


def add(key: str, trainer: int, number: int, feed: int, num_rows: int, encoded: Tensor) -> None:
    """A trainer's part of step ``number``: ``num_rows`` rising addresses as :mod:`pibroch.kernels.varint` writes them."""
    data = encoded.numpy()
    if not 0 <= num_rows <= len(data):  # a row takes a byte at least
        raise ProtocolError(f"{num_rows} rows in {len(data)} bytes", "no more rows than bytes")
    rows = np.empty(num_rows, np.int64)
    if varint.decode(data, rows) != len(data):
        raise ProtocolError(f"{len(data)} bytes of rows", f"those of {num_rows} rows")
    ORACLES.find(key).add(trainer, number, feed, rows)


@functions.async_execution
def ask(key: str, trainer: int, number: int, what: What, feed: int, num_steps: int) -> Future[Plan]:
    """A trainer's question, see :class:`Question`; the parts of its answer, see :mod:`pibroch.lookahead.encoding`."""
    if what not in ("open", "plan"):
        raise ProtocolError(f"a question {what!r}", "'open' or 'plan'")
    return ORACLES.find(key).ask(trainer, number, Question(what, feed, num_steps))
