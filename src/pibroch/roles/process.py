"""Servers and processors as processes of this machine, which end with the one that started them."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from pibroch.errors import TrainingError
from pibroch.forkserver import link_to_server
from pibroch.process import LAST_WORDS, LAUNCHER
from pibroch.roles.group import say_lost
from pibroch.roles.registry import BUILT_IN, VARIABLE
from pibroch.roles.role import Role
from pibroch.stores import tcp_store
from pibroch.title import TITLE

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 120.0
END_S = 5.0
_LOOK_S = 0.1
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", LAUNCHER, LAST_WORDS)


@dataclass(frozen=True, slots=True)
class Share:
    """Processes of one role.

    Attributes:
        role: theirs.
        count: how many.
        logs: folder for what they say.
        restarts: how often one that ends before its time is started again, where it keeps nothing
            that others need.
    """

    role: Role
    count: int
    logs: Path
    restarts: int = 0


OnRestart = Callable[[str], None]


@contextmanager
def started(
    shares: Sequence[Share],
    threads: int,
    rendezvous: str | None = None,
    on_restart: OnRestart | None = None,
) -> Iterator[str]:
    """Within, these run on this machine; gives their rendezvous.

    They end with this process, however it ends.

    Args:
        shares: of which roles, and how many.
        threads: of each one's kernels.
        rendezvous: a rendezvous that there is already; one is opened in this process when absent.
        on_restart: is told, on a thread of its own, of those that are started again.

    Raises:
        TrainingError: when one does not start.
    """
    store = None
    if rendezvous is None:
        store = tcp_store("127.0.0.1", 0, is_host=True)  # here, so that it outlives all of them
        rendezvous = f"tcp://{store.host}:{store.port}"
    started_here: list[_Started] = []
    restarter = None
    try:
        for share in shares:
            share.logs.mkdir(parents=True, exist_ok=True)
            for number in range(share.count):
                started_here.append(
                    _Started(share, number, _start(share, number, rendezvous, threads))
                )
        deadline = time.monotonic() + START_TIMEOUT_S
        for each in started_here:
            _wait_until_ready(each.share, each.number, each.process, deadline)
        restarter = _Restarter(started_here, rendezvous, threads, on_restart)
        yield rendezvous
    finally:
        if restarter is not None:
            restarter.stop()
        _end([each.process for each in started_here])
        if restarter is not None:
            restarter.end()
        del store


class _RunningProcess(Protocol):
    """What a started and a forked process have in common."""

    @property
    def stdin(self) -> IO[bytes] | None: ...
    @property
    def stdout(self) -> IO[bytes] | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


@dataclass(slots=True)
class _Started:
    share: Share
    number: int
    process: _RunningProcess
    restarts: int = 0
    is_lost: bool = False


class _Restarter:
    """A thread that starts again what has ended, or says so.

    What it started ends with it: it stays to the end.
    """

    def __init__(
        self,
        members: Sequence[_Started],
        rendezvous: str,
        threads: int,
        on_restart: OnRestart | None,
    ) -> None:
        self._members = members
        self._rendezvous = rendezvous
        self._threads = threads
        self._on_restart = on_restart
        self._stopped = threading.Event()
        self._ended = threading.Event()
        self._starting = threading.Lock()
        self._thread = threading.Thread(
            target=self._restart_lost, name="pibroch-roles", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Start nothing from now on."""
        with self._starting:
            self._stopped.set()

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _restart_lost(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            with self._starting:
                for each in self._members:
                    if not self._stopped.is_set() and not each.is_lost:
                        self._look_at(each)
        self._ended.wait()

    def _look_at(self, each: _Started) -> None:
        code = each.process.poll()
        if code is None:
            return
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if each.restarts == each.share.restarts:
            each.is_lost = True
            with suppress(TrainingError, RuntimeError):  # the rendezvous ends with the run
                say_lost(self._rendezvous, each.share.role, each.number, f"ended with {how}")
            return
        reason = f"{each.share.role.title} {each.number} ended with {how}"
        logger.warning("%s: it is started again", reason)
        _close(each.process)
        each.process = _start(each.share, each.number, self._rendezvous, self._threads)
        each.restarts += 1
        if self._on_restart is not None:
            self._on_restart(reason)


def _log(share: Share, number: int) -> Path:
    return share.logs / f"{number}.log"


def _start(share: Share, number: int, rendezvous: str, threads: int) -> _RunningProcess:
    """Its standard input is a pipe from here.

    When that ends, with this process or before, so does the other one.
    """
    arguments = [share.role.command, "--rendezvous", rendezvous, "--number", str(number)]
    arguments += ["--threads", str(threads), "--until-input-ends"]
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    environment[TITLE] = share.role.member(number, share.count)
    link = link_to_server()
    if link is not None and share.role in BUILT_IN:
        return link.start(arguments, environment, _log(share, number).resolve())
    if share.role not in BUILT_IN and VARIABLE not in environment:  # nobody need have installed it
        places = os.pathsep.join(place for place in sys.path if place)
        environment |= {VARIABLE: share.role.functions, "PYTHONPATH": places}
    with _log(share, number).open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "pibroch", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            env=environment,
            start_new_session=True,
        )


def _wait_until_ready(share: Share, number: int, process: _RunningProcess, deadline: float) -> None:
    """It says a line when it is ready."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
    if not ready or not process.stdout.readline():
        how = "ended" if ready else f"was not ready within {START_TIMEOUT_S:g} s"
        title = share.role.title
        error = TrainingError(
            f"{title} {number}, which {how}", f"all {title}s", f"see {_log(share, number)}"
        )
        with suppress(subprocess.TimeoutExpired):
            error.is_loss = bool(ready) and process.wait(END_S) < 0  # killed while it was starting
        raise error


def _close(process: _RunningProcess) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):
            pipe.close()


def _end(processes: list[_RunningProcess]) -> None:
    for process in processes:
        _close(process)
    deadline = time.monotonic() + END_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
