"""Futures of calls, and what ``rpc_sync`` waits on.

Threads: an outcome is set where frames are handled, on the loop or in a caller that reads its own
answer. Users' callbacks must not run there: they run on the pool.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from pibroch.rpc.calls.pool import Pool
from pibroch.rpc.calls.requests import too_late
from pibroch.rpc.transport.stream import FrameStream
from pibroch.rpc.values.failures import copy_of
from pibroch.wire.reactor import Reactor


class Future(torch.futures.Future[Any]):
    """A ``torch.futures.Future`` whose ``wait`` lets the pool run another thread meanwhile.

    Callbacks (``then``, ``add_done_callback``) run on a thread of the pool, where they may wait for
    other workers.
    """

    def __init__(self, pool: Pool, loop: Reactor) -> None:
        super().__init__()
        self._pool = pool
        self._loop = loop
        self._has_callbacks = False
        self._error: Exception | None = None
        self._groups: tuple[_Group, ...] = ()
        self._is_over = False

    def wait(self) -> Any:
        """The value; blocks until it is set, and raises what the call raised."""
        if not self.done():
            token = self._pool.begin_wait()
            try:
                self._block()
            finally:
                self._pool.end_wait(token)
        if self._error is not None:
            raise copy_of(self._error)
        return super().wait()

    def value(self) -> Any:
        """The value of a future that is done; raises what the call raised."""
        if self._error is not None:
            raise copy_of(self._error)
        return super().value()

    def _block(self) -> None:
        """Wait without raising: a traceback on the kept error would keep the caller's frames."""
        try:
            super().wait()
        except Exception as error:
            error.__traceback__ = None

    def then(
        self, callback: Callable[[torch.futures.Future[Any]], Any]
    ) -> torch.futures.Future[Any]:
        """A future of what ``callback(self)`` returns once this one is done."""
        self._has_callbacks = True
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[torch.futures.Future[Any]], None]) -> None:
        """Run ``callback(self)`` once this one is done."""
        self._has_callbacks = True
        super().add_done_callback(callback)

    def succeed(self, value: object) -> None:
        """Set the value (``calls.Receiver``)."""
        self._is_over = True
        self._groups = ()
        self._complete(functools.partial(self.set_result, value))

    def fail(self, error: BaseException) -> None:
        """Set the error (``calls.Receiver``)."""
        assert isinstance(error, Exception)
        self._error = error
        self._is_over = True
        groups = self._groups
        self._groups = ()
        self._complete(functools.partial(self.set_exception, error))
        for group in groups:
            group.fail(error)

    def follow(self, done: Any) -> None:
        """Take the outcome of a future that is done."""
        try:
            value = done.value()
        except Exception as error:
            self.fail(error)
        else:
            self.succeed(value)

    def _join(self, group: _Group) -> None:
        self._groups = (*self._groups, group)
        # set before the group was added, which would refer to this future for ever
        if self._is_over:
            self._groups = ()
            if self._error is not None:
                group.fail(self._error)

    def _complete(self, function: Callable[[], None]) -> None:
        if self._has_callbacks:
            self._pool.submit(function)
        elif self._loop.is_loop_thread():
            # not at once: ``collect_all`` adds callbacks that ``_has_callbacks`` does not show
            self._loop.complete(function)
        elif self._loop.is_reading():
            self._loop.call_soon(functools.partial(self._loop.complete, function))
        else:
            function()


class _Group(Future):
    """Several futures as one, which is completed once, by the first outcome."""

    def __init__(self, pool: Pool, loop: Reactor) -> None:
        super().__init__(pool, loop)
        self._once = threading.Lock()

    def succeed(self, value: object) -> None:
        """Set the value, unless one future has failed before."""
        if self._once.acquire(blocking=False):
            super().succeed(value)

    def fail(self, error: BaseException) -> None:
        """Set the error of the first future that failed."""
        if self._once.acquire(blocking=False):
            super().fail(error)


def _collect_all(
    futures: Sequence[torch.futures.Future[Any]],
) -> torch.futures.Future[list[torch.futures.Future[Any]]]:
    """``torch.futures.collect_all``, which also ends at the first error of a ``Future`` of RPC.

    Torch's own takes an exception that Python has set for a value, so it would wait for the others.
    """
    own = [each for each in futures if isinstance(each, Future)]
    if not own:
        return _torch_collect_all(list(futures))
    group = _Group(own[0]._pool, own[0]._loop)
    torch._C._collect_all(cast(Any, list(futures))).then(group.follow)
    for each in own:
        each._join(group)
    return group


def _wait_all(futures: Sequence[torch.futures.Future[Any]]) -> list[object]:
    """``torch.futures.wait_all``; see ``_collect_all``."""
    return [future.wait() for future in _collect_all(futures).wait()]


_torch_collect_all = torch.futures.collect_all
torch.futures.collect_all = _collect_all
torch.futures.wait_all = _wait_all


class Waiter:
    """What ``rpc_sync`` waits on: cheaper than a future."""

    __slots__ = ("_done", "_error", "_value", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        self._done = threading.Lock()
        self._done.acquire()
        self._value: object = None
        self._error: BaseException | None = None

    def succeed(self, value: object) -> None:
        """Set the value (``calls.Receiver``)."""
        self._value = value
        self.is_done = True
        self._done.release()

    def fail(self, error: BaseException) -> None:
        """Set the error (``calls.Receiver``)."""
        self._error = error
        self.is_done = True
        self._done.release()

    def wait(self, pool: Pool, timeout_s: float, stream: FrameStream | None = None) -> Any:
        """The value; raises what the call raised.

        If ``stream`` is given this thread reads its own answer from it, so that no thread must be
        woken. The timeout here is only a fallback: the loop's deadline comes first.
        """
        token = pool.begin_wait()
        try:
            if stream is not None:
                stream.read_until(lambda: self.is_done, timeout_s)
            if not self._done.acquire(timeout=timeout_s + 30.0 if timeout_s > 0 else -1):
                raise too_late(timeout_s)
        finally:
            pool.end_wait(token)
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback refers to this frame
        value = self._value
        self._value = None
        return value
