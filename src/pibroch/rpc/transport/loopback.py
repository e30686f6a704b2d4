"""The connection of a worker to itself: tensors are passed on as they are, metadata as bytes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.options import Limits
from pibroch.rpc.transport.connection import Connection, Inbox, Message
from pibroch.rpc.transport.frames import Kind
from pibroch.rpc.values.devices import DeviceMap
from pibroch.rpc.values.messages import TensorInfo, decode_envelope
from pibroch.wire.reactor import Reactor


class Loopback(Connection):
    """A connection without a stream, which is never lost and limits nothing.

    Requests and notes are handled on ``loop``, answers and errors in the thread that sends them.
    """

    uncounted_requests = sys.maxsize

    def __init__(
        self, me: WorkerInfo, incarnation: int, limits: Limits, inbox: Inbox, loop: Reactor
    ) -> None:
        super().__init__(me, incarnation, limits, inbox)
        self._loop = loop

    def place(
        self, tensors: list[torch.Tensor], device_maps: Mapping[str, DeviceMap]
    ) -> tuple[list[TensorInfo], list[Any]]:
        """No descriptions, and the tensors themselves as payload."""
        return [], tensors

    def send(self, kind: Kind, number: int, metadata: bytes, payload: Sequence[Any] = ()) -> None:
        """Deliver a message: an answer at once, anything else on the loop."""
        message = Message(kind, number, decode_envelope(metadata), list(payload))
        if kind == Kind.ANSWER:
            self._on_message(self, message)
        else:
            self._loop.call_soon(functools.partial(self._on_message, self, message))

    def send_failure(self, number: int, metadata: bytes) -> None:
        """Deliver an error in place of an answer, at once."""
        self._on_failure(self, number, metadata)
