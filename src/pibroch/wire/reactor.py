"""The event loop: one thread with epoll over sockets, functions from other threads, and timers.

A loop without a thread is turned by whoever holds it: a thread that waits (``turn``), or asyncio's
loop (``attach``).

At the end of each round the loop may run users' functions that were short lately. If one takes long
after all, a standby thread takes the loop over: from then on it is the loop's thread, and the
thread that was held up ends when its function returns.

Threads: ``call_soon`` and ``complete`` only append to a deque and write to an eventfd, so any
thread may call them, also inside the garbage collector. Sockets, timers and handlers belong to the
loop's thread alone. ``_handover`` guards the change of that thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import math
import os
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Self

log = logging.getLogger(__name__)

READ = 1  # as epoll has them
WRITE = 4
_SHUTDOWN_TIMEOUT_S = 10.0
_FAILED = "a handler of the network thread failed"
_WAKE_BYTES = 4096
# when the next event is due, the loop polls for so long before it sleeps: waking up takes longer
SPIN_S = 0.0004
_TAKE_OVER_AFTER_S = 0.002
_QUIET_ROUNDS = 10  # without users' code, after which the standby thread sleeps until it is woken


class _Selection:
    """What a loop needs of epoll, on systems that have none."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._fds: set[int] = set()

    def register(self, fd: int, events: int) -> None:
        self._fds.add(fd)
        self.modify(fd, events)

    def modify(self, fd: int, events: int) -> None:
        if fd not in self._fds:
            raise FileNotFoundError(f"descriptor {fd} is not watched")
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)
        if events:
            reads = selectors.EVENT_READ if events & READ else 0
            self._selector.register(fd, reads | (selectors.EVENT_WRITE if events & WRITE else 0))

    def unregister(self, fd: int) -> None:
        self.modify(fd, 0)
        self._fds.discard(fd)

    def poll(self, timeout_s: float | None = None) -> list[tuple[int, int]]:
        return [
            (
                key.fd,
                (READ if events & selectors.EVENT_READ else 0)
                | (WRITE if events & selectors.EVENT_WRITE else 0),
            )
            for key, events in self._selector.select(timeout_s)
        ]

    def close(self) -> None:
        self._selector.close()


class _InAsyncio:
    """What a loop needs of epoll, where asyncio's loop watches the sockets.

    Each socket itself, as an epoll inside another costs 2 to 3 us of CPU an event.

    Args:
        loop: asyncio's, in whose thread this is made.
        on_ready: called with a descriptor and its event.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_ready: Callable[[int, int], None]
    ) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._wanted: dict[int, int] = {}
        self._watched: dict[int, int] = {}
        self._on_ready = on_ready

    def modify(self, fd: int, events: int) -> None:
        self._wanted[fd] = events
        if threading.get_ident() == self._thread:
            self._follow(fd)
        else:  # which finds the latest change
            self._loop.call_soon_threadsafe(self._follow, fd)

    register = modify

    def unregister(self, fd: int) -> None:
        self.modify(fd, 0)

    def _follow(self, fd: int) -> None:
        wanted = self._wanted[fd]
        changed = wanted ^ self._watched.pop(fd, 0)
        if wanted:
            self._watched[fd] = wanted
        if changed & READ:
            if wanted & READ:
                self._loop.add_reader(fd, self._on_ready, fd, READ)
            else:
                self._loop.remove_reader(fd)
        if changed & WRITE:
            if wanted & WRITE:
                self._loop.add_writer(fd, self._on_ready, fd, WRITE)
            else:
                self._loop.remove_writer(fd)


class Reactor:
    """Runs handlers of ready sockets, functions of other threads and timers on one thread.

    While users' code runs on the loop, the standby thread checks every ``_TAKE_OVER_AFTER_S``
    whether it is still the same call; otherwise it sleeps.

    Args:
        name: of the thread.
        spin: whether to poll for a moment for the next event when it is due.
    """

    def __init__(self, name: str, *, spin: bool = True) -> None:
        self._epoll = select.epoll() if hasattr(select, "epoll") else _Selection()
        # where there is no eventfd
        self._wake_pair = None if hasattr(os, "eventfd") else socket.socketpair()
        if self._wake_pair is None:
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        else:
            self._wake_fd = self._wake_pair[0].fileno()
        self._poller: select.epoll | _Selection | _InAsyncio = self._epoll
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._events: dict[int, int] = {self._wake_fd: READ}
        self._poller.register(self._wake_fd, READ)
        self._soon: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._completions: deque[Callable[[], None]] = deque()
        self._handover = threading.Lock()
        self._user_code_since = 0.0  # when users' code began to run on the loop; 0.0: none runs
        self._num_user_calls = 0
        self._standby_sleeps = False
        self._standby_wakeup = threading.Lock()  # held while the standby thread is to sleep
        self._standby_wakeup.acquire()
        self._stopping = False
        self._is_bulk = False  # whether this round was about something long
        self.spin_s = SPIN_S if spin and len(os.sched_getaffinity(0)) > 1 else 0.0
        # ``is_reading`` of it is set in a thread that reads its own answer (``stream.py``)
        self.reader = threading.local()
        self._name = name
        self._has_standby = False  # it is started when users' code first runs on the loop
        self._asyncio: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the loop's thread."""
        self._thread.start()

    @contextlib.contextmanager
    def turned_here(self) -> Iterator[Self]:
        """Within, the calling thread is the loop's, which ``turn`` runs."""
        self._thread = threading.current_thread()
        try:
            yield self
        finally:
            self.stop()
            self._close_wakeup(os.close)  # now, as no other thread may write to it

    def turn(self, timeout_s: float | None) -> None:
        """One round, in the calling thread: wait so long for something to do, and do it."""
        waits = [s for s in (self._poll_timeout_s(), timeout_s) if s is not None]
        self._round(self._epoll.poll(min(waits, default=None)))

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have asyncio's loop, in whose thread this is called, turn this one from now on."""
        with self._handover:
            before = self._thread
            self._thread = threading.current_thread()
        if before.is_alive() and before is not self._thread:
            self._wake()
            before.join(_SHUTDOWN_TIMEOUT_S)
        self._asyncio = loop
        self._poll_by(_InAsyncio(loop, self._ready_in_asyncio))
        self._wake()  # timers may be due

    def detach(self) -> None:
        """Have a thread of its own turn it again; in the thread of asyncio's loop."""
        if self._asyncio is None:
            return
        self._poll_by(self._epoll)
        if self._timer is not None:
            self._timer.cancel()
        self._asyncio = self._timer = None
        self._timer_at = math.inf
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def _poll_by(self, poller: select.epoll | _Selection | _InAsyncio) -> None:
        """Have all sockets watched by another from now on."""
        with self._handover:
            for fd, events in self._events.items():
                self._poller.unregister(fd)
                poller.register(fd, events)
            self._poller = poller

    def _ready_in_asyncio(self, fd: int, events: int) -> None:
        """Handle an event, the short way where nothing else is due."""
        handler = self._handlers.get(fd)
        if handler is None:
            self._round_in_asyncio([(fd, events)])
            return
        try:
            handler(events)
        except Exception:
            log.exception(_FAILED)
        is_earlier = self._timers and self._timers[0][0] < self._timer_at
        if self._soon or self._completions or is_earlier:
            self._round_in_asyncio([])

    def _round_in_asyncio(self, ready: list[tuple[int, int]]) -> None:
        assert self._asyncio is not None
        self._round(ready)
        if self._timers and not self._stopping:
            due = self._timers[0][0]
            if due < self._timer_at:
                if self._timer is not None:
                    self._timer.cancel()
                self._timer_at = due
                due_s = max(0.0, due - time.monotonic())
                self._timer = self._asyncio.call_later(due_s, self._turn_late)

    def _turn_late(self) -> None:
        self._timer = None
        self._timer_at = math.inf
        self._round_in_asyncio([])

    def is_loop_thread(self) -> bool:
        """Whether the caller runs on the loop."""
        return threading.current_thread() is self._thread

    def is_reading(self) -> bool:
        """Whether the caller handles frames in the loop's place, while it waits for an answer."""
        return getattr(self.reader, "is_reading", False)

    def call_soon(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the loop.

        Takes no lock: it may be called from anywhere, the garbage collector included.
        """
        self._soon.append(function)
        self._wake()

    def call_at(self, when: float, function: Callable[[], None]) -> None:
        """Run ``function`` on the loop at ``when`` (``time.monotonic()``); not to be cancelled."""
        timer = (when, next(self._order), function)
        # under the lock: a standby thread that took over just now would sleep past the timer
        with self._handover:
            if self.is_loop_thread():
                heapq.heappush(self._timers, timer)
                if self._asyncio is not None and self._timers[0] is timer:
                    self._wake()  # asyncio's own timer is set for a later one
                return
        self.call_soon(lambda: heapq.heappush(self._timers, timer))

    def complete(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the loop at the end of a round; it may run users' code, if short."""
        self._completions.append(function)
        # after appending: a thread that takes the loop over begins with the completions
        if not self.is_loop_thread():
            self._wake()

    def expect_bulk(self) -> None:
        """Do not poll for the next event, as it is more of something long; called by handlers."""
        self._is_bulk = True

    def step_aside(self) -> None:
        """Start another thread for the loop, if the caller is the loop's thread and about to wait.

        Raises:
            RuntimeError: in a handler, which must not wait.
        """
        with self._handover:  # the standby thread may take over at this moment
            if not self.is_loop_thread():
                return
            if not self._user_code_since:
                raise RuntimeError(
                    "a handler of the network thread must not wait for other workers"
                )
            self._user_code_since = 0.0
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        """Call ``handler(events)`` whenever ``fd`` is ready."""
        self._handlers[fd] = handler
        self._events[fd] = events
        self._poller.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        """Watch ``fd`` for other events; does nothing when it is no longer watched."""
        with self._handover:  # not while another begins to watch
            if fd not in self._events:
                log.debug("descriptor %d is not watched any more", fd)
                return
            self._events[fd] = events
            # one that has ended: epoll is closed, or asyncio's loop
            with contextlib.suppress(ValueError, OSError, RuntimeError):
                self._poller.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Stop watching ``fd``; call it before the descriptor is closed."""
        if self._handlers.pop(fd, None) is not None:
            with self._handover:
                del self._events[fd]
                self._poller.unregister(fd)

    def stop(self) -> None:
        """End the threads; functions that are queued still run."""
        self._stopping = True
        self._wake()
        self._wake_standby()
        with self._handover:
            thread = self._thread
        if not self.is_loop_thread() and thread.is_alive():
            thread.join(_SHUTDOWN_TIMEOUT_S)
        self._epoll.close()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        """Close the eventfd, which other threads may write to even after ``stop``.

        If ``stop`` closed it, its number could belong to another file by then.
        """
        with contextlib.suppress(AttributeError):  # the constructor had no descriptor left for it
            self._close_wakeup(close)

    def _wake(self) -> None:
        if self._wake_pair is None:
            os.eventfd_write(self._wake_fd, 1)
        else:
            self._wake_pair[1].send(b"\0")

    def _close_wakeup(self, close: Callable[[int], None]) -> None:
        if self._wake_pair is not None:
            for each in self._wake_pair:
                each.close()
        elif self._wake_fd >= 0:
            close(self._wake_fd)
        self._wake_fd = -1

    def _wake_standby(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was woken already
            self._standby_wakeup.release()

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
                ready = self._epoll.poll(self._poll_timeout_s())
                spin_until = 0.0
            now = time.monotonic()
            is_bulk = self._round(ready)
            if ready and spin_s and not is_bulk:
                spin_until = now + spin_s if now - last_event < 2 * SPIN_S else 0.0
                last_event = now
        if self._thread is me:
            self._run_soon()
            self._run_completions(me)

    def _round(self, ready: list[tuple[int, int]]) -> bool:
        """Handle events, functions and timers; whether it was about something long."""
        for fd, events in ready:
            if fd == self._wake_fd:
                if self._wake_pair is None:
                    os.eventfd_read(fd)
                else:
                    self._wake_pair[0].recv(_WAKE_BYTES)
                continue
            handler = self._handlers.get(fd)
            if handler is not None:
                self._guarded(handler, events)
        if self._soon:
            self._run_soon()
        is_bulk = self._is_bulk
        self._is_bulk = False
        if self._timers:
            self._run_timers()
        if self._completions:
            self._run_completions(threading.current_thread())
        return is_bulk

    def _run_completions(self, me: threading.Thread) -> None:
        while self._completions and self._thread is me:
            # before the next line: from then on the standby thread may take from the queue, too
            function = self._completions.popleft()
            self._user_code_since = time.monotonic()
            self._num_user_calls += 1
            if not self._has_standby:
                self._guarded(self._start_standby)
            elif self._standby_sleeps:
                self._standby_sleeps = False
                self._wake_standby()
            self._guarded(function)
            with self._handover:
                if self._thread is me:
                    self._user_code_since = 0.0

    def _start_standby(self) -> None:
        threading.Thread(target=self._stand_by, name=f"{self._name}-standby", daemon=True).start()
        self._has_standby = True

    def _stand_by(self) -> None:
        """Run the standby thread: take the loop over when users' code runs on it for long.

        It sleeps while no users' code runs on the loop.
        """
        num_seen = self._num_user_calls
        num_quiet = 0
        while not self._stopping:
            since = self._user_code_since
            if since and time.monotonic() - since > _TAKE_OVER_AFTER_S and self._take_over(since):
                self._start_standby()
                self._run()
                return
            num_quiet = 0 if since or self._num_user_calls != num_seen else num_quiet + 1
            num_seen = self._num_user_calls
            if num_quiet > _QUIET_ROUNDS:
                self._standby_sleeps = True
                # checked after the flag is set: a call that began before that does not wake us
                if self._user_code_since or self._num_user_calls != num_seen:
                    self._standby_wakeup.acquire(timeout=_TAKE_OVER_AFTER_S)
                else:
                    self._standby_wakeup.acquire()
            else:
                self._standby_wakeup.acquire(timeout=_TAKE_OVER_AFTER_S)

    def _take_over(self, since: float) -> bool:
        with self._handover:
            if self._user_code_since != since:
                return False
            self._user_code_since = 0.0
            self._thread = threading.current_thread()
            return True

    def _poll_timeout_s(self) -> float | None:
        """How long to wait for sockets, in seconds; ``None`` without limit."""
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
        """Call a handler; its errors are logged, as they must not end the loop for all others."""
        try:
            function(*args)
        except Exception:
            log.exception(_FAILED)
