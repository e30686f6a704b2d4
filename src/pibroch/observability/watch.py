"""Whoever wants to see the work of steps: each piece by its name, and the messages of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

T = TypeVar("T")


class Watcher(Protocol):
    """Sees the work of all exchanges in this process, each piece on the thread that does it."""

    def work(self, name: str, exchange: object, step: object, run: Callable[[], T]) -> T:
        """Do a piece of work; returns what ``run`` returns.

        Args:
            name: of it: that of a task, where a schedule has it.
            exchange: whose work it is.
            step: of which, as the exchange keeps it.
            run: does it. Of a task of the communication thread it makes the generator of messages.
        """


_watcher: Watcher | None = None


def watched(name: str, exchange: object, step: object, run: Callable[[], T]) -> T:
    """Do a piece of work where the watcher sees it, if there is one."""
    return run() if _watcher is None else _watcher.work(name, exchange, step, run)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Within, a watcher sees all work; one at a time."""
    global _watcher
    assert _watcher is None, "one watcher at a time"
    _watcher = watcher
    try:
        yield
    finally:
        _watcher = None
