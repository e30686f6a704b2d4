"""The processes that train one model together, and the channels between them.

A channel is a process group of its own: collectives on one channel run in the order in which they were issued, those on
different channels may overlap. Every rank must issue the same collectives on a channel in the same order.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from pibroch.collectives.gloo_threads import let_senders_finish
from pibroch.collectives.task_thread import TaskThread
from pibroch.errors import ConfigError
from pibroch.observability.trace import span

DEFAULT_TIMEOUT_S = 300.0
"""How long a collective waits for ranks that live but do not answer. Ranks that die are noticed in seconds."""

COURTESY_S = 5.0
"""How long other messages wait for a sum of gradients. Only where ranks send in different orders does it take so long."""

Explain = Callable[[Exception], Exception]


@dataclass(slots=True)
class Traffic:
    """What this rank exchanged with others.

    Attributes:
        sent, received: bytes of payload.
        waited_s: seconds in which the thread that computes waited for rows or for sums of gradients.
    """

    sent: int = 0
    received: int = 0
    waited_s: float = 0.0


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
        self._communication: TaskThread | None = None

    @property
    def communication(self) -> TaskThread:
        """The thread that sends this process's large messages."""
        if self._communication is None:
            self._communication = TaskThread()
        return self._communication

    @classmethod
    def alone(cls) -> Ranks:
        """One process; needs no process group."""
        return cls(0, 1)

    @classmethod
    def joined(cls, timeout_s: float = DEFAULT_TIMEOUT_S) -> Ranks:
        """The members of torch.distributed's default group, one object for all callers; alone when there is none.

        Args:
            timeout_s: of collectives; taken from the first call.
        """
        if not dist.is_available() or not dist.is_initialized():
            return cls.alone()
        group = dist.group.WORLD
        if group not in _JOINED:
            _JOINED[group] = cls(dist.get_rank(), dist.get_world_size(), timeout_s)
        return _JOINED[group]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time within as waiting; for the thread that computes."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.traffic.waited_s += time.perf_counter() - start

    def open_channel(self) -> Channel:
        """A new channel between all ranks; every rank must open its channels in the same order. Blocks."""
        return Channel(self)


_JOINED: WeakKeyDictionary[Any, Ranks] = WeakKeyDictionary()
_LAST_SUMS: WeakKeyDictionary[Ranks, deque[dist.Work]] = WeakKeyDictionary()
_NUM_KEPT = 16  # sums, which gloo's threads let go in any order, and late when they do not get a processor


@atexit.register
def _keep_last_sums() -> None:
    """Never free them: gloo's thread, if it is the last to let go, needs the interpreter for it, and aborts without one."""
    for works in _LAST_SUMS.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(works))


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
            let_senders_finish()
            if dist.get_backend(self._group) == "nccl":
                self._device = torch.device("cuda", torch.cuda.current_device())

    def all_to_all(
        self, send: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], out: Tensor | None = None
    ) -> Tensor:
        """Send ``send_counts[p]`` consecutive rows of ``send`` to each rank p; returns what came, in rank order.

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

    def begin_all_to_all(self, going: Sequence[Tensor], coming: Sequence[Tensor]) -> Callable[[], None]:
        """Send ``going[p]`` to each rank p and fill ``coming[p]`` by what it sends, of the same size.

        Returns at once, with a function that blocks until all is done. Messages of several calls arrive in their order.
        """
        here = self.ranks.rank
        self.ranks.traffic.sent += sum(each.nbytes for each in going) - going[here].nbytes
        self.ranks.traffic.received += sum(each.nbytes for each in coming) - coming[here].nbytes
        if self._device.type == "cpu":
            with self._explained():
                work = self._post_pairs(going, coming)
            return lambda: self._wait(work)
        with self._explained():
            staged = [each.to(self._device) for each in going]
            came = [torch.empty_like(each, device=self._device) for each in coming]
            dist.all_to_all(came, staged, group=self._group)
            for each, theirs in zip(coming, came, strict=True):
                each.copy_(theirs)
        return lambda: None

    def _post_pairs(self, going: Sequence[Tensor], coming: Sequence[Tensor]) -> list[dist.Work]:
        """Post receives before sends.

        gloo tells a sender that it may begin on the connection that carries data the other way. Its own all-to-all posts
        a send first, so the rank that comes first waits until the other's data are through: 3.5 MiB each way over 200 Mbit/s
        take up to 300 ms like that, and 155 ms like this.
        """
        here, others = self.ranks.rank, [p for p in range(self.ranks.world_size) if p != self.ranks.rank]
        work = [dist.irecv(coming[p], p, group=self._group) for p in others if coming[p].numel()]
        work += [dist.isend(going[p], p, group=self._group) for p in others if going[p].numel()]
        coming[here].copy_(going[here])
        return [each for each in work if each is not None]  # None is for ranks outside the group

    def _wait(self, work: Sequence[dist.Work]) -> None:
        with self._explained():
            for each in work:
                each.wait()

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """Row p of int64 ``counts`` ``[W, k]`` goes to rank p; returns ``[W, k]``, row p from rank p."""
        ones = [1] * self.ranks.world_size
        return self.all_to_all(counts, ones, ones)

    def all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Sum ``tensor`` over all ranks in place; returns at once with a function that blocks until it is done.

        The communication thread sends it, so that it shares the link with no other large message.
        """
        if self.ranks.world_size == 1:
            return lambda: None
        staged = tensor.to(self._device)
        share = 2 * (self.ranks.world_size - 1) / self.ranks.world_size
        self.ranks.traffic.sent += int(share * tensor.nbytes)
        self.ranks.traffic.received += int(share * tensor.nbytes)
        started = self.ranks.communication.submit(lambda: self._reduce(staged))

        def wait() -> None:
            with self.ranks.waiting(), self._explained(), span("wait for dense gradients"):
                started.result().wait()
            if staged is not tensor:
                tensor.copy_(staged)

        return wait

    def _reduce(self, tensor: Tensor) -> dist.Work:
        """Start a sum, and wait for it on this thread: no callback runs on gloo's.

        gloo's would need the interpreter once more, to let go of the callback; one that ends just then aborts.
        """
        with self._explained():
            work: dist.Work = dist.all_reduce(tensor, group=self._group, async_op=True)
        if self._device.type == "cpu":  # NCCL's wait would end the group when its time is over
            _LAST_SUMS.setdefault(self.ranks, deque(maxlen=_NUM_KEPT)).append(work)
            with span("sum dense gradients"), suppress(RuntimeError):  # whoever wants the sum is told what went wrong
                work.wait(timedelta(seconds=COURTESY_S))
        return work

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

    @contextmanager
    def _explained(self) -> Any:
        try:
            yield
        except RuntimeError as error:  # what torch.distributed raises, timeouts included
            if self.ranks.explain is None:
                raise
            raise self.ranks.explain(error) from error
