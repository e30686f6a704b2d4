"""The threads that run what other workers ask for; one more for each that waits."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pibroch.rpc.reactor import Reactor

log = logging.getLogger(__name__)

Task = Callable[[], None]
_STUCK_S = 0.05


class Pool:
    """At most ``size`` tasks run at a time; a task that waits for other workers (inside ``waiting()``) does not count.

    So calls may be nested to any depth. A wait that cannot be seen (torch's own ``wait_all``, a lock) shows in tasks that
    nobody takes while the process computes nothing; then a further thread is started, too. Threads end with the pool.
    """

    def __init__(self, name: str, size: int, loop: Reactor) -> None:
        self._name, self._size = name, size
        self._loop = loop
        self._num_done = 0
        self._is_watched = False
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = self._num_idle = self._num_waiting = 0
        self._threads: list[threading.Thread] = []
        self._here = threading.local()
        self._closed = False

    def submit(self, task: Task) -> None:
        """Run ``task`` on one of the threads; what it raises is logged."""
        self._tasks.put(task)
        if self._num_idle < self._tasks.qsize():
            self._grow()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While a thread of the pool is in here, another one may work in its stead."""
        if not getattr(self._here, "is_worker", False):
            self._loop.step_aside()
            yield
            return
        with self._lock:
            self._num_waiting += 1
        try:
            if self._tasks.qsize():
                self._grow()
            yield
        finally:
            with self._lock:
                self._num_waiting -= 1

    def close(self, timeout_s: float) -> bool:
        """End all threads once they have finished their tasks; whether they did in time."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._tasks.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)
        return not any(thread.is_alive() for thread in threads)

    def _grow(self, beyond: bool = False) -> None:
        """Start a thread, if there is work that no idle one will take and the size allows it, or ``beyond`` it."""
        with self._lock:
            if self._closed or self._num_idle >= self._tasks.qsize():
                return
            if self._num_threads - self._num_waiting >= self._size and not beyond:
                self._watch()
                return
            self._num_threads += 1
            thread = threading.Thread(target=self._work, name=f"{self._name}-{self._num_threads}", daemon=True)
            self._threads.append(thread)
        thread.start()

    def _watch(self) -> None:
        """Look again soon whether the tasks that wait are getting on (under the lock)."""
        if self._is_watched:
            return
        self._is_watched = True
        num_done, cpu_s = self._num_done, time.process_time()

        def look() -> None:
            self._is_watched = False
            if self._tasks.qsize() and not self._closed:
                stuck = self._num_done == num_done and time.process_time() - cpu_s < _STUCK_S / 4
                self._grow(beyond=stuck)

        self._loop.call_at(time.monotonic() + _STUCK_S, look)

    def _work(self) -> None:
        self._here.is_worker = True
        while True:
            with self._lock:
                if self._num_threads - self._num_waiting > self._size and self._num_idle:
                    break  # those that waited are back
                self._num_idle += 1
            task = self._tasks.get()
            with self._lock:
                self._num_idle -= 1
            if task is None:
                break
            try:
                task()
            except Exception:
                log.exception("a task of the worker threads failed")
            self._num_done += 1
            del task  # what it holds may be large, and the next one may be long in coming
        with self._lock:
            self._num_threads -= 1
            self._threads.remove(threading.current_thread())
