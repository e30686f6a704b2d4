"""The processes of one command: started, waited for together, ended together."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from benchmarks.lab.network import LabError

GRACE_S = 5.0
"""How long a process may take to end after SIGTERM before SIGKILL."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How the processes ended; see :class:`benchmarks.lab.lab.RunResult`."""

    exit_codes: tuple[int, ...]
    first_failed: int | None
    timed_out: bool
    seconds: float


class RankProcesses:
    """Processes with a log each.

    Leaving the ``with`` block ends those that still run, and their children.

    Args:
        folder: for ``rank0.log``, ...
        say: told each line as it comes, one at a time.
    """

    def __init__(self, folder: Path, say: Callable[[int, str], None] | None) -> None:
        self._folder = folder
        self._say = say
        self._saying = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._running = (
            selectors.DefaultSelector()
        )  # process descriptors, readable once the process has ended
        self._start_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._running.close()
        for reader in self._readers:
            reader.join(GRACE_S)

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the next rank's process.

        It has a session of its own, so that its children can be ended with it.
        """
        rank = len(self._processes)
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise LabError(
                f"`{' '.join(command)}`: {error}", "a command that can be started"
            ) from error
        self._processes.append(process)
        self._running.register(os.pidfd_open(process.pid), selectors.EVENT_READ, rank)
        assert process.stdout is not None
        reader = threading.Thread(
            target=self._read, args=(rank, process.stdout), name=f"rank{rank}-output", daemon=True
        )
        reader.start()
        self._readers.append(reader)

    def wait(self, timeout_s: float) -> Ended:
        """Wait until all have ended; the first failure or the end of the time ends the others."""
        deadline = self._start_s + timeout_s
        first_failed = None
        while self._running.get_map() and first_failed is None:
            finished = self._finished(deadline)
            if not finished:
                break
            first_failed = next(
                (rank for rank in finished if self._processes[rank].returncode != 0), None
            )
        timed_out = bool(self._running.get_map()) and first_failed is None
        self._end()
        codes = tuple(process.returncode for process in self._processes)
        return Ended(codes, first_failed, timed_out, time.monotonic() - self._start_s)

    def _end(self) -> None:
        """Ask all that run to end, then make them."""
        for key in self._running.get_map().values():
            _signal_group(self._processes[key.data].pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while self._running.get_map() and self._finished(deadline):
            pass
        for key in list(self._running.get_map().values()):
            self._finish(key)

    def _finished(self, deadline: float) -> list[int]:
        """Wait until some process has ended; returns its rank, or nothing when time is up."""
        ready = self._running.select(max(0.0, deadline - time.monotonic()))
        for key, _ in ready:
            self._finish(key)
        return [key.data for key, _ in ready]

    def _finish(self, key: selectors.SelectorKey) -> None:
        """End what is left of a rank's session, and only then reap the process that names it."""
        process = self._processes[key.data]
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()
        self._running.unregister(key.fileobj)
        os.close(key.fd)

    def _read(self, rank: int, stream: IO[bytes]) -> None:
        with (self._folder / f"rank{rank}.log").open("wb", buffering=0) as log, stream:
            for line in stream:
                log.write(line)
                if self._say is not None:
                    with self._saying:
                        self._say(rank, line.decode("utf-8", "replace").rstrip("\n"))


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)
