"""A central oracle: trainers send it the rows of their batches and ask for their plans.

Each function is called by name through :mod:`pibroch.rpc`.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.futures import Future

from pibroch.collectives.task_thread import TaskThread
from pibroch.errors import ProtocolError
from pibroch.exchange.lookahead.oracle import JointOracle, Oracle, PlanRequest
from pibroch.exchange.lookahead.oracle.encoding import encode
from pibroch.exchange.lookahead.oracle.kernels import varint
from pibroch.exchange.lookahead.oracle.requests import Answer, RequestKind
from pibroch.exchange.lookahead.oracle.thread import OracleThread
from pibroch.kernels.arrays import Ints
from pibroch.rpc import functions
from pibroch.servers.rounds import Rounds
from pibroch.servers.runs import Runs
from pibroch.servers.served_shard import check_rows

EncodedPlans = list[Tensor]
"""Head and body of each lane's plan."""


class PlanService:
    """The oracles of all trainers of one exchange, a thread each.

    Threads may call it at once; none waits for another.

    Args:
        bounds: of each lane int64 ``[P + 1]``, the first address of each home.
        capacities: of each lane, see :class:`Oracle`.
        num_trainers: W.
        lookahead, design, delayed: see :class:`Oracle`.
        goes_on: whether it takes the place of another one: then all trainers say first where they
            are, see :meth:`go_on`.
    """

    def __init__(
        self,
        bounds: Sequence[Ints],
        capacities: Sequence[int],
        num_trainers: int,
        lookahead: int,
        design: str,
        delayed: bool,
        goes_on: bool = False,
    ) -> None:
        self._num_rows = [int(of_lane[-1]) for of_lane in bounds]
        lanes = list(zip(bounds, capacities, strict=True))

        def oracle(rank: int) -> JointOracle:
            return JointOracle(
                [
                    Oracle(homes, rank, lookahead, room, design, delayed, num_trainers)
                    for homes, room in lanes
                ]
            )

        self._oracles = [
            OracleThread(oracle(rank), TaskThread(f"pibroch-oracle-{rank}"))
            for rank in range(num_trainers)
        ]
        # of each step its feed, and distinct addresses of each lane
        self._rounds: Rounds[tuple[int, Sequence[Ints]]] = Rounds(num_trainers)
        self._awaited = set(range(num_trainers)) if goes_on else set[int]()
        self._begins: dict[int, tuple[int, int]] = {}
        self._first = 0
        self._lock = threading.Lock()
        self._failure: Exception | None = None

    def go_on(
        self, trainer: int, step: int, request: int, answered: Sequence[tuple[int, PlanRequest]]
    ) -> None:
        """Where a trainer is that was served by another one before.

        It tells about the steps from ``step`` on again.

        The feed that the last of the trainers has come to counts: who tells of an earlier one needs
        nothing of it any more.

        Args:
            trainer: who says so.
            step: with which a feed began.
            request: number of the first request that comes again.
            answered: of them, with their numbers, those that were answered before; the answers are
                made again for nobody.

        Raises:
            ProtocolError: when it has been said before.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if trainer not in self._awaited:
                raise ProtocolError(
                    f"trainer {trainer} that goes on", "each once, where another oracle served them"
                )
            self._awaited.remove(trainer)
            self._begins[trainer] = step, request
            if not self._awaited:
                self._first = max(begun for begun, _ in self._begins.values())
                self._rounds.begin(self._first)
                for number, (_, first_request) in self._begins.items():
                    self._oracles[number].begin(self._first, first_request)
                self._pass_on()
        for number, request_again in answered:
            self._oracles[trainer].ask(number, request_again)

    def add(self, trainer: int, number: int, feed: int, rows: Sequence[Ints]) -> None:
        """A trainer's part of step ``number``, by lane.

        Raises:
            ProtocolError: for rows that are not there, or a step that was told already.
        """
        if len(rows) != len(self._num_rows):
            raise ProtocolError(f"rows of {len(rows)} lanes", f"{len(self._num_rows)}")
        for of_lane, num_rows in zip(rows, self._num_rows, strict=True):
            check_rows(of_lane, num_rows)
        with self._lock:  # oracles hear of the steps in their order
            if self._failure is not None:
                raise self._failure
            if 0 <= number < self._first:
                return  # of a feed that others have left
            self._rounds.add(trainer, number, (feed, rows))
            if not self._awaited:
                self._pass_on()

    def _pass_on(self) -> None:
        """Let the oracles hear of the steps that all trainers have told about."""
        while (parts := self._rounds.take()) is not None:
            feeds, rows = zip(*parts, strict=True)
            if len(set(feeds)) > 1:
                raise ProtocolError(
                    f"step {self._rounds.number - 1} of several feeds",
                    "the same program on all trainers",
                )
            for oracle in self._oracles:
                oracle.add(feeds[0], list(zip(*rows, strict=True)))

    def ask(self, trainer: int, number: int, request: PlanRequest) -> Future[EncodedPlans]:
        """A trainer's request; its answer, encoded, is there as soon as it can be."""
        if not 0 <= trainer < len(self._oracles):
            raise ProtocolError(f"trainer {trainer}", f"one below {len(self._oracles)}")
        answer: Future[EncodedPlans] = Future()

        def pass_on(done: concurrent.futures.Future[Answer]) -> None:
            try:
                encoded = [part for of_lane in done.result() for part in encode(of_lane)]
                answer.set_result([torch.from_numpy(part) for part in encoded])
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


def configure(
    run: str,
    trainer: Sequence[str | int],
    key: str,
    wanted: list[Any],
    forgotten: list[str],
    goes_on: bool = False,
) -> None:
    """Make the oracles ``key``, see :class:`Runs`.

    ``wanted`` are the arguments of :class:`PlanService`, bounds as a list.
    """

    def make() -> PlanService:
        bounds, capacities, num_trainers, lookahead, design, delayed = wanted
        homes = [np.array(of_lane, np.int64) for of_lane in bounds]
        return PlanService(homes, capacities, num_trainers, lookahead, design, delayed, goes_on)

    ORACLES.configure(run, trainer, key, wanted, forgotten, make)


def go_on(key: str, trainer: int, step: int, request: int, answered: list[list[Any]]) -> None:
    """Where a trainer is, see :meth:`PlanService.go_on`.

    Of each request its number and its fields.
    """
    requests = [(int(number), _request(*fields)) for number, *fields in answered]
    ORACLES.find(key).go_on(trainer, step, request, requests)


def add(
    key: str, trainer: int, number: int, feed: int, num_rows: list[int], encoded: Tensor
) -> None:
    """A trainer's part of step ``number``.

    Of each lane ``num_rows`` rising addresses, as ``kernels.varint`` writes them.
    """
    data = encoded.numpy()
    rows = []
    start = 0
    for count in num_rows:
        if not 0 <= count <= len(data) - start:  # a row takes a byte at least
            raise ProtocolError(
                f"{count} rows in {len(data) - start} bytes", "no more rows than bytes"
            )
        rows.append(np.empty(count, np.int64))
        taken = varint.decode(data[start:], rows[-1])
        if taken < 0:
            raise ProtocolError(f"{len(data) - start} bytes of rows", f"those of {count} rows")
        start += taken
    if start != len(data):
        raise ProtocolError(f"{len(data)} bytes of rows", f"those of {sum(num_rows)} rows")
    ORACLES.find(key).add(trainer, number, feed, rows)


@functions.async_execution
def ask(
    key: str, trainer: int, number: int, kind: RequestKind, feed: int, num_steps: int
) -> Future[EncodedPlans]:
    """A trainer's request, see :class:`PlanRequest`.

    The parts of its answer, see :mod:`pibroch.exchange.lookahead.oracle.encoding`.
    """
    return ORACLES.find(key).ask(trainer, number, _request(kind, feed, num_steps))


def _request(kind: RequestKind, feed: int, num_steps: int) -> PlanRequest:
    if kind not in ("open", "plan"):
        raise ProtocolError(f"a request to {kind!r}", "'open' or 'plan'")
    return PlanRequest(kind, feed, num_steps)
