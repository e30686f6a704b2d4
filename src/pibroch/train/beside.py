"""What is written beside training, of rows that changed, while the steps go on.

All ranks copy the same step, when it is due: the rows that were updated since the last copy, under
marks of its own, and whatever else is to be written. Another thread writes the copy, with a channel
of its own to the other ranks' threads. What becomes of it is known when the next one is due: if
nothing was written, its rows belong to the next one.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from pibroch.collectives import Channel
from pibroch.collectives.task_thread import TaskThread
from pibroch.collectives.world import CONTROL_TIMEOUT_S
from pibroch.embedding import Shard
from pibroch.errors import StorageError
from pibroch.observability.trace import span
from pibroch.process import AHEAD_OF_TIME
from pibroch.state.cuts import cut_all
from pibroch.state.manifest import Progress
from pibroch.train.pace import Pace

if TYPE_CHECKING:
    from pibroch.train.session import Session

logger = logging.getLogger(__name__)
Copied = TypeVar("Copied")
Written = TypeVar("Written")


class BesideTraining(ABC, Generic[Copied, Written]):
    """Copies, at most one of them under way; rank 0's clock counts.

    A kind of them says what is written, and where. Every rank has one; all are called alike.

    Args:
        session: what is trained; rows count as changed from now on.
        seconds: between two; 0 for none.

    Attributes:
        marks: the name of its marks of rows.
        kind: what it writes, for messages.
        with_state: whether it wants rows with optimizer state, and not weights alone.
        count: copies made so far by this process.
        seconds_taken: from the thread that trains.
    """

    marks: ClassVar[str]
    kind: ClassVar[str]
    with_state: ClassVar[bool]

    def __init__(self, session: Session, seconds: float) -> None:
        self.count = 0
        self.seconds_taken = 0.0
        self._session = session
        self._control = session.world.control
        self._is_on = seconds > 0
        self._channel: Channel | None = None
        self._thread: TaskThread | None = None
        self._writing: Future[Written | None] | None = None
        self._pace = Pace(self._control, seconds)
        self.restart()

    @property
    def wants_all(self) -> bool:
        """Whether the next copy is to have all rows, not only those that changed."""
        return False

    @abstractmethod
    def copy(self, progress: Progress) -> Copied:
        """What is written besides rows, copied from the session; on the thread that trains."""

    @abstractmethod
    def write(
        self, cuts: Sequence[Shard], copied: Copied, step: int, channel: Channel
    ) -> Written | None:
        """Write a copy with all ranks; ``None`` where it cannot be written. On the other thread.

        Raises:
            StorageError: (on all ranks) when the disk refuses.
        """

    @abstractmethod
    def note_written(self, written: Written) -> None:
        """The last copy was written; on the thread that trains."""

    def restart(self) -> None:
        """Rows and time count from now on; while nothing is under way."""
        self._pace.restart()
        for shard in self._shards():
            shard.start_marks(self.marks)

    def mark_all(self) -> None:
        """The next copy has all rows: it is not known which of them the last one had."""
        for shard in self._shards():
            shard.end_cut(self.marks, is_saved=True)
            shard.mark_all(self.marks)

    def after_step(self, step: int, progress: Callable[[], Progress]) -> bool:
        """Make a copy of this step, if it is due; every rank calls it after each step.

        Returns whether one was made.

        Args:
            step: that was trained.
            progress: gives where the run is.

        Raises:
            TrainingError: when a parameter is NaN or infinite.
            RankFailedError: when a rank was lost.
        """
        if not self._is_on:
            return False
        start = time.perf_counter()
        is_idle = self._writing is None or self._writing.done()
        is_due = self._pace.is_due(step, is_idle)
        if is_due:
            self.write_now(progress())
        self.seconds_taken += time.perf_counter() - start
        return is_due

    def write_now(self, progress: Progress) -> None:
        """Make a copy of this step, due or not. Waits for the one before."""
        with span("cut"):
            self._settle()
            self._begin(progress)
        self._pace.restart()

    def drain(self) -> None:
        """Wait until what was begun is on the disk.

        Every rank calls it, before files are removed on which it rests.
        """
        if self._writing is not None:
            self._writing.exception()
            self._settle()

    def _shards(self) -> Sequence[Shard]:
        """Whose rows are marked: all of this rank, as they are after the last step."""
        if not self._is_on:
            return ()
        exchange = self._session.embeddings.exchange
        exchange.flush()
        return exchange.shards

    def _settle(self) -> None:
        """What became of the last one, which ends before."""
        if self._writing is None:
            return
        written = self._writing.result()
        self._writing = None
        for shard in self._session.embeddings.exchange.shards:
            shard.end_cut(self.marks, written is not None)
        if written is not None:
            self.note_written(written)

    def _begin(self, progress: Progress) -> None:
        shards = self._shards()
        wants_all = self.wants_all
        if wants_all:
            for shard in shards:
                shard.mark_all(self.marks)
        copies = cut_all(shards, self.marks, self._control, self._cut)
        if copies is None:
            if not wants_all:
                self._warn(progress.step, "no memory for its rows")
                return
            logger.info("training waits for the %s: no memory for all rows", self.kind)
        copied = self.copy(progress)
        if self._thread is None:
            self._thread = TaskThread(f"pibroch-{self.marks}", nice=AHEAD_OF_TIME)
            self._channel = self._session.world.ranks.patient(CONTROL_TIMEOUT_S).open_channel()
        self.count += 1
        rows = shards if copies is None else copies
        self._writing = self._thread.submit(partial(self._write, rows, copied, progress.step))
        if copies is None:
            self.drain()
            for shard in () if self.wants_all else shards:
                shard.start_marks(self.marks)

    def _cut(self, shard: Shard) -> Shard | None:
        return shard.cut(self.marks, self.with_state)

    def _write(self, cuts: Sequence[Shard], copied: Copied, step: int) -> Written | None:
        """Write; ``None``, with a warning, where the disk refuses. On a thread of its own."""
        assert self._channel is not None, "opened before the thread had anything to do"
        try:
            return self.write(cuts, copied, step, self._channel)
        except StorageError as error:
            self._warn(step, error.got)
            return None

    def _warn(self, step: int, why: str) -> None:
        logger.warning("no %s at step %d: %s", self.kind, step, why)
