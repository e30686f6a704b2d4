"""Records that were asked of servers some steps before a plan moves them.

A server that stalls is ridden out meanwhile.

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
    """What was asked for one step.

    Attributes:
        step: that reads the rows.
        rows: rising addresses.
        answers: by the servers' names, in the order of the rows.
        records: float32 ``[rows, W]``, once they have come.
    """

    step: int
    rows: Ints
    answers: Sequence[tuple[str, torch.futures.Future[torch.Tensor]]]
    records: Records | None = None


@dataclass(frozen=True, slots=True)
class FoundEarly:
    """Which of some rows were asked for before.

    Attributes:
        is_early: bool, of each row.
        parts: of each step that has some, which of the rows, and their places there.
    """

    is_early: NDArray[np.bool_]
    parts: list[tuple[_EarlyRequest, Ints, Ints]]


class EarlyRows:
    """One trainer's, of one lane. The communication thread calls it.

    Args:
        servers: that have the rows.
        steps: between a plan that names them and the step that reads them, see
            :func:`pibroch.exchange.lookahead.oracle.early_steps`.
    """

    def __init__(self, servers: EmbeddingServers, steps: int) -> None:
        self._servers = servers
        self._steps = steps
        self._asked: deque[_EarlyRequest] = deque()

    def ask(self, step: int, rows: Ints) -> None:
        """After the rounds of a step's plan.

        Ask for what a later step reads, and forget what this one was the last to move.
        """
        while self._asked and self._asked[0].step <= step + 1:
            self._asked.popleft()
        held = sum(len(each.rows) for each in self._asked) + len(rows)
        if len(rows) and 4 * self._servers.width * held <= MOST_BYTES:
            answers = self._servers.read_after(self._servers.rows_by_server(rows))
            self._asked.append(_EarlyRequest(step + self._steps, rows, answers))

    def find(self, rows: Ints) -> FoundEarly:
        """Which of these rows are, or will be, here."""
        found = FoundEarly(np.zeros(len(rows), np.bool_), [])
        for asked in self._asked if len(rows) else ():
            places = np.minimum(np.searchsorted(asked.rows, rows), len(asked.rows) - 1)
            (which,) = np.nonzero(asked.rows[places] == rows)
            if len(which):
                found.is_early[which] = True
                found.parts.append((asked, which, places[which]))
        return found

    def fill(self, found: FoundEarly, out: Records) -> None:
        """Write the records, or what begins them, of the rows that were found to their rows of ``out`` ``[rows, .]``; waits."""
        for asked, which, places in found.parts:
            if asked.records is None:
                came = [self._servers.wait(*answer) for answer in asked.answers]
                asked.records = np.concatenate(came).reshape(len(asked.rows), self._servers.width)
            out[which] = asked.records[places, : out.shape[1]]

    def forget(self) -> None:
        """Rows change from now on as no plan has said."""
        self._asked.clear()
