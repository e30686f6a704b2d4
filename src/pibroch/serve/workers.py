"""Several servers at one port: processes of this machine, over which the kernel spreads connections.

Each maps the same tables, so that they are in memory once, and counts into a row of one array, which each of them can show.
One that ends is started again.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pibroch.errors import ConfigError, TrainingError
from pibroch.serve.prometheus import SIZE, Metrics
from pibroch.serve.server import ServerOptions, listen

logger = logging.getLogger(__name__)
PLACE = "PIBROCH_SERVE_WORKER"
START_TIMEOUT_S = 600.0
QUICK_END_S, MOST_QUICK_ENDS = 10.0, 5
_POLL_S, _KILL_S = 0.2, 10.0


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

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> WorkerPlace | None:
        """This process's; ``None`` for one that is no worker."""
        if PLACE not in environment:
            return None
        number, count, path = environment[PLACE].split(":", 2)
        return cls(int(number), int(count), Path(path))

    def open_metrics(self) -> Metrics:
        """This worker's counters, among all."""
        return Metrics(np.memmap(self.metrics, np.float64, "r+", shape=(self.count, SIZE)), self.number)


def run_workers(
    command: Sequence[str],
    environment: Mapping[str, str],
    count: int,
    options: ServerOptions,
    announce: Callable[[str], None],
) -> None:
    """Run workers until SIGTERM or SIGINT, and let their open requests end; blocks. Runs in the main thread.

    Args:
        command: starts one; the port is added to it.
        environment: of the workers.
        count: how many.
        options: as the workers have them.
        announce: told what the last worker said once all of them answer requests.

    Raises:
        ConfigError: when the address cannot be had, or ports cannot be shared here.
        TrainingError: when a worker does not start, or ends again and again.
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError(
            f"--workers {count} where ports cannot be shared", "a system with SO_REUSEPORT", "use one worker"
        )
    asked_to_end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked_to_end.set())
    with (
        tempfile.TemporaryDirectory(prefix="pibroch-serve-") as folder,
        listen(replace(options, shares_port=True)) as held,
    ):
        metrics = Path(folder) / "metrics"
        np.zeros((count, SIZE)).tofile(metrics)
        places = [WorkerPlace(number, count, metrics) for number in range(count)]
        crew = _Crew([*command, "--port", str(held.getsockname()[1])], environment, places)
        try:
            said = crew.start_all(asked_to_end)
            if said is not None:
                announce(said)
                crew.watch(asked_to_end)
        finally:
            crew.end(options.drain_s + options.shutdown_s + _KILL_S)


class _Crew:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str], places: Sequence[WorkerPlace]) -> None:
        self._command, self._environment, self._places = command, environment, places
        self._processes: list[subprocess.Popen[bytes]] = []
        self._started_at = [0.0] * len(places)
        self._quick_ends = 0

    def start_all(self, asked_to_end: threading.Event) -> str | None:
        """Start them and wait until all answer; what the last one said, ``None`` when asked to end before."""
        self._processes = [self._start(place) for place in self._places]
        deadline, said = time.monotonic() + START_TIMEOUT_S, ""
        with selectors.DefaultSelector() as waiting:
            for process in self._processes:
                assert process.stdout is not None
                waiting.register(process.stdout, selectors.EVENT_READ, process.stdout)
            while waiting.get_map():
                if asked_to_end.is_set():
                    return None
                for key, _ in waiting.select(_POLL_S):
                    line = key.data.readline().decode()
                    waiting.unregister(key.fileobj)
                    if not line:
                        raise TrainingError("a worker that did not start", "all workers", "see what it said above")
                    said = line.strip()
                if time.monotonic() > deadline:
                    raise TrainingError(f"a worker that did not answer within {START_TIMEOUT_S:g} s", "all workers")
        return said

    def watch(self, asked_to_end: threading.Event) -> None:
        """Start anew what ends, until asked to end."""
        while not asked_to_end.wait(_POLL_S):
            for number, process in enumerate(self._processes):
                if process.poll() is None:
                    continue
                if time.monotonic() - self._started_at[number] < QUICK_END_S:
                    self._quick_ends += 1
                if self._quick_ends > MOST_QUICK_ENDS:
                    raise TrainingError(
                        f"workers that end again and again, the last with {process.returncode}", "workers that go on",
                        "see what they said above",
                    )  # fmt: skip
                logger.error("worker %d ended with %d and is started again", number, process.returncode)
                self._close(process)
                self._processes[number] = self._start(self._places[number])

    def end(self, timeout_s: float) -> None:
        """Ask all to end, wait, and kill those that do not."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.error("a worker did not end within %g s and is killed", timeout_s)
                process.kill()
                process.wait()
            self._close(process)

    def _start(self, place: WorkerPlace) -> subprocess.Popen[bytes]:
        self._started_at[place.number] = time.monotonic()
        environment = {**self._environment, PLACE: f"{place.number}:{place.count}:{place.metrics}"}
        return subprocess.Popen(self._command, env=environment, stdout=subprocess.PIPE)

    @staticmethod
    def _close(process: subprocess.Popen[bytes]) -> None:
        if process.stdout is not None:
            process.stdout.close()
