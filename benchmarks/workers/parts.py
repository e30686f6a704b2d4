"""Where the time of a rank's training thread goes. No pibroch, no TorchRec: workers of both use it.

A part begins and ends on the training thread, within another part or within none; hooks on
autograd's nodes find the parts of a backward pass, which runs on the thread that calls it where
everything is on the CPU.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor
from torch.autograd import Variable

T = TypeVar("T")
Span = tuple[str, float, float]
"""Name, begin, end."""


def own_times(spans: Iterable[Span]) -> dict[str, float]:
    """The time of each part without what lies within it, by its path; spans of one thread.

    >>> spans = [("wait", 2.0, 5.0), ("forward", 1.0, 6.0)]
    >>> own_times([*spans, ("backward", 6.0, 8.0), ("wait", 7.0, 8.0)])
    {'forward': 2.0, 'forward/wait': 3.0, 'backward': 1.0, 'backward/wait': 1.0}
    """
    own: dict[str, float] = defaultdict(float)
    around: list[tuple[str, float]] = []
    for name, begin, end in sorted(spans, key=lambda span: (span[1], -span[2])):
        while around and around[-1][1] <= begin:
            around.pop()
        parent = around[-1][0] if around else ""
        path = f"{parent}/{name}" if parent else name
        own[path] += end - begin
        if parent:
            own[parent] -= end - begin
        around.append((path, end))
    return dict(own)


class Parts:
    """Records parts while ``is_on``; costs next to nothing otherwise."""

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self._open: list[tuple[str, float]] = []
        self._spans: list[Span] = []

    def begin(self, name: str) -> None:
        """Begin a part."""
        if self.is_on:
            self._open.append((name, time.perf_counter()))

    def end(self, name: str) -> None:
        """End the part ``name`` that began last, and what is open within it.

        Nothing when there is none.
        """
        while any(name == each for each, _ in self._open):
            inner, begin = self._open.pop()
            self._spans.append((inner, begin, time.perf_counter()))
            if inner == name:
                return

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The time within is the part's."""
        self.begin(name)
        try:
            yield
        finally:
            self.end(name)

    def each(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """``items``; the time until each is there is the part's."""
        iterator = iter(items)
        while True:
            with self.part(name):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def timed(self, name: str, function: Callable[..., T]) -> Callable[..., T]:
        """``function``; its time is the part's."""

        @wraps(function)
        def within(*args: Any, **kwargs: Any) -> T:
            with self.part(name):
                return function(*args, **kwargs)

        return within

    def in_backward(self, name: str, tensor: Tensor) -> None:
        """What the node that made ``tensor`` does in the backward pass is the part ``name``."""
        if self.is_on and tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(lambda _: self.begin(name))
            tensor.grad_fn.register_hook(lambda *_: self.end(name))

    def after_backward(self, name: str, loss: Tensor) -> None:
        """What is left to do once the gradients are there is the part ``name``.

        It ends with the part around it.
        """
        if self.is_on:
            loss.register_hook(
                lambda _: Variable._execution_engine.queue_callback(lambda: self.begin(name))
            )

    def take_ms(self) -> dict[str, float]:
        """Milliseconds by path since the last call, see :func:`own_times`."""
        spans = self._spans
        self._spans = []
        return {path: seconds * 1e3 for path, seconds in own_times(spans).items()}


NO_PARTS = Parts(False)
