"""Where the processes of a job run: this machine, or what a launcher puts in its place."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from pibroch.forkserver import ForkServer
from pibroch.launch.job import Group, Job, Place
from pibroch.ports import free_port
from pibroch.process import LAST_WORDS, LAUNCHER, RENDEZVOUS, threads_of_rank
from pibroch.title import name_of_role

_OF_ANOTHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", RENDEZVOUS, LAST_WORDS)
"""Variables that a process has from its own launcher, or not at all."""


class Process(Protocol):
    """What a started and a forked process have in common."""

    pid: int

    def poll(self) -> int | None:
        """The exit code, negative for a signal; ``None`` while it runs."""

    def send_signal(self, number: int) -> None:
        """Send a signal, if it runs."""


class Machines(Protocol):
    """Where the processes of a job run."""

    def start(
        self, job: Job, group: Group, number: int, arguments: list[str], own: dict[str, str]
    ) -> Process:
        """Start a process of pibroch.

        Args:
            job: its job.
            group: its group.
            number: in the group.
            arguments: of the command line.
            own: variables that it has besides those that are there.
        """

    def ranks_beside(self, job: Job, rank: int) -> range:
        """Ranks of the machine of a rank."""

    def pause(self, seconds: float) -> None:
        """Wait; what processes ask for meanwhile is done."""
        time.sleep(seconds)


class Memory(Protocol):
    """What outlives processes of a job, for those that go on where they have been."""

    def heads(self, num_bytes: int) -> list[bytes]:
        """The first bytes of each piece."""

    def forget(self) -> None:
        """Give all up."""


class Here:
    """This machine.

    Args:
        server: forks processes, and does what they ask for; they are started anew when absent.
    """

    def __init__(self, server: ForkServer | None = None) -> None:
        self._server = server

    def start(
        self, job: Job, group: Group, number: int, arguments: list[str], own: dict[str, str]
    ) -> Process:
        """Fork a process, or start it anew."""
        if group.are_ranks:
            threads = str(threads_of_rank(job.num_ranks))
            own = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads), **own}
        environment = {**inherited(), **own, LAUNCHER: str(os.getpid())}
        name = name_of_role(group.title if group.are_ranks else group.role, number)
        with opened_log(log_of(job, group, number)) as log:
            if self._server is not None:
                return self._server.fork(arguments, environment, name, log)
            # a rank is this program once more, however it was started
            program = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
            return subprocess.Popen(
                [sys.executable, *(program if group.are_ranks else ("-m", "pibroch")), *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=log is not None,
            )

    def ranks_beside(self, job: Job, rank: int) -> range:
        """All."""
        return range(job.num_ranks)

    def pause(self, seconds: float) -> None:
        """Wait, or do what forked processes ask for."""
        if self._server is None:
            time.sleep(seconds)
        else:
            self._server.serve(seconds)


def inherited() -> dict[str, str]:
    """This process's variables, but for those that its own launcher has given it."""
    return {name: text for name, text in os.environ.items() if name not in _OF_ANOTHER}


def place_here() -> Place:
    """A place on this machine, at ports that are free."""
    return Place("127.0.0.1", free_port(), f"tcp://127.0.0.1:{free_port()}")


def log_of(job: Job, group: Group, number: int) -> str | None:
    """The file for what a process says; ``None`` for where its launcher speaks."""
    if group.logs is None or job.folder is None:
        return None
    return os.path.abspath(os.path.join(job.folder, group.logs, f"{number}.log"))


@contextmanager
def opened_log(path: str | None) -> Iterator[int | None]:
    """A descriptor to append to; ``None`` for no file."""
    if path is None:
        yield None
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
