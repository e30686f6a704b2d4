"""Assignments by position in the data, so that a run that goes on there has the same ones.

An assigner remembers the batches so far. It begins anew at fixed positions, every ``RESTART_EVERY``
batches of an epoch, and who starts in between lets it see the ids since the last of these.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from concurrent.futures import Future
from functools import partial

import numpy as np

from pibroch.assignment.assigner import Assigner, Verdict
from pibroch.assignment.rows_of import RowsOf
from pibroch.collectives.task_thread import TaskThread
from pibroch.data import Loader, LoaderPosition
from pibroch.data.batch import Assigned
from pibroch.data.loader import ids_of
from pibroch.observability.trace import span
from pibroch.process import AHEAD_OF_TIME

RESTART_EVERY = 64
"""Batches: so many are looked at again at most where a run goes on."""
AHEAD = 4
"""Batches that are assigned before they are asked for."""
MOST_KEPT = 256
"""Verdicts that are kept for ranks that ask later."""


class Schedule:
    """Verdicts of an assigner about a loader's batches. Threads may ask at once.

    Args:
        loader: of any rank, on a split that every rank reads; used here alone.
        assigner: used here alone.
    """

    def __init__(self, loader: Loader, assigner: Assigner) -> None:
        self._loader = loader
        self._assigner = assigner
        self._lock = threading.Lock()
        self._next: LoaderPosition | None = None
        self._verdicts: OrderedDict[LoaderPosition, Verdict] = OrderedDict()

    def verdict(self, position: LoaderPosition) -> Verdict:
        """About the batch that begins at a position; quickest where positions follow each other."""
        with self._lock:
            if position not in self._verdicts:
                self._go_to(position)
            return self._verdicts[position]

    def after(self, position: LoaderPosition) -> LoaderPosition:
        """Where the batch that begins at a position ends."""
        return self._loader.after(position)

    def begin_of(self, position: LoaderPosition) -> LoaderPosition:
        """Where the assigner begins anew, to come to a position."""
        size = self._loader.batch_size
        since = position.sample // size % RESTART_EVERY
        return LoaderPosition(position.epoch, position.sample - since * size)

    def _go_to(self, position: LoaderPosition) -> None:
        begin = self.begin_of(position)
        at = self._next
        if at is None or not self._leads(begin, at, position):
            at = begin
        while True:
            if at == self.begin_of(at):
                self._assigner.restart()
            batch = ids_of(self._loader.split, self._loader.samples_at(at))
            self._verdicts[at] = self._assigner.assign(batch, self._loader.bounds_at(at))
            if len(self._verdicts) > MOST_KEPT:
                self._verdicts.popitem(last=False)
            self._next = self._loader.after(at)
            if at == position:
                return
            at = self._next

    def _leads(self, begin: LoaderPosition, at: LoaderPosition, position: LoaderPosition) -> bool:
        """Whether batches from ``begin`` on come to ``at``, and then to ``position``."""
        is_between = begin.sample <= at.sample <= position.sample
        is_aligned = (at.sample - begin.sample) % self._loader.batch_size == 0
        return at.epoch == begin.epoch and is_between and is_aligned


class RankSchedule:
    """One rank's part of a schedule, a few batches ahead on a thread of its own.

    One thread asks it.

    Args:
        rank: whose samples are wanted.
        schedule: over a loader of its own.
        rows: by which samples are assigned, for who does it in another process.
    """

    def __init__(self, rank: int, schedule: Schedule, rows: RowsOf | None = None) -> None:
        self.rows = rows
        self._rank = rank
        self._schedule = schedule
        self._thread: TaskThread | None = None
        self._coming: deque[tuple[LoaderPosition, Future[Assigned]]] = deque()

    def at(self, position: LoaderPosition) -> Assigned:
        """See :class:`pibroch.data.loader.Assignment`."""
        self._thread = self._thread or TaskThread("pibroch-assignment", nice=AHEAD_OF_TIME)
        if not self._coming or self._coming[0][0] != position:
            self._coming.clear()
        following = self._coming[-1][0] if self._coming else None
        while len(self._coming) <= AHEAD:
            following = position if following is None else self._schedule.after(following)
            task = partial(assigned_at, self._schedule, following, self._rank)
            self._coming.append((following, self._thread.submit(task)))
        with span("wait for assignment"):
            return self._coming.popleft()[1].result()


class RankPart:
    """One rank's part of a schedule, on the thread that asks.

    Args:
        rank: whose samples are wanted.
        schedule: that ranks share.
    """

    def __init__(self, rank: int, schedule: Schedule) -> None:
        self._rank = rank
        self._schedule = schedule

    def at(self, position: LoaderPosition) -> Assigned:
        """See :class:`pibroch.data.loader.Assignment`."""
        return assigned_at(self._schedule, position, self._rank)


def assigned_at(schedule: Schedule, position: LoaderPosition, rank: int) -> Assigned:
    """One rank's samples of the batch that begins at a position."""
    with span("assign"):
        verdict = schedule.verdict(position)
    places = np.flatnonzero(verdict.ranks == rank)
    return Assigned(places, verdict.transfers, verdict.transfers_given)
