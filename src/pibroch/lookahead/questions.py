"""What an oracle is asked, and when it can answer: a question waits until the steps that it depends on are known.

Whoever keeps an oracle for a rank keeps its questions so, in the rank's own process or elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from numpy.typing import NDArray

from pibroch.errors import ConfigError, TrainingError
from pibroch.lookahead.oracle import Opening, Oracle, StepPlan

What = Literal["open", "plan"]


@dataclass(frozen=True, slots=True)
class Question:
    """What a rank wants to know.

    Attributes:
        what: the oracle's method.
        feed: number of the feed whose steps it is about, from 1.
        num_steps: steps that must be known, counted from the first of all feeds.
    """

    what: What
    feed: int
    num_steps: int


class Questions:
    """Steps and questions in, questions out whose time has come, in the order of their numbers. One thread calls it at a time.

    Args:
        oracle: of one rank.

    Example:
        >>> import numpy as np
        >>> questions = Questions(Oracle(np.array([0, 4, 8]), rank=0, lookahead=1, capacity=4))
        >>> questions.ask(0, Question("open", feed=1, num_steps=1)); questions.take()
        >>> questions.add(1, [np.array([2, 5]), np.array([5])]); questions.take()
        (0, Question(what='open', feed=1, num_steps=1))
    """

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._feed, self._num_steps = 0, 0
        self._waiting: dict[int, Question] = {}
        self._number = 0
        self._refused_after, self._refusal = 0, None

    _refusal: ConfigError | None

    def add(self, feed: int, rows_of_rank: Sequence[NDArray[Any]]) -> None:
        """One more step, see :meth:`Oracle.add`. With the first step of another feed those before it are forgotten."""
        if feed != self._feed:
            self._oracle.restart()
            self._feed = feed
        if self._refusal is None:
            try:
                self._oracle.add(rows_of_rank)
            except ConfigError as error:
                self._refused_after, self._refusal = self._num_steps, error
        self._num_steps += 1

    def ask(self, number: int, question: Question) -> None:
        """A question; numbers run from 0 without gaps, but may come out of their order."""
        self._waiting[number] = question

    def take(self) -> tuple[int, Question] | None:
        """The next question that can be answered, with its number."""
        question = self._waiting.get(self._number)
        if question is None or question.num_steps > self._num_steps:
            return None
        del self._waiting[self._number]
        self._number += 1
        return self._number - 1, question

    def answer(self, question: Question) -> Opening | StepPlan:
        """The answer to the question that was taken last.

        Raises:
            ConfigError: when one of its steps fits into no cache.
            TrainingError: when its feed was left: nobody waits for the answer then.
        """
        if question.feed != self._feed:
            raise TrainingError(f"a question about feed {question.feed} in feed {self._feed}", "one about this feed")
        if self._refusal is not None and question.num_steps > self._refused_after:
            raise self._refusal
        return self._oracle.open() if question.what == "open" else self._oracle.plan()
