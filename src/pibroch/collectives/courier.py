"""The one thread of a process that sends large messages to the other ranks, in the order in which it is asked to.

One message at a time is also the quickest way over a slow link: two flows that share it make each other's congestion control
guess too low (measured with BBR at 200 Mbit/s: 3.8 MB took 290 ms after having shared the link, 155 ms otherwise).
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from pibroch.errors import InputError

T = TypeVar("T")
Task = tuple[Callable[[], Any], "Future[Any]"]


class Courier:
    """Runs errands one after the other beside the caller's thread.

    After an errand has failed no further one is run: each gets the same error. Bad input is no such failure: all ranks have
    refused it together. The thread ends with its courier, and never keeps the process alive: it may be waiting for a rank
    that is gone.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str = "pibroch-courier") -> None:
        self._errands: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._errands,), name=name, daemon=True).start()
        weakref.finalize(self, self._errands.put, None)

    def send(self, errand: Callable[[], T]) -> Future[T]:
        """Run ``errand`` after all earlier ones; returns at once. Its result, or error, is in the future."""
        future: Future[T] = Future()
        self._errands.put((errand, future))
        return future

    def flush(self) -> None:
        """Wait until all errands are done; raises the error of one that failed. Bounded by the collectives' timeouts."""
        self.send(lambda: None).result()


def _work(errands: queue.SimpleQueue[Task | None]) -> None:
    failure: BaseException | None = None
    while (task := errands.get()) is not None:
        errand, future = task
        try:
            if failure is not None:
                raise failure
            future.set_result(errand())
        except InputError as error:
            future.set_exception(error)
        except BaseException as error:
            failure = error
            future.set_exception(error)
        del task, errand, future  # what it holds must not wait for the next one
