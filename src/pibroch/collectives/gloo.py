"""Messages over gloo: TCP between CPUs."""

from __future__ import annotations

import atexit
import ctypes
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from typing import TYPE_CHECKING, Protocol, cast
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch import Tensor

from pibroch.collectives.gloo_threads import let_senders_finish
from pibroch.collectives.transport import PairTransport, Wait
from pibroch.observability.trace import span

if TYPE_CHECKING:
    from pibroch.collectives.ranks import Ranks

COURTESY_S = 5.0
"""How long other messages wait for a sum of gradients. Only where ranks send in different orders does it take so long."""


class _GlooGroup(Protocol):
    """What torch's stubs leave out of ProcessGroupGloo; ranks are those of the group."""

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[Tensor], sender: int, tag: int, /) -> dist.Work: ...
    def allreduce(self, tensors: list[Tensor], /) -> dist.Work: ...


_NUM_KEPT = (
    16  # sums, which gloo's threads let go in any order, and late when they do not get a processor
)


@dataclass(slots=True)
class _Opened:
    """What was opened while a default group lasts.

    Attributes:
        groups: those not closed, and the last sums of each.
        count: how many were opened, by members.
    """

    groups: dict[_GlooGroup, deque[dist.Work]] = field(default_factory=dict)
    count: Counter[tuple[int, ...]] = field(default_factory=Counter)


_OPENED: WeakKeyDictionary[dist.ProcessGroup, _Opened] = WeakKeyDictionary()
_TRANSPORTS: WeakSet[GlooTransport] = WeakSet()


@atexit.register
def _keep_to_the_end() -> None:
    """Never free them: a thread of gloo's that is the last to let go of a sum needs the interpreter, and aborts without one."""
    for kept in (*_OPENED.values(), *_TRANSPORTS):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


class GlooTransport(PairTransport):
    """One gloo context between the members of a group, in their order. Needs torch.distributed's default group.

    It is what `torch.distributed.new_group` makes inside. That function must be called by all ranks of the run and sorts the
    members; this is opened by the members alone and keeps their order.

    Attributes:
        store: of these members and this transport alone.
    """

    def __init__(self, ranks: Ranks) -> None:
        from torch.distributed.distributed_c10d import (
            PrefixStore,
            _get_default_store,
        )  # not in every build of torch

        world = dist.group.WORLD
        assert world is not None
        self._opened = _OPENED.setdefault(world, _Opened())
        self._opened.count[ranks.members] += 1
        name = f"pibroch/{sha256(repr(ranks.members).encode()).hexdigest()}/{self._opened.count[ranks.members]}"
        self.store, timeout = (
            PrefixStore(name, _get_default_store()),
            timedelta(seconds=ranks.timeout_s),
        )
        self._others = [rank for rank in range(ranks.world_size) if rank != ranks.rank]
        group = cast(
            _GlooGroup, dist.ProcessGroupGloo(self.store, ranks.rank, ranks.world_size, timeout)
        )
        self._group: _GlooGroup | None = group
        self._last_sums = self._opened.groups[group] = deque[dist.Work](maxlen=_NUM_KEPT)
        _TRANSPORTS.add(self)
        let_senders_finish()

    def post(self, going: Sequence[Tensor], coming: Sequence[Tensor]) -> Wait:
        """Start all receives, then all sends: what comes then finds its memory.

        gloo tells a sender that it may begin on the connection that carries data the other way. Its own all-to-all posts
        a send first, so the rank that comes first waits until the other's data are through: 3.5 MiB each way over 200 Mbit/s
        take up to 300 ms like that, and 155 ms like this.
        """
        self._open_group()
        work = [self.receive(coming[p], p, 0) for p in self._others if coming[p].numel()]
        work += [self.send(going[p], p, 0) for p in self._others if going[p].numel()]

        def wait() -> None:
            for each in work:
                each.wait()

        return wait

    def send(self, tensor: Tensor, to: int, tag: int) -> dist.Work:
        """See :class:`PairTransport`."""
        return self._open_group().send([tensor], to, tag)

    def receive(self, tensor: Tensor, sender: int, tag: int) -> dist.Work:
        """See :class:`PairTransport`."""
        return self._open_group().recv([tensor], sender, tag)

    def reduce(self, tensor: Tensor) -> Wait:
        """Start a sum, and wait for it on this thread: no callback runs on gloo's.

        gloo's would need the interpreter once more, to let go of the callback; one that ends just then aborts.
        """
        work = self._open_group().allreduce([tensor])
        self._last_sums.append(work)
        with (
            span("sum dense gradients"),
            suppress(RuntimeError),
        ):  # whoever wants the sum is told what went wrong
            work.wait(timedelta(seconds=COURTESY_S))

        def wait() -> None:
            work.wait()

        return wait

    def close(self) -> None:
        """Let gloo end its threads and close its sockets."""
        if self._group is not None:
            del self._opened.groups[self._group]
            self._group = None  # ends its threads, so none is the last to let go of a sum
            self._last_sums.clear()

    def _open_group(self) -> _GlooGroup:
        if self._group is None:
            raise RuntimeError("a channel that was closed")
        return self._group
