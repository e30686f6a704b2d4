"""A thread that does tasks one after the other, in the order in which it is given them.

Each process has one for its large messages. One message at a time is also the quickest way over a
slow link: two flows that share it make each other's congestion control guess too low (measured with
BBR at 200 Mbit/s: 3.8 MB took 290 ms after having shared the link, 155 ms otherwise).
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from pibroch.errors import InputError
from pibroch.process import give_way

T = TypeVar("T")
Task = tuple[Callable[[], Any], "Future[Any]"]

END_S = 5.0
"""How long a program that ends waits for tasks that are under way."""


class TaskThread:
    """A thread that runs tasks one after the other, while the caller goes on.

    After a task has failed no further one is run: each gets the same error. Bad input is no such
    failure: all ranks have refused it together. The thread ends with this object. A program that
    ends waits for what it asked for, not longer than END_S: it may be waiting for a rank that
    hangs.

    Args:
        name: of the thread.
        nice: how much it gives way to other threads that want its core, see
            :func:`pibroch.process.give_way`.
    """

    def __init__(self, name: str = "pibroch-communication", nice: int = 0) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self.thread = threading.Thread(
            target=_work, args=(self._tasks, nice), name=name, daemon=True
        )
        self.thread.start()
        self.end = weakref.finalize(self, self._tasks.put, None)
        self.end.atexit = False  # then `_finish` does it
        _RUNNING.add(self)

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Run ``task`` after all earlier ones; returns at once.

        Its result, or error, is in the future.
        """
        future: Future[T] = Future()
        self._tasks.put((task, future))
        return future

    def flush(self) -> None:
        """Wait until all tasks are done; raises the error of one that failed.

        Bounded by the collectives' timeouts.
        """
        self.submit(lambda: None).result()


_RUNNING: weakref.WeakSet[TaskThread] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    """Such threads must end before the interpreter.

    One that comes back from torch's C++ while the interpreter goes down aborts the process, and
    peers miss rows.
    """
    deadline = time.monotonic() + END_S
    # not those of a process that forked this one
    running = [each for each in _RUNNING if each.thread.is_alive()]
    for _ in range(2):  # tasks of one lead to some of another
        wait([each.submit(lambda: None) for each in running], max(0.0, deadline - time.monotonic()))
    for each in running:
        each.end()
    for each in running:
        each.thread.join(max(0.0, deadline - time.monotonic()))


def _work(tasks: queue.SimpleQueue[Task | None], nice: int) -> None:
    give_way(nice)
    failure: BaseException | None = None
    while (given := tasks.get()) is not None:
        task, future = given
        try:
            if failure is not None:
                raise failure
            future.set_result(task())
        except InputError as error:
            future.set_exception(error)
        except BaseException as error:
            failure = error
            future.set_exception(error)
        del given, task, future  # what it holds must not wait for the next one
