"""Several servers at one port.

Processes of this machine, over which the kernel spreads connections.

They are forked from one that has opened the model, so that it, and all that Python and torch load,
is in memory once; each counts into a row of one array, which any of them can show. One that ends is
started again, and so is one whose event loop no longer turns, which would keep the connections that
the kernel gives it.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from pibroch.errors import ConfigError, PibrochError, TrainingError
from pibroch.forkserver import ForkServer
from pibroch.launch.child import die_with_launcher
from pibroch.launch.job import Group, Job, Restarts
from pibroch.launch.life import Death, Life
from pibroch.launch.machines import Here, place_here
from pibroch.serve.prometheus import BEATS_AT, SIZE, ServerMetrics
from pibroch.serve.server import ServerOptions, listen, url_of

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 600.0
RESTARTS = Restarts(most=5, within_s=60.0, after_any_end=True)
"""Of each worker, however it ended."""
_KILL_S = 3.0
_MOST_POLL_S = 1.0
"""A poll that took longer says that this process was stopped itself.

Workers are not to blame for the rest.
"""


Work = Callable[[int, int, ServerMetrics], None]


def run_workers(
    work: Work, count: int, options: ServerOptions, announce: Callable[[str], None]
) -> None:
    """Run workers until SIGTERM or SIGINT, and let their open requests end; blocks.

    Runs in the main thread.

    They are forked, so that what this process has loaded and opened is in memory once: it must have
    no other thread.

    Args:
        work: what a worker does, by its number from 0, at this port, with these counters.
        count: how many.
        options: as the workers have them.
        announce: told the URL once all of them answer requests.

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
    with listen(replace(options, shares_port=True)) as held:
        # zeros, which all processes that are forked from here write to and see
        shared = mmap.mmap(-1, count * SIZE * np.dtype(np.float64).itemsize)
        counters = np.frombuffer(shared, np.float64).reshape(count, SIZE)
        port = held.getsockname()[1]
        program = partial(_be_worker, work, counters, port)
        workers = Group("worker", "worker", count, ("serve",), is_numbered=True, restarts=RESTARTS)
        watch = _Watch(counters[:, BEATS_AT], options.worker_timeout_s)
        is_announced = False

        def is_over() -> bool:
            nonlocal is_announced
            watch.kill_silent(life)
            if watch.have_begun() and not is_announced:
                is_announced = True
                announce(url_of(held, options))
            return asked_to_end.is_set()

        with (
            ForkServer(program, lambda: iter(())) as server,
            Life(
                Job((workers,)), place_here(), Here(server), on_restart=watch.note_restart
            ) as life,
        ):
            try:
                death = life.wait(is_over)
            finally:
                life.end(options.drain_s + options.shutdown_s + _KILL_S)
    if death is not None:
        raise TrainingError(
            f"workers that end again and again, the last with {death.how}",
            "workers that go on",
            "see what they said above",
        )


def _be_worker(work: Work, counters: NDArray[np.float64], port: int) -> NoReturn:
    """In the worker: as a program of its own, which dies with the one that it was forked from."""
    die_with_launcher()
    number = int(sys.argv[-1])
    try:
        work(number, port, ServerMetrics(counters, number))
    except PibrochError as error:
        logger.error("worker %d: %s", number, error)
        sys.exit(2)
    sys.exit(0)


class _Watch:
    """What is looked at beside whether workers run: that all have started, and that none hangs.

    Args:
        beats: how often the event loop of each worker has turned; they count on.
        timeout_s: for the next turn to come; the first may take as long as a start.
    """

    def __init__(self, beats: NDArray[np.float64], timeout_s: float) -> None:
        self._beats = beats
        self._last = beats.copy()
        self._timeout_s = timeout_s
        self._silent_s = np.zeros(len(beats))
        self._allowed_s = np.full(len(beats), START_TIMEOUT_S)
        self._looked_at = time.monotonic()

    def have_begun(self) -> bool:
        """Whether all have answered since they were started first."""
        return bool((self._last > 0).all())

    def note_restart(self, death: Death) -> None:
        """Called when a worker is started again.

        Raises:
            TrainingError: when not all have begun yet.
        """
        if not self.have_begun():
            raise TrainingError(
                f"a worker that did not start: {death}", "all workers", "see what it said above"
            )
        self._silent_s[death.number] = 0.0
        self._allowed_s[death.number] = START_TIMEOUT_S

    def kill_silent(self, life: Life) -> None:
        """Kill who has not turned for too long."""
        now = time.monotonic()
        beats = self._beats.copy()
        have_turned = beats != self._last
        self._silent_s += min(now - self._looked_at, _MOST_POLL_S)
        self._silent_s[have_turned] = 0.0
        self._allowed_s[have_turned] = self._timeout_s
        self._last = beats
        self._looked_at = now
        for number in np.flatnonzero(self._silent_s > self._allowed_s).tolist():
            logger.error("worker %d hangs and is killed", number)
            life.kill_one("worker", number)
