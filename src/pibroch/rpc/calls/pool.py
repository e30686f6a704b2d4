"""The pool of threads that run requests of other workers: one more for each thread that waits.

Threads: ``submit``, ``begin_wait`` and ``end_wait`` are called from any thread, ``_check`` by the
loop's timer. ``_lock`` guards all counts and queues; a pool thread sleeps on a lock of its own, and
is started outside of ``_lock``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pibroch.wire.reactor import Reactor

log = logging.getLogger(__name__)

Task = Callable[[], None]
_QUICK_S = 0.0001  # a thread that began a task so recently is expected back for the next one
_CHECK_AGAIN_S = 0.0005


class _PoolThread:
    """One thread, and the lock that it sleeps on."""

    __slots__ = ("asleep", "is_started", "thread")

    def __init__(self) -> None:
        self.asleep = threading.Lock()
        self.asleep.acquire()
        # the thread is started outside of the pool's lock, a moment after it is listed
        self.is_started = threading.Event()
        self.thread: threading.Thread


class Pool:
    """Runs at most ``size`` tasks at a time, without those that wait (inside ``waiting()``).

    So calls may be nested to any depth, as long as what waits for others says so: futures of calls
    do, torch's own ``wait_all`` and locks do not.

    Waking a thread for each of many short tasks costs more than the tasks. So no thread is woken
    while another one is being woken, or has begun a task just now and will be back for the next; if
    tasks are left half a millisecond later and no thread has begun one just then, further threads
    are woken, twice as many each time.
    """

    def __init__(self, name: str, size: int, loop: Reactor) -> None:
        self._name = name
        self._size = size
        self._loop = loop
        self._tasks: deque[Task] = deque()
        self._lock = threading.Lock()
        self._idle: list[_PoolThread] = []
        self._workers: set[_PoolThread] = set()
        self._num_waking = self._num_waiting = self._num_started = 0
        self._is_watched = False
        self._wake_next = 1
        self._last_start = 0.0
        self._of_thread = threading.local()  # ``is_worker`` is set in threads of the pool
        self._closed = False

    def submit(self, task: Task) -> None:
        """Run ``task`` on one of the threads; what it raises is logged."""
        with self._lock:
            self._tasks.append(task)
            if self._num_waking or self._is_brisk():
                self._watch()  # a thread will be back for it soon
                return
            worker = self._wake_one()
        _start(worker)

    def begin_wait(self) -> bool:
        """Call it before the calling thread waits: another one may take its place meanwhile.

        ``end_wait`` takes the result.
        """
        if not getattr(self._of_thread, "is_worker", False):
            self._loop.step_aside()
            return False
        with self._lock:
            self._num_waiting += 1
            worker = self._wake_one() if self._tasks and not self._num_waking else None
        _start(worker)
        return True

    def end_wait(self, was_worker: bool) -> None:
        """Call it after the wait, with the result of ``begin_wait``."""
        if was_worker:
            with self._lock:
                self._num_waiting -= 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """``begin_wait`` and ``end_wait`` around a block."""
        token = self.begin_wait()
        try:
            yield
        finally:
            self.end_wait(token)

    def close(self, timeout_s: float) -> bool:
        """End all threads once they have finished their tasks; whether they did in time."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
            for worker in self._idle:
                worker.asleep.release()
            self._idle.clear()
        deadline = time.monotonic() + timeout_s
        for worker in workers:
            is_other = worker.thread is not threading.current_thread()
            if is_other and worker.is_started.wait(max(0.0, deadline - time.monotonic())):
                worker.thread.join(max(0.0, deadline - time.monotonic()))
        return not any(worker.thread.is_alive() for worker in workers)

    def _wake_one(self) -> _PoolThread | None:
        """Have one more thread look for tasks, if the size allows it (under the lock).

        Returns:
            A new thread that the caller must start outside of the lock, if one is needed.
        """
        if self._closed or self._num_busy() >= self._size:
            return None
        self._num_waking += 1
        if self._idle:
            self._idle.pop().asleep.release()
            return None
        worker = _PoolThread()
        self._num_started += 1
        name = f"{self._name}-{self._num_started}"
        worker.thread = threading.Thread(target=self._work, args=(worker,), name=name, daemon=True)
        self._workers.add(worker)
        return worker

    def _is_brisk(self) -> bool:
        """Whether tasks are so short that more threads would only wait for the GIL.

        The caller holds the lock.
        """
        return self._num_busy() > 0 and time.monotonic() - self._last_start < _QUICK_S

    def _num_busy(self) -> int:
        return len(self._workers) - len(self._idle) - self._num_waiting

    def _watch(self) -> None:
        """Plan a check whether tasks are left (under the lock)."""
        if self._is_watched or self._closed:
            return
        self._is_watched = True
        self._loop.call_at(time.monotonic() + _CHECK_AGAIN_S, self._check)

    def _check(self) -> None:
        with self._lock:
            self._is_watched = False
            if not self._tasks:
                self._wake_next = 1
                return
            if self._is_brisk():
                self._watch()
                return
            num_to_wake = min(self._wake_next, len(self._tasks))
            self._wake_next = self._wake_next * 2
            workers = [self._wake_one() for _ in range(num_to_wake)]
            if self._num_busy() < self._size:  # else whoever is done takes the next task
                self._watch()
        for worker in workers:
            _start(worker)

    def _work(self, worker: _PoolThread) -> None:
        self._of_thread.is_worker = True
        is_fresh = True
        while True:
            with self._lock:
                self._num_waking -= is_fresh
                is_fresh = False
                task = self._tasks.popleft() if self._tasks else None
                if task is not None:
                    self._last_start = time.monotonic()
                else:
                    too_many = len(self._workers) - self._num_waiting > self._size
                    if self._closed or too_many:
                        self._workers.discard(worker)
                        return
                    self._idle.append(worker)
            if task is None:
                worker.asleep.acquire()
                is_fresh = not self._closed
                continue
            try:
                task()
            except Exception:
                log.exception("a task of the worker threads failed")
            del task  # it may hold large tensors, and the next task may be far away


def _start(worker: _PoolThread | None) -> None:
    if worker is not None:
        worker.thread.start()
        worker.is_started.set()
