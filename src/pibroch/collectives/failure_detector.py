"""Ranks watch one another through links to rank 0.

So a failure has a name, a step and a reason on all of them.

A collective alone knows only that a connection broke, or nothing at all when it waits for a third
rank. Rank 0 hears of each failure first (a rank says why it fails; the end of its link says that it
died) and tells all others. Without rank 0's link the others know that it is rank 0 that failed.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

import msgspec

from pibroch.collectives.peer_link import (
    Ended,
    Message,
    PeerLink,
    Present,
    RankFailure,
    RollCall,
    Step,
)
from pibroch.collectives.ranks import Channel
from pibroch.errors import PibrochError, RankFailedError, TrainingError
from pibroch.wire.ranks import admit_streams, agreed_key, introduce, key_of_run, published_key
from pibroch.wire.sockets import listen

REASON_TIMEOUT_S = 5.0
"""How long a rank whose collective failed waits to hear why."""
STUCK_S = 3.0
"""How long after a failure a rank may take to leave what it does.

One that waits in vain for a living rank never does.
"""
LOST_HOST_STUCK_S = 0.1
"""As ``STUCK_S``, after the loss of a host: nobody ends the connections to it, so who waits for it
does so in vain, however long.
"""
STOPPED_REASON_S = 0.5
"""How long a rank that was told to stop looks for a failure as the cause.

Launchers stop all ranks when one fails.
"""
ROLL_S = 5.0
"""How long a rank may take to answer when the others want to know who is there.

One that is stopped, or hangs, does not.
"""
_OPEN_TIMEOUT_S = 60.0
_LONGEST_REASON = 1000

OnStuck = Callable[[RankFailedError], None]


class FailureDetector:
    """This rank's end of the links, with a thread that listens to them.

    Open it with :meth:`over`; close it.

    The step that a rank is in costs a line of a dozen bytes to rank 0, and rank 0 one to each other
    rank.

    Args:
        rank: of this process.
        links: by rank: to all others on rank 0, to rank 0 elsewhere.
        on_stuck: called, on the detector's thread, when a rank failed and this process does not
            come back to close it.
    """

    def __init__(
        self, rank: int, links: dict[int, PeerLink], on_stuck: OnStuck | None = None
    ) -> None:
        self.rank = rank
        self._links = links
        self._on_stuck = on_stuck
        self._steps: dict[int, int] = {}
        self._ended: set[int] = set()
        self._there: set[int] = set()  # those that have answered since the roll was called
        self._roll = threading.Condition()
        self._failure: RankFailure | None = None
        self._telling = threading.Lock()
        self._has_failure = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(
            target=self._listen, name="pibroch-failure-detector", daemon=True
        )
        self._thread.start()

    @classmethod
    def over(cls, channel: Channel, on_stuck: OnStuck | None = None) -> Self:
        """Open the links of all ranks of a channel; every rank calls it.

        Blocks, for a minute at most.

        Rank 0 listens on the interface of ``MASTER_ADDR``, or on loopback, and admits who knows the
        run's key.

        Raises:
            AuthenticationError: when somebody else is in the place of rank 0.
            TrainingError: when the ranks do not find each other.
        """
        rank = channel.ranks.rank
        size = channel.ranks.world_size
        own_key = key_of_run()
        try:
            if rank == 0:
                with listen() as server:
                    published = published_key(own_key)
                    channel.gather([*server.getsockname()[:2], published])
                    deadline = time.monotonic() + _OPEN_TIMEOUT_S
                    key = agreed_key(own_key, published)
                    expected = [(other, 0) for other in range(1, size)]
                    callers = admit_streams([server], key, rank, expected, deadline)
                    links = {other: PeerLink(link) for (other, _), link in callers.items()}
            else:
                host, port, published = channel.gather(None)[0]
                link = socket.create_connection((host, port), _OPEN_TIMEOUT_S)
                introduce(link, agreed_key(own_key, published), rank, 0)
                links = {0: PeerLink(link)}
            channel.barrier()  # nothing comes with the greeting
        except OSError as error:
            raise TrainingError(
                f"no link between rank {rank} and"
                f" {'the others' if rank == 0 else 'rank 0'}: {error}",
                "TCP between all ranks",
                "open the firewall, or set MASTER_ADDR to an address that all reach",
            ) from error
        return cls(rank, links, on_stuck)

    def enter(self, step: int) -> None:
        """Say that this rank is in a step from now on."""
        self._steps[self.rank] = step
        for link in self._links.values():
            link.send(Step(step))

    def explain(self, error: Exception) -> Exception:
        """The error to raise in place of a collective's: the failure that broke it.

        It waits some seconds to learn of one.

        Without news the ranks call the roll: one that lives but does not answer is the one that was
        waited for in vain.
        """
        failure = self.failure(REASON_TIMEOUT_S)
        if failure is None and self._call_roll() and self.rank != 0:
            # rank 0 is there, and asks the others
            self._has_failure.wait(REASON_TIMEOUT_S + ROLL_S)
        failure = self.failure()
        if failure is not None:
            return failure.error()
        return TrainingError(
            f"a collective that failed in step {self._steps.get(self.rank)}: {error}",
            "all ranks, at the same step",
            "look at the other ranks' logs; a training run goes on with --resume",
        )

    def failure(self, timeout_s: float = 0.0) -> RankFailure | None:
        """The first failure of another rank, waiting for one; ``None`` when there is none."""
        self._has_failure.wait(timeout_s)
        return None if self._failure is None or self._failure.rank == self.rank else self._failure

    def _call_roll(self) -> bool:
        """Ask the ranks to which this one has a link whether they are there.

        All others hear who is not. Returns whether all are.
        """
        peers = sorted(set(self._links) - self._ended)
        with self._roll:
            self._there.clear()
        for rank in peers:
            self._links[rank].send(RollCall())
        with self._roll:
            self._roll.wait_for(lambda: self._there.issuperset(peers), ROLL_S)
            silent = [rank for rank in peers if rank not in self._there]
        for rank in silent[:1]:
            reason = (
                f"it was waited for in vain, and has not answered for {ROLL_S:g} s: it is stopped,"
                " or hangs"
            )
            self._tell(RankFailure(rank, self._steps.get(rank), reason, is_loss=True))
        return not silent

    def report(self, error: BaseException) -> RankFailedError | None:
        """Tell the others why this rank ends, unless it is they who told it.

        Returns:
            For an ``error`` that is no Exception, as a signal's: the failure of another rank that
            led to it, if there is one.
        """
        stopped = not isinstance(error, Exception)
        failure = self.failure(STOPPED_REASON_S if stopped else 0.0)
        if failure is not None:
            return failure.error() if stopped and not failure.stopped else None
        exit_code = error.exit_code if isinstance(error, PibrochError) else 1
        reason = (
            "it was told to stop"
            if stopped
            else f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
        )
        # a launcher that wants the run to end ends all ranks itself
        is_loss = stopped or (isinstance(error, PibrochError) and error.is_loss)
        self._tell(
            RankFailure(self.rank, self._steps.get(self.rank), reason, exit_code, stopped, is_loss)
        )
        return None

    def close(self) -> None:
        """Say goodbye and end the thread; blocks for a second at most.

        From then on it learns nothing about other ranks.
        """
        for link in self._links.values():
            link.send(Ended())
        self._wake.close()
        self._thread.join(2.0)
        for link in self._links.values():
            link.close()
        self._woken.close()

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            # when to give up on the other threads, once there was a failure
            stuck_at: float | None = None
            while self._on_stuck is not None or stuck_at is None:
                timeout_s = None if stuck_at is None else max(0.0, stuck_at - time.monotonic())
                ready = selector.select(timeout_s)
                for key, _ in ready:
                    if key.fileobj is self._woken:
                        return
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)
                if stuck_at is None and self._has_failure.is_set():
                    failure = self.failure()
                    is_host_lost = failure is not None and failure.is_host_lost
                    stuck_at = time.monotonic() + (LOST_HOST_STUCK_S if is_host_lost else STUCK_S)
                elif stuck_at is not None and time.monotonic() >= stuck_at:
                    return self._give_up()

    def _hear(self, rank: int) -> bool:
        """Take what a link brings; false when it has ended."""
        try:
            messages = self._links[rank].receive()
            for message in messages or []:
                self._take(rank, message)
        except ValueError:
            messages = None
        if messages is None and rank not in self._ended:
            is_host_lost = self._links[rank].is_host_lost
            reason = "its host was lost" if is_host_lost else "its process ended without a word"
            step = self._steps.get(rank)
            self._tell(RankFailure(rank, step, reason, is_loss=True, is_host_lost=is_host_lost))
        return messages is not None

    def _take(self, rank: int, message: Message) -> None:
        match message:
            case Step(step=step):
                self._steps[rank] = step
            case RankFailure():
                of = message.rank if rank == 0 else rank
                self._tell(msgspec.structs.replace(message, rank=of))
            case RollCall():
                self._links[rank].send(Present())
            case Present():
                with self._roll:
                    self._there.add(rank)
                    self._roll.notify_all()
            case Ended():
                self._ended.add(rank)

    def _tell(self, failure: RankFailure) -> None:
        """Keep the first failure, and tell those who hear of it from here."""
        with self._telling:
            if self._failure is not None:
                return
            self._failure = failure
        self._has_failure.set()
        for rank, link in self._links.items():
            if rank != failure.rank and (self.rank == 0 or failure.rank == self.rank):
                link.send(failure)

    def _give_up(self) -> None:
        failure = self.failure()
        if failure is not None and self._on_stuck is not None:
            self._on_stuck(failure.error())
