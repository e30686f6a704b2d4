"""A value at its owner, which may not be computed yet.

Threads: any thread may set it or wait for it; the lock guards the list of callbacks.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch

from pibroch.errors import RemoteError, RpcTimeoutError
from pibroch.rpc.calls.agent import Agent
from pibroch.rpc.functions import is_future
from pibroch.rpc.values.failures import copy_of

_PLAIN = (torch.Tensor, torch.nn.Parameter, bool, int, float, str, bytes, type(None))


class OwnedValue:
    """The value of a reference: not set at first, then for good either a value or an error."""

    __slots__ = ("_callbacks", "_error", "_lock", "_value", "is_done")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._value: object = None
        self._error: Exception | None = None
        self.is_done = False

    def succeed(self, value: object) -> None:
        """Set the value."""
        self._finish(value, None)

    def fail(self, error: Exception) -> None:
        """Set the error in place of a value."""
        traceback.clear_frames(error.__traceback__)  # the frames may hold large tensors
        self._finish(None, error)

    def get(self) -> Any:
        """The value, which must be set; raises the error instead, if that is set."""
        if self._error is not None:
            raise copy_of(self._error)
        return self._value

    def future(self, agent: Agent) -> torch.futures.Future[Any]:
        """A future of the value, for answering a request."""
        future = agent.future()

        def finish() -> None:
            if self._error is not None:
                future.set_exception(copy_of(self._error))
            else:
                future.set_result(self._value)

        self._when_done(finish)
        return future

    def wait(self, agent: Agent, timeout: float) -> Any:
        """The value; blocks until it is set. The pool may run another thread meanwhile.

        This uses no torch future: the error that a future raises refers to the frames that it went
        through, and these to the future, in which the garbage collector finds no references.

        Raises:
            RpcTimeoutError: when it is not set in time.
            Exception: the error that is set.
        """
        if not self.is_done:
            timeout_s = agent.timeout_s(timeout)
            if not self.is_done_within(agent, timeout_s):
                raise RpcTimeoutError(
                    f"no value within {timeout_s:g} s", "it to be made in time", "wait longer"
                )
        return self.get()

    def is_done_within(self, agent: Agent, timeout_s: float) -> bool:
        """Wait for value or error, without limit for 0; returns whether one is set.

        The pool may run another thread meanwhile.
        """
        done = threading.Event()
        self._when_done(done.set)
        with agent.pool.waiting():
            return done.wait(timeout_s or None)

    def _when_done(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self.is_done:
                self._callbacks.append(callback)
                return
        callback()

    def _finish(self, value: object, error: Exception | None) -> None:
        with self._lock:
            if self.is_done:
                return
            self._value = value
            self._error = error
            self.is_done = True
            callbacks = self._callbacks
            self._callbacks = []
        for callback in callbacks:
            callback()

    def is_plain(self) -> bool:
        """Whether dropping the value runs no code of users."""
        return self._error is None and type(self._value) in _PLAIN


def fill(owned: OwnedValue, make: Callable[[], Any]) -> None:
    """Set ``owned`` to what ``make()`` returns or raises; of a future, to its result when done."""
    try:
        result = make()
    except BaseException as error:
        # without this frame, which holds the arguments and cannot be cleared yet
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        owned.fail(
            error
            if isinstance(error, Exception)
            else RemoteError(f"{type(error).__name__}: {error}")
        )
        return
    if is_future(result):
        result.add_done_callback(lambda done: fill(owned, done.value))
    else:
        owned.succeed(result)
