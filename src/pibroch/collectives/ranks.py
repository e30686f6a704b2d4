"""The processes that train one model together, and the channels between them.

A channel is a process group of its own: collectives on one channel run in the order in which they were issued, those on
different channels may overlap. Every rank must issue the same collectives on a channel in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pibroch.errors import ConfigError

DEFAULT_TIMEOUT_S = 300.0
"""How long a collective waits for ranks that live but do not answer. Ranks that die are noticed in seconds."""

Explain = Callable[[Exception], Exception]


@dataclass(slots=True)
class Traffic:
    """Bytes of payload that this rank sent to and received from others."""

    sent: int = 0
    received: int = 0


class Ranks:
    """This process's place among the processes that train one model.

    Args:
        rank: of this process.
        world_size: number of processes.
        timeout_s: how long a collective may wait.
        explain: turns a collective's failure into the error to raise, e.g. :class:`RankFailedError`.
    """

    def __init__(
        self, rank: int, world_size: int, timeout_s: float = DEFAULT_TIMEOUT_S, explain: Explain | None = None
    ) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.explain = explain
        self.traffic = Traffic()

    @classmethod
    def alone(cls) -> Ranks:
        """One process; needs no process group."""
        return cls(0, 1)

    @classmethod
    def joined(cls, timeout_s: float = DEFAULT_TIMEOUT_S) -> Ranks:
        """The members of torch.distributed's default group; alone when there is none.

        A group of one process needs no initialisation. Two calls give two objects over the same processes.
        """
        if not dist.is_available() or not dist.is_initialized():
            return cls.alone()
        return cls(dist.get_rank(), dist.get_world_size(), timeout_s)

    def open_channel(self) -> Channel:
        """A new channel between all ranks; every rank must open its channels in the same order. Blocks."""
        return Channel(self)


class Channel:
    """Collectives over all ranks in one order; all block until done unless they return work to wait for.

    Tensors are contiguous and on the CPU; with NCCL they pass through this rank's device.

    Raises:
        RankFailedError: (each method) when another rank failed or was lost.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self._group = ranks, None
        self._device = torch.device("cpu")
        if ranks.world_size > 1:
            if not dist.is_initialized():
                raise ConfigError(
                    f"{ranks.world_size} ranks without a process group", "one",
                    'call torch.distributed.init_process_group("gloo") first, or use `pibroch train --ranks`',
                )  # fmt: skip
            with self._explained():
                self._group = dist.new_group(timeout=timedelta(seconds=ranks.timeout_s))
            if dist.get_backend(self._group) == "nccl":
                self._device = torch.device("cuda", torch.cuda.current_device())

    def all_to_all(self, send: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Send ``send_counts[p]`` consecutive rows of ``send`` to each rank p; returns what came, in rank order.

        Args:
            send: ``[sum(send_counts), ...]``.
            send_counts: rows for each rank.
            receive_counts: rows from each rank, known beforehand.
        """
        if self.ranks.world_size == 1:
            return send
        out = torch.empty(sum(receive_counts), *send.shape[1:], dtype=send.dtype, device=self._device)
        with self._explained():
            dist.all_to_all_single(
                out, send.to(self._device), list(receive_counts), list(send_counts), group=self._group
            )
        self._count(send, send_counts, receive_counts)
        return out.cpu()

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """Row p of int64 ``counts`` ``[W, k]`` goes to rank p; returns ``[W, k]``, row p from rank p."""
        ones = [1] * self.ranks.world_size
        return self.all_to_all(counts, ones, ones)

    def all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Sum ``tensor`` over all ranks in place; returns at once with a function that blocks until it is done."""
        if self.ranks.world_size == 1:
            return lambda: None
        staged = tensor.to(self._device)
        with self._explained():
            work = dist.all_reduce(staged, group=self._group, async_op=True)
        share = 2 * (self.ranks.world_size - 1) / self.ranks.world_size
        self.ranks.traffic.sent += int(share * tensor.nbytes)
        self.ranks.traffic.received += int(share * tensor.nbytes)

        def wait() -> None:
            with self._explained():
                work.wait()
            if staged is not tensor:
                tensor.copy_(staged)

        return wait

    def gather(self, value: Any) -> list[Any]:
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
        counts = self.exchange_counts(torch.full((size, 1), len(tensor), dtype=torch.int64)).flatten().tolist()
        send = tensor.repeat(size, *([1] * (tensor.ndim - 1)))
        return list(self.all_to_all(send, [len(tensor)] * size, counts).split(counts))

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather(None)

    def close(self) -> None:
        """Give its sockets and threads back; for programs that open many."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _count(self, send: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> None:
        here, row_bytes = self.ranks.rank, send[:1].nbytes if len(send) else 0
        self.ranks.traffic.sent += (sum(send_counts) - send_counts[here]) * row_bytes
        self.ranks.traffic.received += (sum(receive_counts) - receive_counts[here]) * row_bytes

    @contextmanager
    def _explained(self) -> Any:
        try:
            yield
        except RuntimeError as error:  # what torch.distributed raises, timeouts included
            if self.ranks.explain is None:
                raise
            raise self.ranks.explain(error) from error
