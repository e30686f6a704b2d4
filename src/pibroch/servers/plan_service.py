"""A central oracle: trainers tell it the rows of their parts of batches, and ask for their views of the plan.

Each function is called by name through :mod:`pibroch.rpc`.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.futures import Future

from pibroch.collectives.task_thread import TaskThread
from pibroch.errors import ProtocolError
from pibroch.kernels.arrays import Ints
from pibroch.kernels.varint import numba as varint
from pibroch.lookahead import Opening, Oracle, PlanRequest, StepPlan
from pibroch.lookahead.encoding import encode
from pibroch.lookahead.oracle_thread import OracleThread
from pibroch.lookahead.requests import RequestKind
from pibroch.rpc import functions
from pibroch.servers.rounds import Rounds
from pibroch.servers.runs import Runs
from pibroch.servers.served_shard import check_rows

EncodedPlan = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class StepPart:
    """A trainer's part of a step.

    Attributes:
        feed: number of the feed that it belongs to.
        rows: distinct addresses.
    """

    feed: int
    rows: Ints


class PlanService:
    """The oracles of all trainers of one exchange, a thread each. Threads may call it at once; none waits for another.

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
        self._oracles = [
            OracleThread(Oracle(bounds, rank, *options), TaskThread(f"pibroch-oracle-{rank}"))
            for rank in range(num_trainers)
        ]
        self._rounds: Rounds[StepPart] = Rounds(num_trainers)
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
            self._rounds.add(trainer, number, StepPart(feed, rows))
            while (parts := self._rounds.take()) is not None:
                if len({part.feed for part in parts}) > 1:
                    raise ProtocolError(f"step {number} of several feeds", "the same program on all trainers")
                for oracle in self._oracles:
                    oracle.add(parts[0].feed, [part.rows for part in parts])

    def ask(self, trainer: int, number: int, request: PlanRequest) -> Future[EncodedPlan]:
        """A trainer's request; its answer, encoded, is there as soon as it can be."""
        if not 0 <= trainer < len(self._oracles):
            raise ProtocolError(f"trainer {trainer}", f"one below {len(self._oracles)}")
        answer: Future[EncodedPlan] = Future()

        def pass_on(done: concurrent.futures.Future[Opening | StepPlan]) -> None:
            try:
                head, body = encode(done.result())
                answer.set_result((torch.from_numpy(head), torch.from_numpy(body)))
            except Exception as error:  # the trainer hears of it
                answer.set_exception(error)  # type: ignore[arg-type]  # torch's annotation asks for a type variable

        self._oracles[trainer].ask(number, request).add_done_callback(pass_on)
        return answer

    def fail(self, error: Exception) -> None:
        """Fail what waits, and whoever comes later."""
        with self._lock:
            self._failure = self._failure or error
            self._rounds.clear()
        for oracle in self._oracles:
            oracle.fail(error)


ORACLES: Runs[PlanService] = Runs("an oracle", "homes, lookahead or cache")


def configure(run: str, trainer: Sequence[str | int], key: str, wanted: list[Any], forgotten: list[str]) -> None:
    """Make the oracles ``key``, see :class:`Runs`; ``wanted`` are the arguments of :class:`PlanService`, bounds as a list."""

    def make() -> PlanService:
        bounds, *others = wanted
        return PlanService(np.array(bounds, np.int64), *others)

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
def ask(key: str, trainer: int, number: int, kind: RequestKind, feed: int, num_steps: int) -> Future[EncodedPlan]:
    """A trainer's request, see :class:`PlanRequest`; the parts of its answer, see :mod:`pibroch.lookahead.encoding`."""
    if kind not in ("open", "plan"):
        raise ProtocolError(f"a request to {kind!r}", "'open' or 'plan'")
    return ORACLES.find(key).ask(trainer, number, PlanRequest(kind, feed, num_steps))
