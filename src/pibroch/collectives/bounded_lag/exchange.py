"""An all-to-all with bounded lag: a window says what is due, a transport does it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np

from pibroch.collectives.bounded_lag.base import LaggedTransport, RankParts, Slot
from pibroch.collectives.bounded_lag.shared_memory import SharedMemoryTransport
from pibroch.collectives.bounded_lag.window import Complete, Instruction, LagWindow
from pibroch.errors import PibrochError


class LaggedAllToAll:
    """The requests of one group, from any thread.

    Memory belongs to a request until it was waited for.

    After a failure every later call gets the same error: the ranks do not agree any more on what
    was exchanged.

    Args:
        transport: of this exchange alone, with the slots of its window.
        bound: k.

    Attributes:
        window: of the requests.
    """

    def __init__(self, transport: LaggedTransport, bound: int) -> None:
        self.window = LagWindow(bound)
        assert transport.num_slots == self.window.num_slots
        self.transport = transport
        # one that is no part of a mixed one reaches all: a kernel may wait for them without Python
        # looking at the network
        self._shared = transport if isinstance(transport, SharedMemoryTransport) else None
        self._outstanding: deque[RankParts] = deque()
        size = transport.world_size
        self._equal = [
            (np.zeros(size, np.int64), np.zeros(size, np.int64))
            for _ in range(self.window.num_slots)
        ]
        self._lock = threading.RLock()
        self._failure: PibrochError | None = None

    def initiate(self, going: RankParts, coming: RankParts) -> int:
        """Begin a request, after those that the bound wants out of the way; returns its number.

        Args:
            going: what each rank gets; not looked at any more when this returns.
            coming: filled by :meth:`wait`, this rank's own part at once.
        """
        with self._lock:
            self._check()
            instructions = self.window.initiate()
            # before it is carried out: with k = 0 it completes in there, and the oldest is this one
            self._outstanding.append(coming)
            self._carry_out(instructions, partial(self._put, going))
            return self.window.num_initiated - 1

    def initiate_equal(self, source: int, target: int, nbytes: int, kept: object) -> int | None:
        """:meth:`initiate` of equal parts; ``None``, and nothing done, where it takes the long way.

        Args:
            source: address of the parts that go out, contiguous in rank order.
            target: of those that come.
            nbytes: of each part.
            kept: what keeps the target alive.
        """
        shared = self._shared
        if shared is None or nbytes > shared.slot_bytes:
            return None
        with self._lock:
            self._check()
            number = self.window.num_initiated
            # a slot's own arrays: they are free again when the window hands the slot out again
            addresses, sizes = self._equal[number % self.window.num_slots]
            coming = RankParts(addresses, sizes, kept)
            instructions = self.window.initiate()
            self._outstanding.append(coming)
            self._carry_out(
                instructions, lambda slot: shared.put_equal(slot, source, target, nbytes, coming)
            )
            return number

    def wait(self, number: int) -> None:
        """Complete everything up to and including a request."""
        with self._lock:
            if number >= self.window.num_completed:
                self._check()
                self._carry_out(self.window.wait(number))

    def is_complete(self, number: int) -> bool:
        """Whether :meth:`wait` would return at once; then it is done here."""
        with self._lock:
            self._check()
            has_all = all(
                self.transport.has_arrived(Slot(0, each), p)
                for each in range(self.window.num_completed, number + 1)
                for p in self.transport.peers
            )
            if has_all:
                self.wait(number)
            return has_all

    def exchange(self, source: int, target: int, nbytes: int) -> bool:
        """Make a request of equal parts and wait for it.

        Returns false, with nothing done, where it must take the long way.

        Args:
            source: address of the parts that go out, contiguous in rank order.
            target: of those that come.
            nbytes: of each part.
        """
        shared = self._shared
        window = self.window
        if shared is None or nbytes > shared.slot_bytes:
            return False
        with self._lock:
            self._check()
            # in order, as others do it: the oldest first
            if window.num_outstanding:
                self._carry_out(window.wait(window.num_initiated - 1))
            number = window.initiate_alone()
            try:
                shared.exchange(Slot(0, number), source, target, nbytes)
            except PibrochError as error:
                # for good: who does not know what was exchanged must not go on
                self._failure = error
                raise
        return True

    def close(self) -> None:
        """Give the transport back; requests that are outstanding stay incomplete."""
        self.transport.close()

    def _put(self, going: RankParts, slot: Slot) -> None:
        self.transport.put_beside(
            slot, going, int(self._outstanding[-1].addresses[self.transport.rank])
        )

    def _carry_out(
        self,
        instructions: list[Instruction] | list[Complete],
        put: Callable[[Slot], None] | None = None,
    ) -> None:
        try:
            for each in instructions:
                if isinstance(each, Complete):
                    self.transport.take(Slot(0, each.number), self._outstanding[0])
                    self._outstanding.popleft()
                elif put is not None:
                    put(Slot(0, each.number))
        except PibrochError as error:
            self._failure = error
            raise

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
