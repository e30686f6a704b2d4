"""Who makes the plans: an oracle in each rank, from the rows of all, or a central one in a process of its own.

Both are told of the same steps and asked the same questions, and give the same answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from pibroch.collectives import Channel
from pibroch.collectives.task_thread import TaskThread
from pibroch.errors import ConfigError
from pibroch.exchange.announcement import Announcement
from pibroch.kernels.window.rules import Ints
from pibroch.lookahead import Opening, Oracle, Question, Questions, StepPlan
from pibroch.lookahead.encoding import Parts, decode_opening, decode_plan
from pibroch.lookahead.questions import What
from pibroch.observability.trace import span
from pibroch.servers import oracle as server
from pibroch.servers.peers import Peers

Count = Callable[[str, int], None]


class Planner(ABC):
    """One rank's way to its oracle. The thread that trains calls it; what takes time is done by the clerk.

    After an error that is no answer all questions, open ones too, are answered by it.

    Args:
        clerk: keeps the oracle, or talks to it.
    """

    tells_rows: bool
    """Whether the oracle needs the rows of all ranks here."""

    def __init__(self, clerk: TaskThread) -> None:
        self._planner_thread = clerk
        self._num_questions = 0
        self._open: dict[int, Future[Any]] = {}
        self._failure: BaseException | None = None

    def add(self, feed: int, said: Future[Announcement]) -> None:
        """One more step, as soon as all ranks have told about it; returns at once.

        Args:
            feed: number of the feed that it belongs to; with a new number the steps before are forgotten, all records being
                at home.
            said: about the step.
        """
        said.add_done_callback(partial(self._heard, feed))

    def open(self, feed: int, num_steps: int) -> Future[Opening]:
        """See :meth:`Oracle.open`; answered when ``num_steps`` steps, of all feeds, are known."""
        return self._ask(Question("open", feed, num_steps))

    def plan(self, feed: int, num_steps: int) -> Future[StepPlan]:
        """See :meth:`Oracle.plan`; likewise."""
        return self._ask(Question("plan", feed, num_steps))

    def fail(self, error: BaseException) -> None:
        """Answer all questions by an error, those to come as well."""
        self._failure = self._failure or error
        for number in list(self._open):
            self._answer(number, error)

    @abstractmethod
    def _tell(self, feed: int, said: Announcement) -> None:
        """The clerk's errand for a step."""

    @abstractmethod
    def _put(self, number: int, question: Question) -> None:
        """The clerk's errand for a question."""

    def _ask(self, question: Question) -> Future[Any]:
        number, answer = self._num_questions, Future[Any]()
        self._num_questions += 1
        self._open[number] = answer
        self._send(partial(self._put, number, question))
        if self._failure is not None:
            self._answer(number, self._failure)
        return answer

    def _heard(self, feed: int, said: Future[Announcement]) -> None:
        error = said.exception()
        if error is None:
            self._send(partial(self._tell, feed, said.result()))
        else:
            self.fail(error)

    def _answer(self, number: int, value: Any) -> None:
        answer = self._open.pop(number, None)
        if answer is None:
            return
        with suppress(InvalidStateError):
            if isinstance(value, BaseException):
                answer.set_exception(value)
            else:
                answer.set_result(value)

    def _send(self, errand: Callable[[], None]) -> None:
        self._planner_thread.submit(errand).add_done_callback(self._notice)

    def _notice(self, done: Future[None]) -> None:
        error = done.exception()
        if error is not None:
            self.fail(error)


class LocalPlanner(Planner):
    """An oracle in this process.

    Args:
        clerk: keeps it.
        oracle: of this rank.
    """

    tells_rows = True

    def __init__(self, clerk: TaskThread, oracle: Oracle) -> None:
        super().__init__(clerk)
        self._questions = Questions(oracle)

    def _tell(self, feed: int, said: Announcement) -> None:
        with span("add"):
            self._questions.add(feed, said.rows_of_rank)
        said.rows_of_rank = ()
        self._answer_due()

    def _put(self, number: int, question: Question) -> None:
        self._questions.ask(number, question)
        self._answer_due()

    def _answer_due(self) -> None:
        while (due := self._questions.take()) is not None:
            number, question = due
            with span(question.what):
                try:
                    value: Any = self._questions.answer(question)
                except Exception as error:
                    value = error
            self._answer(number, value)


class RemotePlanner(Planner):
    """An oracle in another process, which hears from each rank only what that rank touches. All ranks make theirs together.

    Args:
        clerk: talks to it.
        name: of the worker of this process's RPC group.
        channel: between the ranks.
        settings: the arguments of :class:`pibroch.servers.oracle.Central`, the same on all ranks.
        count: hears the purpose and the number of bytes that travel, on the clerk's thread.

    Raises:
        ConfigError: when ranks want different things.
        TrainingError: when the oracle cannot be reached.
    """

    tells_rows = False

    def __init__(self, clerk: TaskThread, name: str, channel: Channel, settings: list[Any], count: Count) -> None:
        super().__init__(clerk)
        self._name, self._rank, self._count = name, channel.ranks.rank, count
        self._peers = Peers("oracle", [name], channel)
        self._num_steps = 0
        with self._peers.explained(name):
            self._peers.configure(name, server.configure, settings).wait()

    def _tell(self, feed: int, said: Announcement) -> None:
        here, number = said.here, self._num_steps
        self._num_steps += 1
        encoded = torch.from_numpy(here.encoded)
        self._count("ids", here.encoded.nbytes)
        with span("add"):
            self._call(server.add, number, feed, len(here.grouped.rows), encoded).add_done_callback(self._notice_call)

    def _put(self, number: int, question: Question) -> None:
        answer = self._call(server.ask, number, question.what, question.feed, question.num_steps)
        answer.add_done_callback(lambda done: self._send(partial(self._receive, number, question.what, done)))

    def _receive(self, number: int, what: What, done: torch.futures.Future[Any]) -> None:
        """An answer has come: the clerk's errand."""
        try:
            with self._peers.explained(self._name), span(what):
                parts = Parts(*(part.numpy() for part in done.value()))
                self._count("plans", parts.num_bytes)
                value: Any = decode_plan(parts) if what == "plan" else decode_opening(parts)
        except Exception as error:
            value = error
        self._answer(number, value)

    def _call(self, function: Any, *args: Any) -> torch.futures.Future[Any]:
        return self._peers.call(self._name, function, self._peers.key, self._rank, *args)

    def _notice_call(self, done: torch.futures.Future[None]) -> None:
        try:
            with self._peers.explained(self._name):
                done.value()
        except Exception as error:
            self.fail(error)


def check_same_options(channel: Channel, options: Mapping[str, Any]) -> None:
    """Raise ConfigError, on every rank, unless all ranks have the same options, by name; every rank calls it."""
    for rank, theirs in enumerate(channel.gather(options)):
        if theirs != options:
            name = next(name for name in options if theirs[name] != options[name])
            raise ConfigError(
                f"{name} {options[name]!r} on rank {channel.ranks.rank}, {theirs[name]!r} on rank {rank}",
                "the same options on all ranks",
            )


def make_planner(
    clerk: TaskThread, name: str | None, channel: Channel, bounds: Ints, lookahead: int, capacity: int, design: str,
    delayed: bool, count: Count,
) -> Planner:  # fmt: skip
    """The way to the central oracle ``name``, or an oracle of this rank's own where there is none. Every rank calls it.

    Raises:
        ConfigError: for options that cannot be.
        TrainingError: when the oracle cannot be reached.
    """
    rank, size = channel.ranks.rank, channel.ranks.world_size
    if name is None:
        return LocalPlanner(clerk, Oracle(bounds, rank, lookahead, capacity, design, delayed, size))
    settings = [np.asarray(bounds).tolist(), size, lookahead, capacity, design, delayed]
    return RemotePlanner(clerk, name, channel, settings, count)
