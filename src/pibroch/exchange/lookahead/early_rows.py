"""Records that are read from servers some steps before a plan moves them.

So a server may stall for some steps without training waiting for it.

A plan names rows that nobody touches between now and the step for which they are wanted
(:attr:`StepPlan.early`): their records are copied as soon as the server gets to it. When a plan
moves one, the copy is taken in place of asking, and has its bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pibroch.kernels.arrays import Ints, Records
from pibroch.servers.client import EmbeddingServers

MOST_BYTES = 256 << 20
"""Of copies, those on their way included; beyond it rows come when they are moved."""


@dataclass(slots=True)
class _EarlyRequest:
    """Records that were requested early for one step.

    Attributes:
        step: that reads the rows.
        rows: rising addresses.
        answers: with the servers' names, in the order of the rows.
        records: float32 ``[rows, W]``, once the answers are there.
    """

    step: int
    rows: Ints
    answers: Sequence[tuple[str, torch.futures.Future[torch.Tensor]]]
    records: Records | None = None


@dataclass(frozen=True, slots=True)
class EarlyMatches:
    """Which of some rows were requested early.

    Attributes:
        is_early: bool, of each row.
        parts: each request that has some of them, which ones, and their places in it.
    """

    is_early: NDArray[np.bool_]
    parts: list[tuple[_EarlyRequest, Ints, Ints]]


class EarlyRows:
    """One trainer's early records of one lane. The communication thread calls it.

    Args:
        servers: that have the rows.
        steps: between a plan that names rows and the step that reads them, see
            :func:`pibroch.exchange.lookahead.oracle.early_steps`.
    """

    def __init__(self, servers: EmbeddingServers, steps: int) -> None:
        self._servers = servers
        self._steps = steps
        self._requests: deque[_EarlyRequest] = deque()

    def ask(self, step: int, rows: Ints) -> None:
        """Request the rows that a later step reads, and forget those that this step moved.

        Called after the rounds of a step's plan.
        """
        while self._requests and self._requests[0].step <= step + 1:
            self._requests.popleft()
        held = sum(len(each.rows) for each in self._requests) + len(rows)
        if len(rows) and 4 * self._servers.width * held <= MOST_BYTES:
            answers = self._servers.read_after(self._servers.rows_by_server(rows))
            self._requests.append(_EarlyRequest(step + self._steps, rows, answers))

    def find(self, rows: Ints) -> EarlyMatches:
        """Which of these rows were requested early."""
        matches = EarlyMatches(np.zeros(len(rows), np.bool_), [])
        for request in self._requests if len(rows) else ():
            places = np.minimum(np.searchsorted(request.rows, rows), len(request.rows) - 1)
            (which,) = np.nonzero(request.rows[places] == rows)
            if len(which):
                matches.is_early[which] = True
                matches.parts.append((request, which, places[which]))
        return matches

    def fill(self, matches: EarlyMatches, out: Records) -> None:
        """Write matching records to their rows of ``out`` ``[rows, .]``; waits for them.

        A narrower ``out`` gets the beginning of each record.
        """
        for request, which, places in matches.parts:
            if request.records is None:
                records = [self._servers.wait(*answer) for answer in request.answers]
                request.records = np.concatenate(records).reshape(
                    len(request.rows), self._servers.width
                )
            out[which] = request.records[places, : out.shape[1]]

    def forget(self) -> None:
        """Forget all copies: from now on rows change in ways that no plan says."""
        self._requests.clear()
