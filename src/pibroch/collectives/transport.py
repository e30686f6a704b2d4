"""What a channel needs of the network, so that another network fits behind it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Wait = Callable[[], object]
"""Blocks until what was started is done; called once."""


class Group(Protocol):
    """What a transport asks of a group of ranks, see :class:`~pibroch.collectives.Ranks`.

    Attributes:
        rank, world_size: of this process, and of all, within the group.
        timeout_s: how long it may wait.
        members: the group's ranks, each by its number in the run.
        are_all: whether the group is all ranks of the run.
    """

    rank: int
    world_size: int
    timeout_s: float
    members: tuple[int, ...]

    @property
    def are_all(self) -> bool: ...  # noqa: D102


class Transport(ABC):
    """Carries the messages of one channel between the ranks of one group.

    It numbers them from 0 in the group's order.

    Every rank makes the same calls in the same order. Tensors are contiguous. They belong to the
    transport until their :data:`Wait` is over, and whoever gave them keeps them alive until then.

    A call or a wait raises a RuntimeError, as torch's errors are, when another rank is lost or does
    not answer within the group's time limit. The transport is then good for nothing but
    :meth:`close`.

    Attributes:
        device: where tensors to be summed lie. Those of pairs lie on the CPU.
    """

    device = torch.device("cpu")

    @abstractmethod
    def post(self, going: Sequence[Tensor], coming: Sequence[Tensor]) -> Wait:
        """Start to send ``going[p]`` to each other rank p and to fill ``coming[p]``.

        A rank p sends as many bytes as ``coming[p]`` has.

        Returns at once where the network can send on its own. Empty tensors do not travel. What
        this rank has for itself is not looked at. Between two ranks messages arrive in the order of
        calls, of which several may be under way.
        """

    @abstractmethod
    def reduce(self, tensor: Tensor) -> Wait:
        """Sum ``tensor`` over all ranks in place, to the same bits everywhere.

        Runs on the communication thread, which sends nothing else until this returns: when the sum
        is there, or later messages should no longer wait for a rank that is late.
        """

    @abstractmethod
    def close(self) -> None:
        """Give sockets, threads and memory back.

        No wait may be under way; the second call does nothing.
        """
