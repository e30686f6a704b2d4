"""What a process did when, as a file for Perfetto or Chrome (``ui.perfetto.dev``, ``chrome://tracing``).

Costs one comparison a span while no trace is taken. Times are of the clock that all processes of a
machine share.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Self, TypeVar

T = TypeVar("T")
MAX_EVENTS = 2_000_000
_NOTHING = nullcontext()
STEPS_BEFORE = 10
STEPS = 200
logger = logging.getLogger(__name__)


class Trace:
    """Spans of one process, kept in memory until :meth:`write`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._events: list[tuple[str, int, int, int]] = []
        self._threads: dict[int, str] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A part of the calling thread's time."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            thread = threading.get_ident()
            if thread not in self._threads:
                self._threads[thread] = threading.current_thread().name
            if len(self._events) < MAX_EVENTS:
                self._events.append((name, thread, start, time.monotonic_ns()))

    def write(self, path: Path) -> None:
        """Write all spans so far; the file appears whole or not at all.

        Other threads may still end spans meanwhile.
        """
        process = os.getpid()
        spans = self._events.copy()
        threads = self._threads.copy()  # after the spans, so that the thread of each is there
        numbers = {thread: number for number, thread in enumerate(threads)}
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "process_name", "pid": process, "args": {"name": self.name}}
        ]
        for thread, name in threads.items():
            about = {"name": "thread_name", "tid": numbers[thread], "args": {"name": name}}
            events.append({"ph": "M", "pid": process, **about})
        for name, thread, start, end in spans:
            when = {"tid": numbers[thread], "ts": start / 1e3, "dur": (end - start) / 1e3}
            events.append({"ph": "X", "name": name, "pid": process, **when})
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{process}")
        try:
            partial.write_text(json.dumps({"traceEvents": events}), "utf-8")
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


_current: Trace | None = None


def start(name: str) -> Trace:
    """Take a trace of this process from now on."""
    global _current
    _current = Trace(name)
    return _current


def stop() -> None:
    """Take no trace any more."""
    global _current
    _current = None


def span(name: str) -> AbstractContextManager[None]:
    """A part of the calling thread's time, if a trace is taken.

    >>> with span("forward"):
    ...     pass
    """
    return _NOTHING if _current is None else _current.span(name)


def spans(name: str, items: Iterable[T]) -> Iterator[T]:
    """``items``, with a span around the wait for each."""
    iterator = iter(items)
    while True:
        with span(name):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


class StepTrace:
    """Traces steps 11 to 210 of this process, then writes the file.

    It is written sooner when the ``with`` block is left. Of a run of fewer than 20 steps the second
    half is traced: the first steps compile kernels and fill caches. When the disk refuses the file,
    there is a warning.

    Args:
        path: of the file.
        name: of the process, as viewers show it.
        num_steps: that this process will take, at most.
    """

    def __init__(self, path: Path, name: str, num_steps: int) -> None:
        self._path = path
        self._name = name
        self._first = min(STEPS_BEFORE, num_steps // 2) + 1
        self._step = 0
        self._trace: Trace | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def next_step(self) -> None:
        """Called before each step."""
        self._step += 1
        if self._step == self._first:
            self._trace = start(self._name)
        elif self._step == self._first + STEPS:
            self._end()

    def _end(self) -> None:
        taken = self._trace
        self._trace = None
        if taken is None:
            return
        stop()
        try:
            taken.write(self._path)
        except OSError as error:
            logger.warning("%s while writing %s: there is no trace", error.strerror, self._path)
