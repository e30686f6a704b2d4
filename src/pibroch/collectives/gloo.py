"""Messages over gloo: TCP between CPUs."""

from __future__ import annotations

import atexit
import ctypes
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, cast
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch.distributed as dist
from torch import Tensor

from pibroch.collectives.gloo_threads import let_senders_finish
from pibroch.collectives.group_store import store_between
from pibroch.collectives.transport import Group, Transport, Wait
from pibroch.observability.trace import span

COURTESY_S = 5.0
"""How long other messages wait for a sum of gradients.

Only where ranks send in different orders does it take so long.
"""


class _GlooGroup(Protocol):
    """What torch's stubs leave out of ProcessGroupGloo; ranks are those of the group."""

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[Tensor], sender: int, tag: int, /) -> dist.Work: ...
    def allreduce(self, tensors: list[Tensor], /) -> dist.Work: ...


# sums, which gloo's threads let go in any order, and late when they do not get a processor
_NUM_KEPT = 16


@dataclass(slots=True, eq=False)
class _Connection:
    """A gloo context and what it does, which outlive the transport while something is under way.

    Attributes:
        group: ``None`` once closed.
        sums: the last ones.
        messages: those not seen to be done, which gloo says only of those that were waited for.
    """

    group: _GlooGroup | None
    sums: deque[dist.Work] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    messages: list[dist.Work] = field(default_factory=list)

    def note(self, message: dist.Work) -> dist.Work:
        """Remember a message until it is done."""
        self.messages = [each for each in self.messages if not each.is_completed()]
        self.messages.append(message)
        return message

    def close(self) -> None:
        """End gloo's threads, so that none is the last to let go of a sum, and its sockets."""
        self.group = None
        self.sums.clear()
        self.messages.clear()


_OPENED: WeakKeyDictionary[dist.ProcessGroup, set[_Connection]] = WeakKeyDictionary()
"""By default group, while it lasts, the connections that are not closed."""
_TRANSPORTS: WeakSet[GlooTransport] = WeakSet()


@atexit.register
def _keep_to_the_end() -> None:
    """Never free what is open now.

    A thread of gloo's that is the last to let go of a sum needs the interpreter, and aborts without
    one.
    """
    for kept in (*_OPENED.values(), *_TRANSPORTS):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _close_idle(opened: set[_Connection], connection: _Connection) -> None:
    """Close what is done; what travels or failed stays: to end it could wait for a lost rank."""
    if all(each.is_completed() for each in (*connection.sums, *connection.messages)):
        opened.discard(connection)
        connection.close()


class GlooTransport(Transport):
    """One gloo context between the members of a group, in their order.

    Needs torch.distributed's default group.

    A transport that is dropped closes itself, unless something is under way. It is what
    `torch.distributed.new_group` makes inside. That function must be called by all ranks of the run
    and sorts the members; this is opened by the members alone and keeps their order.

    Attributes:
        store: of these members and this transport alone.
    """

    def __init__(self, ranks: Group) -> None:
        self.store = store_between(ranks, "channel")
        world = dist.group.WORLD
        assert world is not None
        self._opened = _OPENED.setdefault(world, set())
        timeout = timedelta(seconds=ranks.timeout_s)
        self._others = [rank for rank in range(ranks.world_size) if rank != ranks.rank]
        group = dist.ProcessGroupGloo(self.store, ranks.rank, ranks.world_size, timeout)
        self._connection = _Connection(cast(_GlooGroup, group))
        self._opened.add(self._connection)
        self._end = finalize(self, _close_idle, self._opened, self._connection)
        self._end.atexit = False  # see `_keep_to_the_end`
        _TRANSPORTS.add(self)
        let_senders_finish()

    def post(self, going: Sequence[Tensor], coming: Sequence[Tensor]) -> Wait:
        """Start all receives, then all sends: what comes then finds its memory.

        gloo tells a sender that it may begin on the connection that carries data the other way. Its
        own all-to-all posts a send first, so the rank that comes first waits until the other's data
        are through: 3.5 MiB each way over 200 Mbit/s take up to 300 ms like that, and 155 ms like
        this.
        """
        self._open_group()
        work = [self.receive(coming[p], p, 0) for p in self._others if coming[p].numel()]
        work += [self.send(going[p], p, 0) for p in self._others if going[p].numel()]

        def wait() -> None:
            for each in work:
                each.wait()

        return wait

    def send(self, tensor: Tensor, to: int, tag: int) -> dist.Work:
        """Start to send a message; those of one tag arrive in their order. Ends at once."""
        return self._connection.note(self._open_group().send([tensor], to, tag))

    def receive(self, tensor: Tensor, sender: int, tag: int) -> dist.Work:
        """Start to receive a message; ends at once."""
        return self._connection.note(self._open_group().recv([tensor], sender, tag))

    def reduce(self, tensor: Tensor) -> Wait:
        """Start a sum, and wait for it on this thread: no callback runs on gloo's.

        gloo's would need the interpreter once more, to let go of the callback; one that ends just
        then aborts.
        """
        work = self._open_group().allreduce([tensor])
        self._connection.sums.append(work)
        # an error is raised where the sum is waited for
        with span("sum dense gradients"), suppress(RuntimeError):
            work.wait(timedelta(seconds=COURTESY_S))
        return work.wait

    def close(self) -> None:
        """Let gloo end its threads and close its sockets."""
        self._opened.discard(self._connection)
        self._connection.close()

    def _open_group(self) -> _GlooGroup:
        if self._connection.group is None:
            raise RuntimeError("a channel that was closed")
        return self._connection.group
