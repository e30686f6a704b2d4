"""Jobs by rank: torchrun, or its like, starts all processes alike; they share the roles out.

The first ones are the job's ranks, the others have its other roles, in its order. Rank 0 says by
the launcher's store what the job is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pibroch.errors import ConfigError, TrainingError
from pibroch.host import is_one_machine
from pibroch.launch.base import Launcher, Run
from pibroch.launch.child import redirect_output
from pibroch.launch.job import BEGUN, Group, Job
from pibroch.process import RENDEZVOUS, threads_of_rank
from pibroch.roles import roles
from pibroch.stores import tcp_store
from pibroch.title import name_of_role, show_as

if TYPE_CHECKING:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

FIND_TIMEOUT_S = 120.0
END_TIMEOUT_S = 10.0
_POLL_S = 0.1
_JOB = "job"
_END = "end"
_ENDED = "ended"


class TorchrunLauncher(Launcher):
    """Has this process, which a launcher has started, take its part of the job."""

    def run(self, run: Run) -> int:
        """Be a rank or one of another role, until the job is done."""
        store = LauncherStore()
        if store.rank > 0:
            _take_part(store, store.job(), run)
            return 0
        try:
            job = shared(run.job(is_here=False), store.num_processes)
        except BaseException:
            store.give_up()
            raise
        with store.leading(job) as job:
            _take_part(store, job, run)
        return 0


def shared(job: Job, num_processes: int) -> Job:
    """The same job over so many processes: all but those that other roles need are ranks.

    Raises:
        ConfigError: when none is left.
    """
    others = [group for group in job.groups if not group.are_ranks]
    num_others = sum(group.count for group in others)
    if num_processes <= num_others:
        words = ", ".join(f"{group.count} {group.title}s" for group in others)
        raise ConfigError(
            f"{num_processes} processes for {words} and trainers",
            f"{num_others + 1} at least",
            "start more, e.g. by torchrun --nproc-per-node",
        )
    return job.with_ranks(num_processes - num_others)


def part(job: Job, rank: int) -> tuple[Group, int]:
    """The group of a launcher's rank, and its number there.

    >>> groups = Group("trainer", "rank", 2, (), are_ranks=True), Group("oracle", "oracle", 1, ())
    >>> [(group.role, number) for group, number in (part(Job(groups), rank) for rank in range(3))]
    [('trainer', 0), ('trainer', 1), ('oracle', 0)]
    """
    return [(group, number) for group in job.groups for number in range(group.count)][rank]


class LauncherStore:
    """The store of the launcher that started this process.

    ``MASTER_ADDR``, ``MASTER_PORT``, ``RANK``, ``WORLD_SIZE``.

    Raises:
        ConfigError: without a launcher.
        TrainingError: when its store cannot be reached.
    """

    def __init__(self) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        values = [
            os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
        ]
        if None in values:
            raise ConfigError(
                "roles by rank without a launcher",
                "MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE in the environment",
                "use torchrun; or leave --by-role out: `pibroch train` starts servers and"
                " processors by itself",
            )
        self._host, port, rank, size = map(str, values)
        self.rank = int(rank)
        self.num_processes = int(size)
        is_host = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        timeout = timedelta(seconds=FIND_TIMEOUT_S)
        try:
            store = tcp_store(self._host, int(port), is_host=is_host, timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise TrainingError(
                f"no store of the launcher at {self._host}:{port} ({str(error).splitlines()[0]})",
                "the one that rank 0 or torchrun opens",
                "check MASTER_ADDR, MASTER_PORT and the logs of all ranks",
            ) from error
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store: PrefixStore = PrefixStore(f"pibroch_roles_{attempt}", store)

    @contextmanager
    def leading(self, job: Job) -> Iterator[Job]:
        """Within, on rank 0, all ranks know the job; gives it with its rendezvous.

        It is opened in this process where it is nowhere else. With its end the processes beside the
        ranks end.
        """
        place = None
        if job.rendezvous is None:
            place = tcp_store("127.0.0.1" if is_one_machine() else self._host, 0, is_host=True)
            job = replace(job, rendezvous=f"tcp://{place.host}:{place.port}")
        self._store.set(_JOB, msgspec.json.encode(job).decode())
        try:
            yield job
        finally:
            with suppress(RuntimeError):  # the store may be gone with what failed
                self._store.set(_END, "")
        num_others = self.num_processes - job.num_ranks
        deadline = time.monotonic() + END_TIMEOUT_S
        while self._store.add(_ENDED, 0) < num_others and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        del place

    def give_up(self) -> None:
        """Rank 0 cannot begin: nobody shall wait for it."""
        self._store.set(_JOB, "null")

    def job(self) -> Job:
        """What rank 0 says; blocks until it does.

        Raises:
            TrainingError: when it says nothing in time, or cannot begin.
        """
        deadline = time.monotonic() + FIND_TIMEOUT_S
        while not self._store.check([_JOB]):  # a wait inside the store would hear no signal
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"no word of rank 0 within {FIND_TIMEOUT_S:g} s", "a rank 0", "see its log"
                )
            time.sleep(_POLL_S)
        job = msgspec.json.decode(self._store.get(_JOB), type=Job | None)
        if job is None:
            raise TrainingError("rank 0, which could not begin", "a run", "see what rank 0 said")
        return job

    def wait_for_end(self) -> Iterator[None]:
        """Gives nothing, every now and then, until the ranks are done.

        Raises:
            TrainingError: when the store is gone.
        """
        try:
            while not self._store.check([_END]):
                yield
                time.sleep(_POLL_S)
        except RuntimeError as error:
            raise TrainingError(
                "no store of the launcher any more", "a living rank 0", "see its log"
            ) from error

    def has_ended(self) -> None:
        """This process, which is no rank, is done."""
        self._store.add(_ENDED, 1)


def _take_part(store: LauncherStore, job: Job, run: Run) -> None:
    """Be a rank, in an environment that speaks of ranks alone, or one of another role."""
    assert job.rendezvous is not None
    group, number = part(job, store.rank)
    if group.are_ranks:
        os.environ["WORLD_SIZE"] = str(job.num_ranks)
        os.environ[RENDEZVOUS] = job.rendezvous
        run.be_rank()
        return
    import torch

    from pibroch.roles.group import leave, serve_as

    role = next(role for role in roles() if role.command == group.role)
    show_as(role.member(number, group.count), name_of_role(role.command, number))
    torch.set_num_threads(threads_of_rank())
    serve_as(role, job.rendezvous, number, opens=False)
    folder = Path(job.folder or "")
    has_log = False
    for _ in store.wait_for_end():
        if not has_log and (folder / BEGUN).exists():
            redirect_output(folder / role.folder / f"{number}.log")
            has_log = True
    leave()
    store.has_ended()
