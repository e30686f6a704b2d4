"""Inference between ranks that need not keep step (BLS, Sec. IV).

Up to k batches are on their way before a rank blocks.

A batch is a *question* to all ranks, whose rows it wants, and an *answer* from each. A rank asks,
then goes on with its next batches; it answers others whenever it comes by, and while it is blocked.
Differs from the paper, whose ranks all know each batch's ids: two messages instead of one depend on
each other, both of which carry their sizes. Nothing else is sent.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pibroch.collectives.bounded_lag.base import LaggedTransport, RankParts, Slot
from pibroch.collectives.bounded_lag.jitter import BOUNDS, Straggler
from pibroch.collectives.bounded_lag.opening import transport_of
from pibroch.collectives.bounded_lag.options import AUTO, BoundedLagOptions
from pibroch.collectives.bounded_lag.window import Complete, LagWindow
from pibroch.errors import ConfigError, DataError
from pibroch.exchange import EmbeddingOutput, Embeddings
from pibroch.exchange.alltoall.exchange import AllToAllExchange
from pibroch.exchange.alltoall.inference import InferenceLookup, Question
from pibroch.kernels.arrays import Bytes
from pibroch.models.base import Model
from pibroch.observability.trace import span
from pibroch.serve.pace import StepPace

logger = logging.getLogger(__name__)
QUESTIONS = 0
ANSWERS = 1
"""Streams of the transport."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What became of a request.

    Attributes:
        request_id: as it was given.
        logits: ``[B]``; ``None`` for a batch that could not be used.
        error: why not.
    """

    request_id: Any
    logits: Tensor | None
    error: DataError | None = None

    def scores(self) -> Tensor:
        """Probabilities, float64 ``[B]``, of a loss that gives such; of others see ``logits``.

        Raises the error of a batch that could not be used.
        """
        if self.logits is None:
            raise self.error or DataError("no batch", "one")
        return torch.sigmoid(self.logits.double())


@dataclass(slots=True)
class _LaggedRequest:
    """A batch on its way.

    ``begun`` is the model's dense part; ``is_real`` says whether some rank has a batch under this
    number.
    """

    number: int
    request_id: Any
    dense: Tensor
    question: Question
    is_real: bool
    error: DataError | None = None
    begun: Tensor | None = None


class BoundedLagPipeline:
    """Predictions in the order of their requests.

    They have the bits of ``model(batch.dense, embeddings(batch))``.

    All ranks call :meth:`submit` and :meth:`drain` in the same order, with as many batches each, or
    leave that to :meth:`run`. Nothing may train, load or move rows meanwhile.

    Args:
        model: of ``(dense, embedded)``; it gets the embeddings when they are there. What a
            :class:`pibroch.models.base.Model` can work out before is worked out while they travel.
        embeddings: with the exchange ``alltoall``, any placement.
        bound: k, batches on their way before a rank blocks; ``PIBROCH_BLS_BOUND`` when absent. 0 is
            synchronous. ``auto``, and when there is neither: 1 for the first 80 requests, then what
            the ranks' own times of 64 of them ask for, 8 at most, the same on all ranks; memory is
            reserved for 8.
        transport: ``auto``, ``stream`` or ``mpi``, see :class:`pibroch.BoundedLagOptions`.

    Attributes:
        num_messages: sent to other ranks so far: two a batch and rank.

    Raises:
        ConfigError: for another exchange, or options that cannot be.
        RankFailedError: (all methods) when another rank is lost.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        embeddings: Embeddings,
        bound: int | str | None = None,
        transport: str | None = None,
    ) -> None:
        exchange = embeddings.exchange
        if not isinstance(exchange, AllToAllExchange):
            raise ConfigError(
                f"embeddings whose exchange is a {type(exchange).__name__}",
                "the exchange alltoall",
                'make them with exchange="alltoall", and load a checkpoint into them',
            )
        if isinstance(bound, str) and bound != AUTO:
            raise ConfigError(f"bound {bound!r}", f"a number, or {AUTO!r}")
        options = BoundedLagOptions(None if isinstance(bound, str) else bound, transport)
        given = None if bound == AUTO else options.given_bound()
        self._model = model
        self._embeddings = embeddings
        self._lookup = InferenceLookup(exchange)
        self._ranks = embeddings.ranks
        self._window = LagWindow(1, BOUNDS[-1]) if given is None else LagWindow(given)
        self._chooses = given is None
        self._requests: deque[_LaggedRequest] = deque()
        self._transport: LaggedTransport | None = None
        if self._ranks.world_size > 1:
            self._transport = transport_of(
                self._ranks, self._window.num_slots, options, num_streams=2
            )
        self._peers = () if self._transport is None else self._transport.peers
        self._num_answered = dict.fromkeys(self._peers, 0)
        self._num_asked = self._seen = self.num_messages = self._width = 0
        self._pace = StepPace(self._ranks.rank, self._ranks.members, self._window.num_slots)
        self._is_over = False  # whether the last request that was finished was no rank's own
        exchange.flush()

    @property
    def bound(self) -> int:
        """Batches on their way before a rank blocks, as it is now."""
        return self._window.bound

    @property
    def straggler(self) -> Straggler | None:
        """The rank that was always slow in the last 64 requests, if one was; the same on all ranks.

        With its own time of a step and that of the next slowest. No bound helps against one: a
        warning names it.
        """
        return self._pace.straggler

    def submit(self, batch: Any = None, request_id: Any = None) -> list[Prediction]:
        """Ask for a batch; returns the predictions that this brought, oldest first.

        A batch that cannot be used fails alone: its prediction has the error, and no other rank
        notices.

        Args:
            batch: a :class:`JaggedBatch`, or anything with ``dense`` that the embeddings take;
                ``None`` for none.
            request_id: comes back with the prediction; the number of the request when absent.
        """
        done = []
        for each in self._window.initiate():
            if isinstance(each, Complete):
                done.append(self._finish())
            else:
                self._begin(each.number, batch, request_id)
        return done

    def drain(self) -> list[Prediction]:
        """Wait for all requests; their predictions, oldest first."""
        last = self._window.num_initiated - 1
        return [self._finish() for _ in self._window.wait(last)] if last >= 0 else []

    def run(self, batches: Iterable[Any]) -> Iterator[Prediction]:
        """Predictions of all batches, in order.

        A rank that runs out of them answers the others until all have.

        The request id is the batch's number. Each rank may have as many as it likes, and iterates
        to the end.
        """
        assert not self._requests, "requests on their way; drain() first"
        first = self._num_asked
        num_real = 0
        source = iter(batches)
        self._is_over = False
        while not self._is_over:  # all ranks leave after the same request
            batch = next(source, None)
            num_real += batch is not None
            yield from _renumbered(self.submit(batch), first, num_real)
        yield from _renumbered(self.drain(), first, num_real)

    def close(self) -> None:
        """Give the transport back."""
        if self._transport is not None:
            self._transport.close()

    def _begin(self, number: int, batch: Any, request_id: Any) -> None:
        """Ask for a batch, and work out what needs no embeddings."""
        with span("find rows"):
            request = self._requested(number, batch, number if request_id is None else request_id)
        self._requests.append(request)
        self._num_asked += 1
        if self._transport is not None:
            parts = RankParts.of(request.question.messages)
            with span("put questions"):
                self._transport.put(Slot(QUESTIONS, number), parts)
            self.num_messages += len(self._peers)
            for p in self._peers:
                self._count(p, len(request.question.messages[p]), 0)
            self._answer_others()
        if isinstance(self._model, Model) and request.error is None and len(request.dense):
            try:
                with span("dense layers"), torch.inference_mode():
                    request.begun = self._model.begin(request.dense)
            except DataError as error:
                request.error = error

    def _requested(self, number: int, batch: Any, request_id: Any) -> _LaggedRequest:
        error: DataError | None = None
        took_ns = self._pace.begins(number)
        if batch is not None:
            try:
                prepared = self._embeddings.prepared(batch)
                question = self._lookup.ask(prepared, took_ns=took_ns)
                self._width = batch.dense.shape[1]
                return _LaggedRequest(number, request_id, batch.dense, question, True)
            except DataError as problem:
                error = problem
        nothing = self._lookup.nothing(self._width, batch is not None, took_ns)
        return _LaggedRequest(
            number, request_id, torch.empty(0, self._width), nothing, batch is not None, error
        )

    def _answer_others(self) -> None:
        """Answer all questions that are there, up to the number of this rank's own.

        Nobody gets further ahead than k.
        """
        assert self._transport is not None
        for p in self._peers:
            while self._num_answered[p] < self._num_asked:
                number = self._num_answered[p]
                if not self._transport.has_arrived(Slot(QUESTIONS, number), p):
                    break
                message = self._transport.view(Slot(QUESTIONS, number), p)
                self._requests[number - self._requests[0].number].is_real |= self._lookup.is_real(
                    message
                )
                self._pace.took(number, p, self._lookup.took_ns(message))
                with span("answer others"):
                    answer = self._lookup.answer(message, self._embeddings.averaged_at)
                    self._transport.put(
                        Slot(ANSWERS, number), _for_one(answer, p, self._ranks.world_size), only=p
                    )
                self._count(p, len(answer), len(message))
                self.num_messages += 1
                self._num_answered[p] += 1

    def _finish(self) -> Prediction:
        """Wait for the answers to the oldest request, meanwhile answering others, and predict."""
        request = self._requests[0]
        answers = self._answers(request)
        self._requests.popleft()
        self._is_over = not request.is_real
        if request.error is not None:
            return Prediction(request.request_id, None, request.error)
        try:
            with span("dense layers"), torch.inference_mode():
                pooled = self._lookup.embeddings(request.question, answers)
                embedded = self._embeddings.given(request.question.batch, pooled)
                logits = self._logits(request, embedded)
        except DataError as error:
            return Prediction(request.request_id, None, error)
        # from outside inference mode, a tensor like any other
        return Prediction(request.request_id, logits.clone())

    def _answers(self, request: _LaggedRequest) -> list[Bytes]:
        """Of all ranks."""
        here = self._ranks.rank
        own = self._lookup.answer(request.question.messages[here], self._embeddings.averaged_at)
        slot = Slot(ANSWERS, request.number)
        transport = self._transport
        if transport is None:
            return [own]
        with self._ranks.waiting():
            while True:
                self._answer_others()
                if all(
                    self._num_answered[p] > request.number and transport.has_arrived(slot, p)
                    for p in self._peers
                ):
                    break
                start = time.perf_counter()
                with span("wait for answers"):
                    self._seen = transport.wait_for_news(self._seen, slot)
                self._pace.waited(time.perf_counter() - start)
        chosen = self._pace.completed(request.number)
        if chosen is not None and self._chooses:
            self._chooses = False
            self._window.rebound(chosen)
            logger.info(
                "a bound of %d for %d ranks, by their times of the last steps",
                chosen,
                self._ranks.world_size,
            )
        answers = [
            own if p == here else transport.view(slot, p) for p in range(self._ranks.world_size)
        ]
        for p in self._peers:
            self._count(p, 0, len(answers[p]))
        return answers

    def _logits(self, request: _LaggedRequest, embedded: Tensor | EmbeddingOutput) -> Tensor:
        model = self._model
        if request.begun is not None and isinstance(model, Model) and isinstance(embedded, Tensor):
            return model.finish(request.dense, request.begun, embedded)
        logits: Tensor = model(request.dense, embedded)
        return logits

    def _count(self, peer: int, sent: int, received: int) -> None:
        member = self._ranks.members[peer]
        self._ranks.traffic.add(member, sent, member, received)


def _for_one(part: Bytes, peer: int, size: int) -> RankParts:
    addresses = np.zeros(size, np.int64)
    sizes = np.zeros(size, np.int64)
    addresses[peer] = part.ctypes.data
    sizes[peer] = len(part)
    return RankParts(addresses, sizes, part)


def _renumbered(predictions: Iterable[Prediction], first: int, end: int) -> Iterator[Prediction]:
    """Numbered from 0 on, without those of fillers."""
    for each in predictions:
        if each.request_id - first < end:
            yield replace(each, request_id=each.request_id - first)
