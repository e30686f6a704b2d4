"""Roles by rank: a launcher (torchrun) starts all processes of a run alike.

They share the roles out through its store.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from pibroch.errors import ConfigError, TrainingError
from pibroch.host import is_one_machine
from pibroch.roles.registry import roles
from pibroch.roles.role import Role
from pibroch.stores import tcp_store

FIND_TIMEOUT_S = 120.0
END_TIMEOUT_S = 10.0
_POLL_S = 0.1
_SPLIT = "split"
_END = "end"
_ENDED = "ended"


@dataclass(frozen=True, slots=True)
class RankSplit:
    """Which ranks do what: the first ones train, the others have roles.

    Roles follow in the order of :func:`~pibroch.roles.roles`.

    Attributes:
        num_trainers: ranks that train.
        counts: processes of each other role.

    Example:
        >>> from pibroch.roles import DATA_PROCESSOR, EMBEDDING_SERVER
        >>> split = RankSplit.of(6, {EMBEDDING_SERVER: 2, DATA_PROCESSOR: 1})
        >>> split.num_trainers, split.ranks(EMBEDDING_SERVER), split.ranks(DATA_PROCESSOR)
        (3, range(3, 5), range(5, 6))
    """

    num_trainers: int
    counts: Mapping[Role, int]

    @classmethod
    def of(cls, num_ranks: int, counts: Mapping[Role, int]) -> RankSplit:
        """All ranks but those that other roles need train.

        Raises:
            ConfigError: when none is left.
        """
        num_trainers = num_ranks - sum(counts.values())
        if num_trainers < 1:
            others = ", ".join(f"{count} {role.title}s" for role, count in counts.items())
            raise ConfigError(
                f"{num_ranks} processes for {others} and trainers",
                f"{sum(counts.values()) + 1} at least",
                "start more, e.g. by torchrun --nproc-per-node",
            )
        return cls(num_trainers, {role: counts[role] for role in roles() if counts.get(role)})

    def ranks(self, role: Role) -> range:
        """The ranks of a role."""
        first = self.num_trainers
        for each, count in self.counts.items():
            if each == role:
                return range(first, first + count)
            first += count
        return range(0)

    def part(self, rank: int) -> tuple[Role, int] | None:
        """Role and number of a rank; ``None`` for a trainer."""
        for role in self.counts:
            ranks = self.ranks(role)
            if rank in ranks:
                return role, rank - ranks.start
        return None


@dataclass(frozen=True, slots=True)
class RankLayout:
    """What rank 0 tells all ranks.

    Attributes:
        split: who does what.
        rendezvous: where they meet.
        folder: of the run.
    """

    split: RankSplit
    rendezvous: str
    folder: str


class Launcher:
    """The store of the launcher that started this process.

    ``MASTER_ADDR``, ``MASTER_PORT``, ``RANK``, ``WORLD_SIZE``.

    Raises:
        ConfigError: without a launcher.
        TrainingError: when its store cannot be reached.
    """

    def __init__(self) -> None:
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
        self.num_ranks = int(size)
        is_host = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        timeout = timedelta(seconds=FIND_TIMEOUT_S)
        try:
            store = tcp_store(self._host, int(port), is_host=is_host, timeout=timeout)
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise TrainingError(
                f"no store of the launcher at {self._host}:{port} ({str(error).splitlines()[0]})",
                "the one that rank 0 or torchrun opens",
                "check MASTER_ADDR, MASTER_PORT and the logs of all ranks",
            ) from error
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = PrefixStore(f"pibroch_roles_{attempt}", store)

    @contextmanager
    def leading(
        self, split: RankSplit, rendezvous: str | None, folder: str
    ) -> Iterator[RankLayout]:
        """Within, on rank 0, all ranks know who does what.

        With its end the processes beside the trainers end.

        Args:
            split: who does what.
            rendezvous: a rendezvous that there is already; one is opened in this process when
                absent.
            folder: of the run.
        """
        place = None
        if rendezvous is None:
            place = tcp_store("127.0.0.1" if is_one_machine() else self._host, 0, is_host=True)
            rendezvous = f"tcp://{place.host}:{place.port}"
        counts = {role.command: count for role, count in split.counts.items()}
        self._store.set(_SPLIT, json.dumps([split.num_trainers, counts, rendezvous, folder]))
        try:
            yield RankLayout(split, rendezvous, folder)
        finally:
            with suppress(RuntimeError):  # the store may be gone with what failed
                self._store.set(_END, "")
        deadline = time.monotonic() + END_TIMEOUT_S
        while (
            self._store.add(_ENDED, 0) < sum(split.counts.values()) and time.monotonic() < deadline
        ):
            time.sleep(_POLL_S)
        del place

    def give_up(self) -> None:
        """Rank 0 cannot begin: nobody shall wait for it."""
        self._store.set(_SPLIT, "null")

    def layout(self) -> RankLayout:
        """What rank 0 says; blocks until it does.

        Raises:
            TrainingError: when it says nothing in time, or cannot begin.
        """
        deadline = time.monotonic() + FIND_TIMEOUT_S
        while not self._store.check([_SPLIT]):  # a wait inside the store would hear no signal
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"no word of rank 0 within {FIND_TIMEOUT_S:g} s", "a rank 0", "see its log"
                )
            time.sleep(_POLL_S)
        message = json.loads(self._store.get(_SPLIT))
        if message is None:
            raise TrainingError("rank 0, which could not begin", "a run", "see what rank 0 said")
        num_trainers, counts, rendezvous, folder = message
        by_command = {role.command: role for role in roles()}
        return RankLayout(
            RankSplit(num_trainers, {by_command[name]: count for name, count in counts.items()}),
            rendezvous,
            folder,
        )

    def wait_for_end(self) -> Iterator[None]:
        """Gives nothing, every now and then, until the trainers are done.

        Raises:
            TrainingError: when the store is gone.
        """
        try:
            while not self._store.check([_END]):
                yield
                time.sleep(_POLL_S)
        except (dist.DistError, RuntimeError) as error:
            raise TrainingError(
                "no store of the launcher any more", "a living rank 0", "see its log"
            ) from error

    def has_ended(self) -> None:
        """This process, which is no trainer, is done."""
        self._store.add(_ENDED, 1)
