"""Bounded lag over gloo's point-to-point messages.

The comparison without a transport of pibroch's (paper's Table I, middle column).

gloo must know a message's size before it comes, so a frame is two messages, a head of one size and
the part.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pibroch.collectives.bounded_lag.base import LaggedTransport, Opening, Slot
from pibroch.collectives.bounded_lag.streams import NOTHING, StreamTransport
from pibroch.collectives.gloo_threads import let_senders_finish
from pibroch.kernels.arrays import Bytes

FOREVER = timedelta(days=365)
"""How long a thread that reads waits: as long as the group lives.

Taking messages has a time limit of its own.
"""
_NUM_KEPT = 64


class _Pairs(Protocol):
    """What torch's stubs leave out of ProcessGroupGloo."""

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[Tensor], sender: int, tag: int, /) -> dist.Work: ...


_GROUPS: list[_Pairs] = []


@atexit.register
def _keep_to_the_end() -> None:
    """Never free them.

    A thread that waits in gloo would come back to an interpreter that is gone.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_GROUPS))


class GlooStreamTransport(StreamTransport):
    """See :class:`StreamTransport`.

    Args:
        opening: as there.
    """

    def __init__(self, opening: Opening) -> None:
        rank = opening.rank
        peers = [p for p in range(len(opening.members)) if p != rank]
        super().__init__(opening, peers)
        group = dist.ProcessGroupGloo(opening.store, rank, self.world_size, FOREVER)
        self._group = cast(_Pairs, group)
        let_senders_finish()
        _GROUPS.append(self._group)
        self._locks = {p: threading.Lock() for p in peers}
        self._sent: dict[int, deque[tuple[dist.Work, Tensor]]] = {p: deque() for p in peers}
        self.listen()

    def send(self, peer: int, slot: Slot, part: Bytes = NOTHING) -> None:
        """See :class:`StreamTransport`; gloo sends on its own, from a copy."""
        head = torch.tensor([*slot, len(part)])
        try:
            with self._locks[peer]:
                # both under the lock: gloo matches by order alone, and another thread's head must
                # not come between
                for tensor in (head, torch.from_numpy(part.copy()))[: 2 if len(part) else 1]:
                    self._sent[peer].append((self._group.send([tensor], peer, 0), tensor))
                # these messages were taken
                while len(self._sent[peer]) > max(_NUM_KEPT, 8 * self.num_slots):
                    self._sent[peer].popleft()[0].wait()
        except RuntimeError:
            return  # its thread has noticed

    def receive(self, peer: int) -> tuple[Slot, Bytes] | None:
        """See :class:`StreamTransport`."""
        head = torch.empty(3, dtype=torch.int64)
        try:
            self._group.recv([head], peer, 0).wait()
            stream, number, nbytes = head.tolist()
            part = np.empty(nbytes, np.uint8) if nbytes else NOTHING
            if nbytes:
                self._group.recv([torch.from_numpy(part)], peer, 0).wait()
        except RuntimeError:
            return None
        return Slot(stream, number), part

    def end(self, timeout_s: float) -> None:
        """See :class:`StreamTransport`.

        A stream ends with the other's goodbye; without it gloo's threads stay.
        """
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return
        with suppress(RuntimeError):
            for sent in self._sent.values():
                for work, _ in sent:
                    work.wait(timedelta(seconds=timeout_s))
        self._sent.clear()
        _GROUPS.remove(self._group)
        del self._group


def open_over_gloo(opening: Opening) -> LaggedTransport:
    """A transport over gloo between all members; blocks."""
    return GlooStreamTransport(opening)
