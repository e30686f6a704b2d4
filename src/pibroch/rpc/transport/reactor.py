"""The one thread that talks: an epoll loop over sockets, functions handed to it, and timers.

It never polls.

At the end of each round it may run code of users that is known to be short. Should that take long
after all, a deputy takes the loop over, and the thread that was held up ends when it is done.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from pibroch.rpc.policies import POLICIES

log = logging.getLogger(__name__)

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
_SHUTDOWN_TIMEOUT_S = 10.0
# where the next event is due it is looked for this long before sleeping, as waking up takes longer
SPIN_S = 0.0004
_PATIENCE_S = 0.002
_QUIET_ROUNDS = 10


class Reactor:
    """Runs handlers of ready sockets, functions of other threads and timers, all on one thread called ``name``.

    While users' code runs on the loop, the deputy looks every ``_PATIENCE_S`` if it is still the
    same; otherwise it sleeps.
    """

    def __init__(self, name: str) -> None:
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake_fd, READ)
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._soon: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._completions: deque[Callable[[], None]] = deque()
        self._role = threading.Lock()  # for handing the loop over
        self._lent_at = 0.0  # since when users' code runs on the loop; 0.0 when it does not
        self._num_lent = 0
        self._deputy_sleeps = False
        self._deputy_bed = threading.Lock()
        self._deputy_bed.acquire()
        self._stopping = False
        self._is_bulk = False  # what happened in this round
        self.spin_s = SPIN_S if POLICIES.spin and len(os.sched_getaffinity(0)) > 1 else 0.0
        # its ``is_reading`` is set in a thread that reads its own answer (``stream.py``)
        self.reader = threading.local()
        self._name = name
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        if POLICIES.deputy:
            self._appoint_deputy()

    def is_here(self) -> bool:
        """Whether the caller runs on the loop."""
        return threading.current_thread() is self._thread

    def is_reading(self) -> bool:
        """Whether the caller handles frames while it waits for its own answer, in the loop's stead."""
        return getattr(self.reader, "is_reading", False)

    def call_soon(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the loop.

        Takes no lock: it may be called from anywhere, the garbage collector included.
        """
        self._soon.append(function)
        self._wake()

    def call_at(self, when: float, function: Callable[[], None]) -> None:
        """Run ``function`` on the loop at ``when`` (``time.monotonic()``).

        It cannot be taken back.
        """
        timer = (when, next(self._order), function)
        with self._role:  # else the deputy may take over just now, and sleep for too long
            if self.is_here():
                heapq.heappush(self._timers, timer)
                return
        self.call_soon(lambda: heapq.heappush(self._timers, timer))

    def complete(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the loop, at the end of a round.

        It may run code of users, best of all short one.
        """
        self._completions.append(function)
        # after appending: whoever takes the loop over later looks here first
        if not self.is_here():
            self._wake()

    def expect_bulk(self) -> None:
        """Call it from a handler when what comes next is more of something long.

        The loop sleeps until then.
        """
        self._is_bulk = True

    def step_aside(self) -> None:
        """If the caller runs on the loop.

        Let another thread go on in its stead, as this one is about to wait.

        Raises:
            RuntimeError: when it may not wait here.
        """
        with self._role:  # the deputy may take over just now
            if not self.is_here():
                return
            if not self._lent_at:
                raise RuntimeError(
                    "a handler of the network thread must not wait for other workers"
                )
            self._lent_at = 0.0
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        """Call ``handler(events)`` whenever ``fd`` is ready."""
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        """Watch ``fd`` for other events; nothing happens when it is not watched any more."""
        try:
            self._epoll.modify(fd, events)
        except (FileNotFoundError, ValueError, OSError):
            log.debug("descriptor %d is not watched any more", fd)

    def forget(self, fd: int) -> None:
        """Stop watching ``fd``; call it before the descriptor is closed."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def stop(self) -> None:
        """End the thread; what is left in its queue still runs."""
        self._stopping = True
        self._wake()
        self._wake_deputy()
        with self._role:
            thread = self._thread
        if not self.is_here():
            thread.join(_SHUTDOWN_TIMEOUT_S)
        self._epoll.close()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        """Close what others may still write to after the end.

        Its number could be that of somebody else's pipe by then.
        """
        with contextlib.suppress(AttributeError):  # there was no descriptor left for it
            close(self._wake_fd)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _wake_deputy(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was woken already
            self._deputy_bed.release()

    def _run(self) -> None:
        me = threading.current_thread()
        self._run_completions(me)
        last_event = spin_until = 0.0
        spin_s = self.spin_s
        while not self._stopping and self._thread is me:
            ready = self._epoll.poll(0)
            if not ready and time.monotonic() < spin_until and not self._soon:
                os.sched_yield()
                continue
            if not ready:
                ready = self._epoll.poll(self._patience())
                spin_until = 0.0
            now = time.monotonic()
            for fd, events in ready:
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                    continue
                handler = self._handlers.get(fd)
                if handler is not None:
                    self._guarded(handler, events)
            self._run_soon()
            if ready and spin_s and not self._is_bulk:
                spin_until = now + spin_s if now - last_event < 2 * SPIN_S else 0.0
                last_event = now
            self._is_bulk = False
            self._run_timers()
            self._run_completions(me)
        if self._thread is me:
            self._run_soon()
            self._run_completions(me)

    def _run_completions(self, me: threading.Thread) -> None:
        while self._completions and self._thread is me:
            # before it is lent: the deputy takes from there, too
            function = self._completions.popleft()
            self._lent_at = time.monotonic()
            self._num_lent += 1
            if self._deputy_sleeps:
                self._deputy_sleeps = False
                self._wake_deputy()
            self._guarded(function)
            with self._role:
                if self._thread is me:
                    self._lent_at = 0.0

    def _appoint_deputy(self) -> None:
        threading.Thread(target=self._stand_by, name=f"{self._name}-deputy", daemon=True).start()

    def _stand_by(self) -> None:
        """The deputy: sleeps while no users' code runs on the loop, and takes the loop over when it runs for long."""
        num_seen = self._num_lent
        num_quiet = 0
        while not self._stopping:
            lent_at = self._lent_at
            if lent_at and time.monotonic() - lent_at > _PATIENCE_S and self._take_over(lent_at):
                self._appoint_deputy()
                self._run()
                return
            num_quiet = 0 if lent_at or self._num_lent != num_seen else num_quiet + 1
            num_seen = self._num_lent
            if num_quiet > _QUIET_ROUNDS:
                self._deputy_sleeps = True
                # just then: the loop may not have seen that it sleeps
                if self._lent_at or self._num_lent != num_seen:
                    self._deputy_bed.acquire(timeout=_PATIENCE_S)
                else:
                    self._deputy_bed.acquire()
            else:
                self._deputy_bed.acquire(timeout=_PATIENCE_S)

    def _take_over(self, lent_at: float) -> bool:
        with self._role:
            if self._lent_at != lent_at:
                return False
            self._lent_at = 0.0
            self._thread = threading.current_thread()
            return True

    def _patience(self) -> float | None:
        """How long to wait for sockets, in seconds; ``None`` for ever."""
        if self._soon or self._completions:
            return 0
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _run_soon(self) -> None:
        for _ in range(len(self._soon)):
            self._guarded(self._soon.popleft())

    def _run_timers(self) -> None:
        while self._timers and self._timers[0][0] <= time.monotonic():
            self._guarded(heapq.heappop(self._timers)[2])

    @staticmethod
    def _guarded(function: Callable[..., None], *args: int) -> None:
        """One handler's mistake must not end the conversation of all others."""
        try:
            function(*args)
        except Exception:
            log.exception("a handler of the network thread failed")
