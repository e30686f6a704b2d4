"""Several servers at one port.

Processes of this machine, over which the kernel spreads connections.

They are forked from one that has opened the model, so that it, and all that Python and torch load,
is in memory once; each counts into a row of one array, which any of them can show. One that ends is
started again, and so is one whose event loop no longer turns, which would keep the connections that
the kernel gives it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn, Self

import numpy as np

from pibroch.errors import ConfigError, PibrochError, TrainingError
from pibroch.forkserver import ForkServer
from pibroch.launch.child import die_with_launcher
from pibroch.launch.job import Group, Job, Restarts
from pibroch.launch.life import Life
from pibroch.launch.machines import Here, place_here
from pibroch.serve.prometheus import BEATS_AT, SIZE, ServerMetrics
from pibroch.serve.server import ServerOptions, listen

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 600.0
RESTARTS = Restarts(most=5, within_s=60.0, after_any_end=True)
"""Of each worker, however it ended."""
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


Work = Callable[[WorkerPlace, int, Callable[[str], None]], None]


def run_workers(
    work: Work, count: int, options: ServerOptions, announce: Callable[[str], None]
) -> None:
    """Run workers until SIGTERM or SIGINT, and let their open requests end; blocks.

    Runs in the main thread.

    They are forked, so that what this process has loaded and opened is in memory once: it must have
    no other thread.

    Args:
        work: what a worker does, at its place and at this port; it says one line when it answers.
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
    with (
        tempfile.TemporaryDirectory(prefix="pibroch-serve-") as folder,
        listen(replace(options, shares_port=True)) as held,
        Said() as said,
    ):
        metrics = Path(folder) / "metrics"
        np.zeros((count, SIZE)).tofile(metrics)
        port = held.getsockname()[1]
        program = partial(_be_worker, work, WorkerPlace(0, count, metrics), port, said.say)
        workers = Group("worker", "worker", count, ("serve",), is_numbered=True, restarts=RESTARTS)
        watch = _Watch(count, metrics, options.worker_timeout_s, said, announce)
        with (
            ForkServer(program, lambda: iter(())) as server,
            Life(
                Job((workers,)), place_here(), Here(server), on_restart=watch.refuse_until_ready
            ) as life,
        ):
            try:
                death = life.wait(lambda: asked_to_end.is_set() or watch.look(life))
            finally:
                life.end(options.drain_s + options.shutdown_s + _KILL_S)
    if death is not None:
        raise TrainingError(
            f"workers that end again and again, the last with {death.how}",
            "workers that go on",
            "see what they said above",
        )


def _be_worker(work: Work, place: WorkerPlace, port: int, say: Callable[[str], None]) -> NoReturn:
    """In the worker: as a program of its own, which dies with the one that it was forked from."""
    die_with_launcher()
    number = int(sys.argv[-1])
    try:
        work(replace(place, number=number), port, say)
    except PibrochError as error:
        logger.error("worker %d: %s", number, error)
        sys.exit(2)
    sys.exit(0)


class Said:
    """Lines that workers say to the process that they were forked from, through a pipe."""

    def __enter__(self) -> Self:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._rest = b""
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._reading)
        os.close(self._writing)

    def say(self, line: str) -> None:
        """In a worker: say a line."""
        os.write(self._writing, line.encode() + b"\n")

    def lines(self) -> list[str]:
        """Those that came since the last time."""
        with suppress(BlockingIOError):
            self._rest += os.read(self._reading, 1 << 16)
        *lines, self._rest = self._rest.split(b"\n")
        return [line.decode() for line in lines]


class _Watch:
    """What is looked at beside whether workers run: that all have started, and that none hangs."""

    def __init__(
        self,
        count: int,
        metrics: Path,
        timeout_s: float,
        said: Said,
        announce: Callable[[str], None],
    ) -> None:
        self._beats = np.memmap(metrics, np.float64, "r", shape=(count, SIZE))[:, BEATS_AT]
        self._timeout_s = timeout_s
        self._said = said
        self._announce = announce
        self._num_starting = count
        self._pulses: dict[int, _Pulse] = {}
        self._started_at = self._looked_at = time.monotonic()

    def refuse_until_ready(self, reason: str) -> None:
        """Called when a worker is started again.

        Raises:
            TrainingError: when not all have started yet.
        """
        if self._num_starting > 0:
            raise TrainingError(
                f"a worker that did not start: {reason}", "all workers", "see what it said above"
            )

    def look(self, life: Life) -> bool:
        """Announce when all answer, and kill what hangs; always ``False``: never over."""
        now = time.monotonic()
        seconds = min(now - self._looked_at, _MOST_POLL_S)
        self._looked_at = now
        for line in self._said.lines():
            self._num_starting -= 1
            if self._num_starting == 0:
                self._announce(line)
        if self._num_starting > 0 and now - self._started_at > START_TIMEOUT_S:
            raise TrainingError(
                f"a worker that did not answer within {START_TIMEOUT_S:g} s", "all workers"
            )
        for number, beats in enumerate(self._beats):
            process = life.process("worker", number)
            if process is None:
                continue
            pulse = self._pulses.get(number)
            if pulse is None or pulse.pid != process.pid:
                pulse = self._pulses[number] = _Pulse(process.pid, beats, beats)
            if pulse.is_silent(beats, seconds, self._timeout_s) and process.poll() is None:
                logger.error("worker %d hangs and is killed", number)
                process.send_signal(signal.SIGKILL)
        return False


@dataclass(slots=True)
class _Pulse:
    """How often a worker's event loop has turned."""

    pid: int
    first: float
    last: float
    silent_s: float = 0.0

    def is_silent(self, beats: float, seconds: float, timeout_s: float) -> bool:
        """Whether it has not beaten for too long.

        Args:
            beats: how often it has by now.
            seconds: since the last call.
            timeout_s: for the next beat to come; the first one may take as long as a start.
        """
        self.silent_s = 0.0 if beats != self.last else self.silent_s + seconds
        self.last = beats
        return self.silent_s > (timeout_s if beats != self.first else START_TIMEOUT_S)
