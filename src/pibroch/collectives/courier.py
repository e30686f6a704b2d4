"""The one thread of a process that sends large messages to the other ranks, in the order in which it is asked to.

One message at a time is also the quickest way over a slow link: two flows that share it make each other's congestion control
guess too low (measured with BBR at 200 Mbit/s: 3.8 MB took 290 ms after having shared the link, 155 ms otherwise).
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

T = TypeVar("T")
Task = tuple[Callable[[], Any], "Future[Any]"]

END_S = 5.0
"""How long a program that ends waits for errands that are under way."""


class Courier:
    """Runs errands one after the other beside the caller's thread.

    After an errand has failed no further one is run: each gets the same error. Bad input is no such failure: all ranks have
    refused it together. The thread ends with its courier. A program that ends waits for what it was asked to do, not longer
    than END_S: it may be waiting for a rank that hangs.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str = "pibroch-courier") -> None:
        self._errands: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=_work, args=(self._errands,), name=name, daemon=True)
        self.thread.start()
        self.send_home = weakref.finalize(self, self._errands.put, None)
        self.send_home.atexit = False  # then `_finish` does it
        _COURIERS.add(self)

    def send(self, errand: Callable[[], T]) -> Future[T]:
        """Run ``errand`` after all earlier ones; returns at once. Its result, or error, is in the future."""
        future: Future[T] = Future()
        self._errands.put((errand, future))
        return future

    def flush(self) -> None:
        """Wait until all errands are done; raises the error of one that failed. Bounded by the collectives' timeouts."""
        self.send(lambda: None).result()


_COURIERS: weakref.WeakSet[Courier] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    """A thread that comes back from torch's C++ while the interpreter goes down aborts the process, and peers miss rows."""
    deadline = time.monotonic() + END_S
    couriers = [courier for courier in _COURIERS if courier.thread.is_alive()]  # not those of who forked this process
    for _ in range(2):  # errands of one lead to some of another
        wait([courier.send(lambda: None) for courier in couriers], max(0.0, deadline - time.monotonic()))
    for courier in couriers:
        courier.send_home()
    for courier in couriers:
        courier.thread.join(max(0.0, deadline - time.monotonic()))


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
