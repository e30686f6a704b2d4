"""Several servers at one port.

Processes of this machine, over which the kernel spreads connections.

They are forked from one that has opened the model, so that it, and all that Python and torch load,
is in memory once; each counts into a row of one array, which any of them can show. One that ends is
started again, and so is one whose event loop no longer turns, which would keep the connections that
the kernel gives it.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pibroch.errors import ConfigError, PibrochError, TrainingError
from pibroch.serve.prometheus import BEATS_AT, SIZE, ServerMetrics
from pibroch.serve.server import ServerOptions, listen

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 600.0
QUICK_END_S = 10.0
MOST_QUICK_ENDS = 5
_POLL_S = 0.2
_KILL_S = 3.0
_MOST_POLL_S = 1.0
"""A poll that took longer says that this process was stopped itself.

Workers are not to blame for the rest.
"""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Which of the workers a process is.

    Attributes:
        number: from 0.
        count: of all.
        metrics: the file that all count into.
    """

    number: int
    count: int
    metrics: Path

    def open_metrics(self) -> ServerMetrics:
        """This worker's counters, among all."""
        return ServerMetrics(
            np.memmap(self.metrics, np.float64, "r+", shape=(self.count, SIZE)), self.number
        )


Work = Callable[[WorkerPlace, int], None]


def run_workers(
    work: Work, count: int, options: ServerOptions, announce: Callable[[str], None]
) -> None:
    """Run workers until SIGTERM or SIGINT, and let their open requests end; blocks.

    Runs in the main thread.

    They are forked, so that what this process has loaded and opened is in memory once: it must have
    no other thread.

    Args:
        work: what a worker does, at its place and at this port; it says one line on standard output
            when it answers.
        count: how many.
        options: as the workers have them.
        announce: told what the last worker said once all of them answer requests.

    Raises:
        ConfigError: when the address cannot be had, or ports cannot be shared here.
        TrainingError: when a worker does not start, or ends again and again.
    """
    if not hasattr(socket, "SO_REUSEPORT") or not hasattr(os, "fork"):
        raise ConfigError(
            f"--workers {count} where ports cannot be shared",
            "a system with SO_REUSEPORT and fork",
            "use one worker",
        )
    asked_to_end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked_to_end.set())
    gc.collect()
    # the collector would write to each object, and workers would then have pages of their own
    gc.freeze()
    with (
        tempfile.TemporaryDirectory(prefix="pibroch-serve-") as folder,
        listen(replace(options, shares_port=True)) as held,
    ):
        metrics = Path(folder) / "metrics"
        port = held.getsockname()[1]
        np.zeros((count, SIZE)).tofile(metrics)
        places = [WorkerPlace(number, count, metrics) for number in range(count)]
        workers = _Workers(work, places, port, options.worker_timeout_s)
        try:
            line_of_last = workers.start_all(asked_to_end)
            if line_of_last is not None:
                announce(line_of_last)
                workers.watch(asked_to_end)
        finally:
            workers.end(options.drain_s + options.shutdown_s + _KILL_S)


class _Worker:
    """A forked process, and what it says on standard output."""

    def __init__(self, work: Work, place: WorkerPlace, port: int, num_beats: float) -> None:
        self.started_at = time.monotonic()
        reading, writing = os.pipe()
        self.process = multiprocessing.get_context("fork").Process(
            target=_work, args=(work, place, port, writing)
        )
        self.process.start()
        os.close(writing)
        self.stdout = os.fdopen(reading, "rb")
        self._first_beats = self._num_beats = num_beats
        self._silent_s = 0.0

    def is_silent(self, num_beats: float, seconds: float, timeout_s: float) -> bool:
        """Whether it has not beaten for too long.

        Args:
            num_beats: how often it has by now.
            seconds: since the last call.
            timeout_s: for the next beat to come; the first one may take as long as a start.
        """
        self._silent_s = 0.0 if num_beats != self._num_beats else self._silent_s + seconds
        self._num_beats = num_beats
        has_begun = num_beats != self._first_beats
        return self._silent_s > (timeout_s if has_begun else START_TIMEOUT_S)

    def close(self) -> None:
        self.stdout.close()
        self.process.close()


def _work(work: Work, place: WorkerPlace, port: int, writing: int) -> None:
    """In the worker: as a program of its own, which dies with the one that it was forked from."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(writing, sys.stdout.fileno())
    os.close(writing)
    try:
        work(place, port)
    except PibrochError as error:
        logger.error("worker %d: %s", place.number, error)
        sys.exit(2)


class _Workers:
    def __init__(
        self, work: Work, places: Sequence[WorkerPlace], port: int, timeout_s: float
    ) -> None:
        self._work = work
        self._places = places
        self._port = port
        self._timeout_s = timeout_s
        self._beats = np.memmap(places[0].metrics, np.float64, "r", shape=(len(places), SIZE))[
            :, BEATS_AT
        ]
        self._workers: list[_Worker] = []
        self._quick_ends = 0

    def start_all(self, asked_to_end: threading.Event) -> str | None:
        """Start them and wait until all answer.

        What the last one said, ``None`` when asked to end before.
        """
        self._workers = [self._start(place) for place in self._places]
        deadline = time.monotonic() + START_TIMEOUT_S
        line_of_last = ""
        with selectors.DefaultSelector() as waiting:
            for worker in self._workers:
                waiting.register(worker.stdout, selectors.EVENT_READ, worker.stdout)
            while waiting.get_map():
                if asked_to_end.is_set():
                    return None
                for key, _ in waiting.select(_POLL_S):
                    line = key.data.readline().decode()
                    waiting.unregister(key.fileobj)
                    if not line:
                        raise TrainingError(
                            "a worker that did not start", "all workers", "see what it said above"
                        )
                    line_of_last = line.strip()
                if time.monotonic() > deadline:
                    raise TrainingError(
                        f"a worker that did not answer within {START_TIMEOUT_S:g} s", "all workers"
                    )
        return line_of_last

    def watch(self, asked_to_end: threading.Event) -> None:
        """Start anew what ends or hangs, until asked to end."""
        polled_at = time.monotonic()
        while not asked_to_end.wait(_POLL_S):
            now = time.monotonic()
            seconds = min(now - polled_at, _MOST_POLL_S)
            polled_at = now
            for number, worker in enumerate(self._workers):
                if worker.process.is_alive():
                    if not worker.is_silent(self._beats[number], seconds, self._timeout_s):
                        continue
                    logger.error("worker %d hangs and is killed", number)
                    worker.process.kill()
                    worker.process.join()
                code = worker.process.exitcode
                if time.monotonic() - worker.started_at < QUICK_END_S:
                    self._quick_ends += 1
                if self._quick_ends > MOST_QUICK_ENDS:
                    raise TrainingError(
                        f"workers that end again and again, the last with {code}",
                        "workers that go on",
                        "see what they said above",
                    )
                logger.error("worker %d ended with %s and is started again", number, code)
                worker.close()
                self._workers[number] = self._start(self._places[number])

    def end(self, timeout_s: float) -> None:
        """Ask all to end, wait, and kill those that do not."""
        for worker in self._workers:
            if worker.process.is_alive():
                worker.process.terminate()
        deadline = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                logger.error("a worker did not end within %g s and is killed", timeout_s)
                worker.process.kill()
                worker.process.join()
            worker.close()

    def _start(self, place: WorkerPlace) -> _Worker:
        return _Worker(self._work, place, self._port, self._beats[place.number])
