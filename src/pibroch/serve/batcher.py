"""Dynamic batching: waiting requests are scored together, each by the model it came for.

A batch is computed as soon as a thread is free and either the batch is full or its oldest request
has waited for as long as the budget allows; while it is computed, the next one gathers. Requests
are never divided: each answer is of one model.

A few rows take less time than it takes to hand them to another thread and back: they are computed
in the event loop, once it has read all that has come. Such batches use one core, for a team of
threads would cost more than it saves. Where other hosts have some of the rows, these are asked and
the loop goes on until they have answered: it never waits, so that hosts which ask each other do not
wait in a circle.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pibroch.data import JaggedBatch
from pibroch.errors import DamagedCheckpointError, InputError, PibrochError, WorkerLostError
from pibroch.serve.inputs import Work, merged_batches, merged_columns, num_rows
from pibroch.serve.predictor import Begun, Predictor
from pibroch.serve.row_hosts import when_read
from pibroch.serve.settings import Refusal, ServerLimits

ROWS_AT_ONCE = 32
"""Rows that the event loop computes itself: some half a millisecond, in which nobody else is heard.
"""
Outputs = NDArray[np.float32]


@dataclass(slots=True, eq=False)
class _Request:
    predictor: Predictor
    work: Work
    num_rows: int
    is_embedded: bool
    came_at: float
    answer: asyncio.Future[Outputs]


class Batcher:
    """Scores requests of one event loop; made, asked and closed in its thread.

    Args:
        limits: of batches and of the queue.
        observe: told of each batch its number of rows.
    """

    def __init__(
        self,
        limits: ServerLimits,
        observe: Callable[[int], None] = lambda rows: None,
    ) -> None:
        self.limits = limits
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Request] = deque()
        self.rows_waiting = 0
        self._is_busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None
        self._open: set[_Request] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._num_threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(
            1, "pibroch-score", torch.set_num_threads, (self._num_threads,)
        )
        self._pool.submit(torch.get_num_threads).result()
        torch.set_num_threads(1)  # of this thread alone: the other has its own number already

    async def logits(self, predictor: Predictor, work: Work) -> Outputs:
        """Logits of a request, float32 ``[B]``.

        Raises:
            Refusal: 400 for rows that cannot be scored or too many of them, 429 when the queue is
                full, 503 when the answer takes too long.
        """
        return await self._computed(predictor, work, is_embedded=False)

    async def embeddings(self, predictor: Predictor, work: Work) -> Outputs:
        """Pooled embeddings of a request, float32 ``[B, F, D]``; errors as of :meth:`logits`.

        Raises:
            Refusal: as there, and 400 for an answer above the bound of bodies.
        """
        size = 4 * num_rows(work) * len(predictor.features) * predictor.dim
        most = self.limits.body_bytes
        if size > most:
            got = f"got {num_rows(work)} rows, whose embeddings are {size:,} bytes"
            raise Refusal(400, f"{got}; need at most {most:,} in an answer")
        return await self._computed(predictor, work, is_embedded=True)

    async def _computed(self, predictor: Predictor, work: Work, is_embedded: bool) -> Outputs:
        """Wait for a request's part of a batch; raises as :meth:`logits`."""
        limits = self.limits
        count = num_rows(work)
        if not 1 <= count <= limits.rows:
            raise Refusal(400, f"got {count} rows; need 1 to {limits.rows} in a request")
        if self._waiting and self.rows_waiting + count > limits.queue_rows:
            got = f"got {count} rows with {self.rows_waiting} waiting already"
            raise Refusal(429, f"{got}; try again", {"retry-after": "1"})
        request = _Request(
            predictor, work, count, is_embedded, self._loop.time(), self._loop.create_future()
        )
        self._waiting.append(request)
        self.rows_waiting += count
        self._begin_soon()
        self._open.add(request)
        if self._sweep is None:
            self._sweep = self._loop.call_later(limits.answer_timeout_s, self._refuse_late)
        try:
            return await request.answer
        finally:
            self._open.discard(request)

    def close(self) -> None:
        """End the thread once it has computed what it has begun."""
        if self._sweep is not None:
            self._sweep.cancel()
        self._pool.shutdown(wait=True)
        torch.set_num_threads(self._num_threads)

    def _refuse_late(self) -> None:
        """Give up on what has no answer in time.

        One timer for all, for nearly all have one long before.
        """
        timeout_s = self.limits.answer_timeout_s
        now = self._loop.time()
        reason = f"no answer within {timeout_s:g} s, as the server has too much to do; try again"
        for request in self._open:
            if now - request.came_at >= timeout_s and not request.answer.done():
                request.answer.set_exception(Refusal(503, reason, {"retry-after": "1"}))
        oldest = min(
            (request.came_at for request in self._open if not request.answer.done()), default=None
        )
        self._sweep = (
            None if oldest is None else self._loop.call_at(oldest + timeout_s, self._refuse_late)
        )

    def _begin_soon(self) -> None:
        """Start a batch once all that has come was read."""
        if self._soon is None and not self._is_busy:
            self._soon = self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        """Start a batch when one is due."""
        self._soon = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while not self._is_busy and self._waiting:
            due = self._waiting[0].came_at + self.limits.batch_delay_ms / 1000 - self._loop.time()
            if due > 0 and self.rows_waiting < self.limits.batch_rows:
                self._timer = self._loop.call_later(due, self._begin)
                return
            batch = self._take()
            if not batch:
                continue
            rows = sum(request.num_rows for request in batch)
            self._observe(rows)
            self._is_busy = True
            if rows > ROWS_AT_ONCE:
                self._hand_over(batch)
            elif batch[0].predictor.is_remote:
                self._ask(batch)
            else:
                self._end(batch, _score(batch))
            return

    def _hand_over(self, batch: Sequence[_Request]) -> None:
        """Compute a batch in the thread."""
        computed = self._loop.run_in_executor(self._pool, _score, batch)
        computed.add_done_callback(lambda done: self._end(batch, done.result()))

    def _ask(self, batch: Sequence[_Request]) -> None:
        """Compute a batch here when other hosts have given its rows.

        What goes wrong, the thread does again, and says why.
        """
        try:
            whole = _merged(batch)
            begun = batch[0].predictor.begin(whole)
        except WorkerLostError as error:
            self._end(batch, _lost(batch, error))
            return
        except Exception:  # what nobody foresaw; the thread meets it, too, and says it
            self._hand_over(batch)
            return

        def end() -> None:
            try:
                results = _split(batch, _outputs(batch, whole, begun))
            except WorkerLostError as error:
                results = _lost(batch, error)
            except Exception:  # likewise
                self._hand_over(batch)
                return
            self._end(batch, results)

        when_read(self._loop, begun.rows.answers, end)

    def _take(self) -> list[_Request]:
        """The oldest requests for one output of one model, as many as fit.

        Those that nobody waits for are left out.
        """
        batch: list[_Request] = []
        rows = 0
        while self._waiting:
            first = self._waiting[0]
            if batch and (
                first.predictor is not batch[0].predictor
                or first.is_embedded != batch[0].is_embedded
                or rows + first.num_rows > self.limits.batch_rows
            ):
                break
            self._waiting.popleft()
            self.rows_waiting -= first.num_rows
            if not first.answer.done():
                batch.append(first)
                rows += first.num_rows
        return batch

    def _end(self, batch: Sequence[_Request], results: Sequence[Outputs | Exception]) -> None:
        self._is_busy = False
        for request, result in zip(batch, results, strict=True):
            if request.answer.done():
                continue
            if isinstance(result, Exception):
                request.answer.set_exception(result)
            else:
                request.answer.set_result(result)
        if self._waiting:
            self._begin_soon()


def _score(batch: Sequence[_Request]) -> list[Outputs | Exception]:
    """Each request's outputs, or why it has none: one bad request does not spoil the others'."""
    try:
        return _split(batch, _outputs(batch, _merged(batch)))
    except (DamagedCheckpointError, WorkerLostError) as error:
        return _lost(batch, error)
    except InputError as error:
        if len(batch) == 1:
            return [Refusal(400, str(error))]
        return [result for request in batch for result in _score([request])]
    except Exception as error:  # what nobody foresaw
        return [error] * len(batch)


def _lost(batch: Sequence[_Request], error: PibrochError) -> list[Outputs | Exception]:
    return [Refusal(503, str(error), {"retry-after": "1"})] * len(batch)


def _merged(batch: Sequence[_Request]) -> JaggedBatch:
    """All rows: those of encoded requests first."""
    encoded = [request.work for request in batch if isinstance(request.work, JaggedBatch)]
    raw = [request.work for request in batch if not isinstance(request.work, JaggedBatch)]
    if raw:
        encoded.append(batch[0].predictor.encode(merged_columns(raw)))
    return merged_batches(encoded)


def _outputs(batch: Sequence[_Request], whole: JaggedBatch, begun: Begun | None = None) -> Outputs:
    predictor = batch[0].predictor
    compute = predictor.embed if batch[0].is_embedded else predictor.logits
    return compute(whole, begun).numpy()


def _split(batch: Sequence[_Request], outputs: Outputs) -> list[Outputs | Exception]:
    order = sorted(
        range(len(batch)), key=lambda place: not isinstance(batch[place].work, JaggedBatch)
    )
    results: list[Outputs | Exception] = [outputs] * len(batch)
    end = 0
    for place in order:
        start = end
        end = end + batch[place].num_rows
        part = outputs[start:end]
        if np.isfinite(part).all():
            results[place] = part
        else:
            row = int(np.argwhere(~np.isfinite(part))[0, 0])
            got = f"got row {row} with numbers so large that its score is no number"
            results[place] = Refusal(400, got)
    return results
