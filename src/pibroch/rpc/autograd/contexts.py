"""Contexts: the state of a distributed forward and its backward passes at one worker.

Threads: contexts are used from any thread; locks guard the table of contexts and each context's
gradients. The current context is a thread's own.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pibroch.errors import ProtocolError
from pibroch.rpc.autograd.passes import Pass
from pibroch.rpc.autograd.send_receive import Sent
from pibroch.rpc.info import WorkerInfo

_NUM_REMEMBERED = 4096  # closed contexts whose late messages are recognised
MAX_OPEN = 4096  # contexts that messages of one other worker may have opened here
MAX_SENT = 1 << 16  # messages with send functions in one context
MAX_PASSES = 256  # backward passes under way in one context


@dataclass(slots=True, eq=False)
class Context:
    """One context at one worker.

    Attributes:
        id: the same on all workers.
        creator: id and incarnation of the worker that opened it; when that is lost, so is the
            context.
        origin: id of the worker whose message opened it here.
        anchor: the leaf behind all receive functions.
        orders: counts the messages with send or receive functions.
        sent: messages with send functions, by number.
        reached: workers with which messages of this context were exchanged.
        passes: backward passes under way, by number.
    """

    id: int
    creator: tuple[int, int]
    origin: int
    anchor: Tensor = field(default_factory=lambda: torch.empty(0, requires_grad=True))
    orders: Iterator[int] = field(default_factory=itertools.count)
    sent: dict[int, Sent] = field(default_factory=dict)
    reached: set[WorkerInfo] = field(default_factory=set)
    passes: dict[int, Pass] = field(default_factory=dict)
    _gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def gradients(self) -> dict[Tensor, Tensor]:
        """The sum of each leaf's gradients over the backward passes so far."""
        with self._lock:
            return dict(self._gradients)

    def accumulate(self, gradients: dict[Tensor, Tensor]) -> None:
        """Add the gradients of a pass, not in place, as the user may hold the sums so far.

        The tensors then belong to the context.
        """
        with self._lock:
            for leaf, gradient in gradients.items():
                before = self._gradients.get(leaf)
                self._gradients[leaf] = gradient if before is None else before + gradient

    def clear(self) -> None:
        """Drop gradients and send functions."""
        with self._lock:
            self._gradients.clear()
        self.sent.clear()


class Contexts:
    """All contexts that are open at this worker, and the current one of each thread."""

    def __init__(self) -> None:
        self._open: dict[int, Context] = {}
        self._closed: OrderedDict[int, None] = OrderedDict()
        self._num_of: Counter[int] = Counter()  # open contexts by origin
        self._lock = threading.Lock()
        self._of_thread = threading.local()

    def open(
        self, context_id: int, creator: tuple[int, int], origin: int | None = None
    ) -> Context | None:
        """The context of this id, made when it is new; ``None`` when it is closed already.

        Args:
            context_id: of the context.
            creator: id and incarnation of the worker that opened it.
            origin: id of the worker whose message this is; absent for this worker's own contexts.

        Raises:
            ProtocolError: when the origin has too many open here.
        """
        with self._lock:
            if context_id in self._closed:
                return None
            context = self._open.get(context_id)
            if context is None:
                if origin is not None and self._num_of[origin] >= MAX_OPEN:
                    raise ProtocolError(
                        f"one more autograd context than the {MAX_OPEN:,} that worker {origin} has"
                        " open here",
                        f"at most {MAX_OPEN:,}",
                        "leave the with blocks of contexts that are done",
                    )
                context = self._open[context_id] = Context(
                    context_id, creator, creator[0] if origin is None else origin
                )
                self._num_of[context.origin] += 1
            return context

    def find(self, context_id: int) -> Context | None:
        """The context of this id, ``None`` when it is not open here."""
        return self._open.get(context_id)

    def get(self, context_id: int) -> Context:
        """The context of this id.

        Raises:
            RuntimeError: when it is not open here.
        """
        context = self._open.get(context_id)
        if context is None:
            raise RuntimeError(
                f"got autograd context {context_id}, which is not open on this worker (Could not"
                f" find autograd context with id: {context_id}); need the id that"
                " autograd.context() gave, inside its with block; do: see whether a call reached"
                " this worker in it"
            )
        return context

    def all(self) -> list[Context]:
        """All open contexts."""
        with self._lock:
            return [*self._open.values()]

    def close(self, context_id: int, for_good: bool = True) -> Context | None:
        """Forget a context and return it, if it was open.

        With ``for_good`` late messages do not open it again.
        """
        with self._lock:
            if for_good:
                self._closed[context_id] = None
            if len(self._closed) > _NUM_REMEMBERED:
                self._closed.popitem(last=False)
            context = self._open.pop(context_id, None)
            if context is not None:
                self._num_of[context.origin] -= 1
                if not self._num_of[context.origin]:
                    del self._num_of[context.origin]
            return context

    def current(self) -> int | None:
        """The context that the calling thread is in."""
        return getattr(self._of_thread, "context", None)

    @contextmanager
    def entered(self, context_id: int) -> Iterator[None]:
        """Put the calling thread into this context inside the ``with`` block."""
        before = self.current()
        self._of_thread.context = context_id
        try:
            yield
        finally:
            self._of_thread.context = before
