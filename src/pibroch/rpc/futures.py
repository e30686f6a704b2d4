"""What a call gives before its answer is there."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from pibroch.errors import RpcTimeoutError
from pibroch.rpc.failures import copy_of
from pibroch.rpc.pool import Pool
from pibroch.rpc.reactor import Reactor
from pibroch.rpc.stream import Stream


class Future(torch.futures.Future[Any]):
    """A ``torch.futures.Future`` whose ``wait`` lets another thread of the pool work meanwhile.

    Callbacks (``then``, ``add_done_callback``) run on a thread of the pool, where they may wait for other workers.
    """

    def __init__(self, pool: Pool, loop: Reactor | None = None) -> None:
        super().__init__()
        self._pool, self._loop = pool, loop
        self._has_callbacks = False
        self._error: Exception | None = None

    def wait(self) -> Any:
        """The value; blocks until it is there, raises what the call raised."""
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
        """Wait, and leave it to the caller to raise: a traceback on the kept error would refer to the caller's frames."""
        try:
            super().wait()
        except Exception as error:
            error.__traceback__ = None

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> torch.futures.Future[Any]:
        """A future of what ``callback(self)`` returns once this one is done."""
        self._has_callbacks = True
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[torch.futures.Future[Any]], None]) -> None:
        """Run ``callback(self)`` once this one is done."""
        self._has_callbacks = True
        super().add_done_callback(callback)

    def succeed(self, value: object) -> None:
        """Set the value (``calls.Receiver``)."""
        self._complete(functools.partial(self.set_result, value))

    def fail(self, error: BaseException) -> None:
        """Set the error (``calls.Receiver``)."""
        assert isinstance(error, Exception)
        self._error = error
        self._complete(functools.partial(self.set_exception, error))

    def _complete(self, function: Callable[[], None]) -> None:
        if self._has_callbacks:
            self._pool.submit(function)
        elif self._loop is not None and self._loop.is_here():
            self._loop.complete(function)  # ``collect_all`` adds callbacks that cannot be seen from here
        elif self._loop is not None and self._loop.is_reading():
            self._loop.call_soon(functools.partial(self._loop.complete, function))
        else:
            function()


class Waiter:
    """What ``rpc_sync`` waits on: less than a future."""

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

    def wait(self, pool: Pool, timeout_s: float, stream: Stream | None = None) -> Any:
        """The value; raises what the call raised.

        If it can, this thread reads its answer from ``stream`` itself: nobody has to be woken then. The timeout is a second
        net: the loop's deadline comes first.
        """
        token = pool.begin_wait()
        try:
            if stream is not None:
                stream.read_until(lambda: self.is_done, timeout_s)
            if not self._done.acquire(timeout=timeout_s + 30.0 if timeout_s > 0 else -1):
                raise RpcTimeoutError(
                    f"no answer within {timeout_s} s", "one in time", "raise the timeout, or see the callee's log"
                )
        finally:
            pool.end_wait(token)
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback refers to this frame
        value, self._value = self._value, None
        return value
