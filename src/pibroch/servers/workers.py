"""Workers that serve a trainer, as one exchange knows them."""

from __future__ import annotations

import os
import secrets
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from pibroch import rpc
from pibroch.collectives import Channel
from pibroch.errors import RpcError, WorkerLostError
from pibroch.roles.losses import out_of_reach
from pibroch.rpc.calls.agent import current_agent

T = TypeVar("T")
CONFIGURE_TIMEOUT_S = 3600.0
"""Initial weights of a large shard take their time."""

_TOKEN = secrets.token_hex(8)
_forgotten: defaultdict[str, deque[str]] = defaultdict(deque)
"""By role, what nobody here needs any more.

The next configuration says so: a collector of garbage must not talk to others.
"""


class ServingWorkers:
    """The servers of one kind.

    Whoever is lost stays lost until found again, though another may have its name by now.

    Args:
        role: what they are, in messages.
        names: workers of this process's RPC group.
        channel: between the trainers, to agree on a name; all of them make their peers in the same
            order.

    Raises:
        TrainingError: when one cannot be reached.
    """

    def __init__(self, role: str, names: Sequence[str], channel: Channel) -> None:
        self._role = role
        self._timeout_s = channel.ranks.timeout_s
        names_here = [f"{_TOKEN}-{os.getpid()}", secrets.token_hex(8)]
        self._run, self._key = channel.gather(names_here)[0]  # rank 0 names the run
        agent = current_agent()
        lost = set[str]()
        self._lost = lost
        agent.when_lost(lambda worker, incarnation: lost.add(worker.name))
        self._me = [agent.info.name, agent.incarnation]
        self._workers = {name: self._find(name) for name in names}
        forgotten = _forgotten[role]
        self._forgotten = [forgotten.popleft() for _ in range(len(forgotten))]
        weakref.finalize(self, forgotten.append, self._key)

    def configure(
        self, name: str, function: Callable[..., None], wanted: Sequence[object], *more: object
    ) -> torch.futures.Future[None]:
        """Say what one is to hold, under a key of its own, for all trainers.

        ``more`` is not compared with what others say.
        """
        args = (self._run, self._me, self._key, wanted, self._forgotten, *more)
        with self.explained(name):
            return rpc.rpc_async(self._worker(name), function, args, timeout=CONFIGURE_TIMEOUT_S)

    def call(
        self, name: str, function: Callable[..., object], *args: object
    ) -> torch.futures.Future[Any]:
        """Call a function there, about what was configured; returns at once.

        Raises:
            TrainingError: when it cannot be reached.
        """
        with self.explained(name):
            keyed = self._key, *args
            return rpc.rpc_async(self._worker(name), function, keyed, timeout=self._timeout_s)

    def find_again(self, name: str) -> None:
        """Take whoever has this name now in place of one that was lost; it knows nothing.

        Raises:
            TrainingError: when nobody has it.
        """
        self._lost.discard(name)
        self._workers[name] = self._find(name)

    def ask(self, name: str, function: Callable[..., T], *args: object) -> T:
        """What a function says there, about what was configured.

        Raises:
            TrainingError: when it cannot be reached.
        """
        with self.explained(name):
            keyed = self._key, *args
            return rpc.rpc_sync(self._worker(name), function, keyed, timeout=self._timeout_s)

    @contextmanager
    def explained(self, name: str) -> Iterator[None]:
        """Say in the terms of training what has failed within."""
        try:
            yield
        except RpcError as error:
            raise out_of_reach(self._role, name, error) from error

    def _find(self, name: str) -> rpc.WorkerInfo:
        with self.explained(name):
            return rpc.get_worker_info(name)

    def _worker(self, name: str) -> rpc.WorkerInfo:
        if name in self._lost:
            raise WorkerLostError(name, "it ended, or its host was lost")
        return self._workers[name]
