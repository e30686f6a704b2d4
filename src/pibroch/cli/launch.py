"""Several ranks on one machine.

This command line once more for each, with the environment that torchrun would set.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from pibroch.errors import PibrochError
from pibroch.forkserver import ForkedProcess, ForkServer
from pibroch.ports import free_port
from pibroch.process import LAST_WORDS, LAUNCHER, threads_of_rank
from pibroch.title import show_as

END_S = 10.0
"""How long ranks may go on after one has failed.

The others hear of it in milliseconds and give up after some seconds.
"""
LOSS_END_S = 2.0
"""The same, where all are to be started again."""
STOP_S = 5.0
"""How long ranks may take to end when they are told to stop."""
_POLL_S = 0.02
LOST = 75
"""What a rank says to its launcher by its exit code.

A process was lost, and the run may go on from its checkpoint.
"""
STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT)
"""Exit codes of a rank that was told to end.

Where its launcher was not, nobody wants the run to end: the rank is lost.
"""
_PR_SET_PDEATHSIG = 1


def signal_of(code: int) -> str | None:
    """The name of the signal that ended a rank, or told it to end.

    ``None`` for one that ended otherwise.
    """
    if code < 0:
        return signal.Signals(-code).name
    return signal.Signals(code - 128).name if code in STOPPED else None


def is_rank() -> bool:
    """Whether this process is a rank, started by :class:`RankProcesses` or by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def show_rank(title: str) -> None:
    """Show this process as one of the ranks.

    Args:
        title: of a rank that does what this one does.
    """
    rank = os.environ.get("RANK", "0")
    show_as(f"{title} {rank} of {os.environ.get('WORLD_SIZE', '1')}", f"rank {rank}")


def show_launcher(num_ranks: int, title: str) -> None:
    """Show this process as the one that starts the ranks."""
    show_as(f"launcher of {num_ranks} {title}{'s' * (num_ranks > 1)}", "launcher")


def has_launcher() -> bool:
    """Whether :class:`RankProcesses` started this process, and reports its end."""
    return LAUNCHER in os.environ


def tell_launcher(error: PibrochError) -> int:
    """The exit code of a process that ends with an error.

    Its launcher, if it has one, learns that something was lost.
    """
    if not error.is_loss or not has_launcher():
        return error.exit_code
    path = os.environ.get(LAST_WORDS)
    if path is not None:
        with suppress(OSError), open(path, "x", encoding="utf-8") as file:
            file.write(error.got)
    return LOST


def die_with_launcher() -> None:
    """Have the system kill this process when the launcher that started it, torchrun too, is gone.

    Without one do nothing.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    die_with(None if launcher is None else int(launcher))


def die_with(parent: int | None) -> None:
    """Have the system kill this process when its parent ends; end now if it has ended."""
    die_with_parent()
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def die_with_parent() -> None:
    """Have the system kill this process when the thread that started it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class RankProcesses:
    """Processes of this command line, one a rank.

    Leaving the ``with`` block ends those that still run.

    Args:
        num_ranks: how many.
        arguments: added to the command line.
        variables: of their environment.
        server: forks them, and does what they ask for while they are waited for; they are started
            anew when absent.
    """

    def __init__(
        self,
        num_ranks: int,
        arguments: Sequence[str],
        variables: Mapping[str, str] | None = None,
        server: ForkServer | None = None,
    ) -> None:
        self._arguments = list(arguments)
        self._server = server
        self._num_ranks = num_ranks
        self._variables = dict(variables or {})
        self._lost = False
        self._processes: list[subprocess.Popen[bytes] | ForkedProcess] = []

    def __enter__(self) -> Self:
        environment = {**os.environ, **self._variables, **self._common_environment()}
        for rank in range(self._num_ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._processes.append(self._start(environment | place, f"rank {rank}"))
        return self

    def _start(
        self, environment: Mapping[str, str], name: str
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        if self._server is not None:
            return self._server.fork([*sys.argv[1:], *self._arguments], environment, name)
        command = [sys.executable, *sys.orig_argv[1:], *self._arguments]
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)

    def __exit__(self, *_: object) -> None:
        for number, seconds in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
            for process in self._running():
                process.send_signal(number)
            self._wait_for_all(seconds)

    def wait(self, end_s: float = END_S) -> tuple[int, int] | None:
        """Wait until all have ended.

        The first that failed, with its exit code, negative for a signal. ``None`` for success.

        After a failure the others have some seconds to say what they know of it and to end by
        themselves.

        Args:
            end_s: how long they may take.
        """
        failed = None
        while failed is None and self._running():
            self._pause(_POLL_S)
            failed = self._first_failed()
        if failed is not None:
            self._wait_for_all(end_s)
            codes = [process.poll() for process in self._processes]
            self._lost = any(
                code is not None and (code == LOST or signal_of(code) is not None) for code in codes
            )
        return failed

    def has_lost(self) -> bool:
        """After :meth:`wait`: whether a process was killed, or lost one that it needs."""
        return self._lost

    def kill(self) -> None:
        """End those that still run, at once: they hang, or are stopped."""
        for process in self._running():
            process.send_signal(signal.SIGKILL)
        self._wait_for_all(STOP_S)

    def _first_failed(self) -> tuple[int, int] | None:
        """Of those found at once, one that a signal ended: the others end because of it."""
        ended = [(rank, process.poll()) for rank, process in enumerate(self._processes)]
        failures = [(rank, code) for rank, code in ended if code]
        return min(
            failures, key=lambda failure: (signal_of(failure[1]) is None, failure[0]), default=None
        )

    def _pause(self, seconds: float) -> None:
        if self._server is None:
            time.sleep(seconds)
        else:
            self._server.serve(seconds)

    def _running(self) -> list[subprocess.Popen[bytes] | ForkedProcess]:
        return [process for process in self._processes if process.poll() is None]

    def _wait_for_all(self, seconds: float) -> None:
        """Wait for at most this long.

        What the processes ask for meanwhile, such as the end of what they have started, is done.
        """
        deadline = time.monotonic() + seconds
        while self._running() and time.monotonic() < deadline:
            self._pause(_POLL_S)

    def _common_environment(self) -> dict[str, str]:
        size = {"WORLD_SIZE": str(self._num_ranks), "LOCAL_WORLD_SIZE": str(self._num_ranks)}
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        threads = os.environ.get("OMP_NUM_THREADS", str(threads_of_rank(self._num_ranks)))
        return {
            **size,
            **master,
            "OMP_NUM_THREADS": threads,
            LAUNCHER: str(os.getpid()),
        }


def redirect_output(path: Path) -> None:
    """Append this process's standard output and standard error to a file from now on."""
    sys.stdout.flush()
    sys.stderr.flush()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)


def tail(path: Path, num_lines: int = 20) -> str:
    """The last lines of a text file; empty when there is none."""
    if not path.is_file():
        return ""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])
