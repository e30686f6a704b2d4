"""Collectives between the ranks of a group.

Those on one channel run in the order in which they were issued, those on different channels may
overlap. Every rank must issue the same collectives on a channel in the same order.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from pibroch.collectives.gloo import GlooTransport
from pibroch.collectives.nccl import NcclTransport
from pibroch.collectives.transport import Transport, Wait
from pibroch.errors import ConfigError
from pibroch.observability.trace import span

if TYPE_CHECKING:
    from pibroch.collectives.ranks import Ranks

TRANSPORT_VARIABLE = "PIBROCH_CHANNEL_TRANSPORT"
CHOICES = ("auto", "gloo")
"""``auto`` is shared memory within a host.

``gloo`` in the environment of a rank leaves its messages to gloo.
"""
DEFAULT_CHOICE = "auto"
"""Of channels; a step of training takes 1.05 to 1.2 times as long over gloo, see design note 0022.
"""


def open_host_transport(ranks: Ranks, choice_when_absent: str = "auto") -> Transport:
    """Gloo, and shared memory between the ranks of a host that all allow it. Blocks.

    Raises:
        ConfigError: for a transport in the environment that is not known.
    """
    from pibroch.collectives.bounded_lag.rendezvous import (
        rendezvous_on_host,
    )  # one process needs none of these
    from pibroch.kernels.atomics import FUTEX_CALL

    choice = os.environ.get(TRANSPORT_VARIABLE) or choice_when_absent
    if choice not in CHOICES:
        raise ConfigError(
            f"{TRANSPORT_VARIABLE}={choice} in the environment", f"one of {', '.join(CHOICES)}"
        )
    network = GlooTransport(ranks)
    shares_memory = choice == "auto" and FUTEX_CALL is not None
    links = rendezvous_on_host(
        network.store, ranks.rank, ranks.world_size, ranks.timeout_s, shares_memory=shares_memory
    )
    if not links:
        return network
    from pibroch.collectives.host_transport import (
        HostTransport,
    )  # nor do systems without shared memory
    from pibroch.collectives.mailbox import Mailbox

    mailbox = Mailbox(links, ranks.rank, ranks.world_size, ranks.timeout_s)
    return HostTransport(network, mailbox, ranks.members, ranks.rank, ranks.timeout_s)


TRANSPORTS: dict[str, Callable[[Ranks], Transport]] = {
    "gloo": GlooTransport,
    "host": open_host_transport,
    "nccl": NcclTransport,
}
"""By name; each opens one between all members of a group, which all call it. Blocks."""


def open_transport(ranks: Ranks) -> Transport:
    """A channel over NCCL, or over gloo and shared memory within a host.

    NCCL is used where torch.distributed's default group uses it.

    Raises:
        ConfigError: without a default group.
    """
    if not dist.is_initialized():
        raise ConfigError(
            f"{ranks.world_size} ranks without a process group",
            "one",
            'call torch.distributed.init_process_group("gloo") first,'
            " or use `pibroch train --ranks`",
        )
    if dist.get_backend() == "nccl":
        return TRANSPORTS["nccl"](ranks)
    return open_host_transport(ranks, DEFAULT_CHOICE)


class Channel:
    """Collectives over all ranks of a group in one order.

    All block until done unless they return work to wait for.

    Tensors are contiguous and on the CPU; those to be summed may lie on any device.

    Args:
        ranks: the group.
        transport: between them; :func:`open_transport` chooses when absent. One rank needs none.

    Attributes:
        sent_to: bytes by the rank of the run that they went to, without sums of dense gradients.

    Raises:
        RankFailedError: (each method) when another rank failed or was lost.
    """

    def __init__(self, ranks: Ranks, transport: Transport | None = None) -> None:
        self.ranks = ranks
        self._transport = transport
        self.sent_to: Counter[int] = Counter()
        if transport is None and ranks.world_size > 1:
            with self._explained():
                self._transport = open_transport(ranks)

    def all_to_all(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        out: Tensor | None = None,
    ) -> Tensor:
        """Send ``send_counts[p]`` consecutive rows of ``send`` to each rank p.

        Returns what came, in rank order.

        Args:
            send: ``[sum(send_counts), ...]``.
            send_counts: rows for each rank.
            receive_counts: rows from each rank, known beforehand.
            out: receives what came and is returned, if given and there are several ranks.
        """
        if self.ranks.world_size == 1:
            return send
        if out is None:
            out = torch.empty(sum(receive_counts), *send.shape[1:], dtype=send.dtype)
        self.begin_all_to_all(send.split(list(send_counts)), out.split(list(receive_counts)))()
        return out

    def begin_all_to_all(self, going: Sequence[Tensor], coming: Sequence[Tensor]) -> Wait:
        """Send ``going[p]`` to each rank p and fill ``coming[p]`` by what it sends.

        Both are of the same size.

        Returns at once, with a function that blocks until all is done. Messages of several calls
        arrive in their order.
        """
        here = self.ranks.rank
        traffic = self.ranks.traffic
        for p, peer in enumerate(self.ranks.members):
            if p != here and (going[p].nbytes or coming[p].nbytes):
                traffic.add(peer, going[p].nbytes, peer, coming[p].nbytes)
                self.sent_to[peer] += going[p].nbytes
        started: Wait | None = None
        if self._transport is not None:
            with self._explained():
                started = self._transport.post(going, coming)
        coming[here].copy_(going[here])

        def wait() -> None:
            if started is not None:
                with self._explained():
                    started()

        return wait

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """Row p of int64 ``counts`` ``[W, k]`` goes to rank p.

        Returns ``[W, k]``, row p from rank p.
        """
        ones = [1] * self.ranks.world_size
        return self.all_to_all(counts, ones, ones)

    def all_reduce(self, tensor: Tensor) -> Wait:
        """Sum ``tensor`` over all ranks in place.

        Returns at once with a function that blocks until it is done.

        The communication thread sends it, so that it shares the link with no other large message.
        """
        if self._transport is None:
            return lambda: None
        transport = self._transport
        staged = tensor.to(self._transport.device)
        self._count_sum(tensor.nbytes)

        def reduce() -> Wait:
            with self._explained():
                return transport.reduce(staged)

        started = self.ranks.communication.submit(reduce)

        def wait() -> None:
            with self.ranks.waiting(), self._explained(), span("wait for dense gradients"):
                started.result()()
            if staged is not tensor:
                tensor.copy_(staged)

        return wait

    def _count_sum(self, num_bytes: int) -> None:
        """Bytes as in gloo's ring: 2 (W - 1) / W of the data each way.

        They go to the rank before this one, and come from the one after it.
        """
        here = self.ranks.rank
        size = self.ranks.world_size
        members = self.ranks.members
        share = int(2 * (size - 1) / size * num_bytes)
        self.ranks.traffic.add(members[here - 1], share, members[(here + 1) % size], share)

    def gather(self, value: object) -> list[Any]:
        """One plain value (what JSON can hold) of every rank, in rank order, on all ranks."""
        if self.ranks.world_size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [json.loads(bytes(piece.numpy())) for piece in self.gather_tensors(text)]

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """A tensor of every rank, in rank order, on all ranks; first dimensions may differ."""
        size = self.ranks.world_size
        if size == 1:
            return [tensor]
        counts = (
            self.exchange_counts(torch.full((size, 1), len(tensor), dtype=torch.int64))
            .flatten()
            .tolist()
        )
        send = tensor.repeat(size, *([1] * (tensor.ndim - 1)))
        return list(self.all_to_all(send, [len(tensor)] * size, counts).split(counts))

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather(None)

    def close(self) -> None:
        """Give its sockets and threads back; for programs that open many."""
        if self._transport is not None:
            self._transport.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (
            RuntimeError,
            OSError,
        ) as error:  # torch.distributed's, timeouts included, and those of sockets
            if self.ranks.explain is None:
                raise
            raise self.ranks.explain(error) from error
