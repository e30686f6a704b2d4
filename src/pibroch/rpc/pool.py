"""The threads that run what other workers ask for; one more for each that waits."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

Task = Callable[[], None]


class Pool:
    """At most ``size`` tasks run at a time; a task that waits for other workers (inside ``waiting()``) does not count.

    So calls may be nested to any depth. Threads are started when there is no idle one, and end with the pool.
    ``step_aside`` is called by other threads that are about to wait: the network thread, too, must not stop for that.
    """

    def __init__(self, name: str, size: int, step_aside: Callable[[], None]) -> None:
        self._name, self._size = name, size
        self._step_aside = step_aside
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
            self._step_aside()
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

    def _grow(self) -> None:
        """Start a thread, if there is work that no idle one will take and the size allows it."""
        with self._lock:
            if (
                self._closed
                or self._num_threads - self._num_waiting >= self._size
                or self._num_idle >= self._tasks.qsize()
            ):
                return
            self._num_threads += 1
            thread = threading.Thread(target=self._work, name=f"{self._name}-{self._num_threads}", daemon=True)
            self._threads.append(thread)
        thread.start()

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
            del task  # what it holds may be large, and the next one may be long in coming
        with self._lock:
            self._num_threads -= 1
            self._threads.remove(threading.current_thread())
