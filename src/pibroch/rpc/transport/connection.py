"""A connection between two workers.

Messages with their tensors over one stream (and shared memory, and further streams).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import msgspec
import torch

from pibroch.errors import PibrochError, ProtocolError, RpcError
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.options import Limits
from pibroch.rpc.policies import POLICIES
from pibroch.rpc.transport.bulk import BULK_FROM_BYTES, BulkReceiver, BulkSender
from pibroch.rpc.transport.descriptors import HasDescriptor
from pibroch.rpc.transport.frames import Allocate, Frame, Kind, header
from pibroch.rpc.transport.sharing import SHARE_FROM_BYTES, Sharing
from pibroch.rpc.transport.stream import Buffer, FrameStream
from pibroch.rpc.values.devices import DeviceMap, stage, unstage
from pibroch.rpc.values.failures import failure_of
from pibroch.rpc.values.messages import Envelope, TensorInfo, decode_envelope, encode
from pibroch.rpc.values.tensors import (
    bytes_with_room,
    cut,
    describe,
    empty,
    in_memory_order,
    in_own_order,
    read_only_bytes,
)

log = logging.getLogger(__name__)

_MESSAGES = (Kind.REQUEST, Kind.NOTE, Kind.ANSWER)
_SHARED_MEMORY = (Kind.SEGMENT, Kind.FREE, Kind.DROP)
UNREAD_BYTES = 64 << 20
"""Of errors in place of answers: a peer that reads none of so many is lost."""
_DEAF = "it does not read its answers"
# small tensors are copied behind their metadata: one buffer, one system call
_COPY_BELOW_BYTES = 16 << 10


@dataclass(slots=True)
class Message:
    """A message as it arrived."""

    kind: Kind
    number: int
    envelope: Envelope
    tensors: list[torch.Tensor]
    num_bytes: int = 0  # of the tensors, where somebody has counted them


@dataclass(slots=True)
class _Arriving:
    """A message whose payload is being received."""

    envelope: Envelope
    tensors: list[torch.Tensor] = field(default_factory=list)
    kind: Kind = Kind.NOTE
    number: int = 0


class Inbox(Protocol):
    """Hears, on the loop, what a connection has to report."""

    def on_message(self, connection: Connection, message: Message) -> None:
        """A whole message."""

    def on_failure(self, connection: Connection, number: int, metadata: bytes) -> None:
        """Number and metadata of a ``FAILURE`` frame."""

    def on_lost(self, connection: Connection, reason: str) -> None:
        """It is gone; once."""


class Connection:
    """What one worker dialled and both use: requests and notes one way, answers the other.

    Args:
        peer: who is at the other end.
        incarnation: and which life of it, 0 as long as unknown.
        limits: on what it may send.
        inbox: hears of what comes.
    """

    uncounted_requests: ClassVar[int] = (
        16  # of the peer's, under way, before their tensors are counted
    )

    def __init__(self, peer: WorkerInfo, incarnation: int, limits: Limits, inbox: Inbox) -> None:
        self.peer = peer
        self.incarnation = incarnation
        self.limits = limits
        self.number = 0  # the dialler's number for it, at its other end
        self._on_message = inbox.on_message
        self._on_failure = inbox.on_failure
        self._on_lost = inbox.on_lost
        self._lock = threading.Lock()
        self.stream: FrameStream | None = None
        self.only_stream: FrameStream | None = (
            None  # the same, when all answers come on it and callers may read them
        )
        self._backlog: list[
            tuple[Sequence[Buffer], Sequence[HasDescriptor]]
        ] = []  # until there is a stream
        self.sharing: Sharing | None = None
        self._bulk_streams: list[FrameStream] = []
        self._sender = BulkSender()
        self._receiver = BulkReceiver(limits.message_bytes)
        self._incomplete: dict[int, _Arriving] = {}  # messages by the transfers that they wait for
        self.refusal: PibrochError | None = None  # why the peer did not let this worker in
        # and why
        self.is_lost = False
        self.loss = ""
        self.left_on_purpose = self.is_overdue = False  # the latter: it has not taken its answers
        # of errors that were sent since all was with the kernel
        self._unread_bytes = 0
        self._is_deaf = False
        self.num_at_work = self.bytes_at_work = 0  # the peer's, kept by ``service.py``

    # sending, from any thread

    def place(
        self, tensors: list[torch.Tensor], device_maps: Mapping[str, DeviceMap]
    ) -> tuple[list[TensorInfo], list[Any]]:
        """Where each tensor's bytes will be, and the buffers that go behind the metadata.

        The caller must hold the tensors in this list alone, and not use them afterwards: received
        ones may be given back.
        """
        infos = list[TensorInfo]()
        payload = list[Buffer]()
        devices = stage(tensors, device_maps, self.peer.name)
        # what cannot be sent shows before anything is given away
        described = [describe(tensor) for tensor in tensors]
        for place, info in enumerate(described):
            if info.layout is not None:
                tensors[place] = in_memory_order(tensors[place], info)
            # held by this variable and the list: what ``give_back`` is told
            tensor = tensors[place]
            num_bytes = tensor.numel() * tensor.element_size()
            shared: TensorInfo | None = None  # not where the connection is gone
            if self.sharing is not None and num_bytes >= SHARE_FROM_BYTES:
                shared = self.sharing.give_back(tensor, info, 2) or self.sharing.put(
                    tensor, info, num_bytes
                )
            if shared is not None:
                infos.append(shared)
                continue
            data = read_only_bytes(tensor, _COPY_BELOW_BYTES)
            if (
                isinstance(data, memoryview)
                and num_bytes >= BULK_FROM_BYTES
                and self._sender.is_ready
            ):
                infos.append(msgspec.structs.replace(info, transfer=self._sender.send(data)))
                continue
            infos.append(info)
            payload.append(data)
        if devices:
            infos = [
                msgspec.structs.replace(info, device=d)
                for info, d in zip(infos, devices, strict=True)
            ]
        return infos, payload

    def send(
        self, kind: Kind, number: int, metadata: bytes, payload: Sequence[Buffer] = ()
    ) -> None:
        """Send a frame; never blocks.

        What cannot be sent any more is dropped: ``on_lost`` says so.
        """
        payload_bytes = sum(map(len, payload))
        report = b"" if self.sharing is None else self.sharing.report()
        start = report + header(kind, number, len(metadata), payload_bytes)
        if payload_bytes <= _COPY_BELOW_BYTES:
            self.send_buffers([b"".join((start, metadata, *payload))])
        else:
            self.send_buffers([start + metadata, *payload])

    def send_failure(self, number: int, metadata: bytes) -> None:
        """Send an error in place of an answer; never blocks.

        A peer that reads none of them is lost in the end.
        """
        self.send(Kind.FAILURE, number, metadata)
        self._unread_bytes = self._unread_bytes + len(metadata) if self.num_queued else 0
        stream = self.stream
        if stream is not None and min(self._unread_bytes, stream.num_queued_bytes) > UNREAD_BYTES:
            self._is_deaf = True
            stream.close_soon(_DEAF)

    def send_buffers(
        self, buffers: Sequence[Buffer], descriptors: Sequence[HasDescriptor] = ()
    ) -> None:
        """Send whole frames."""
        stream = self.stream
        if stream is None:
            with self._lock:
                stream = self.stream
                if stream is None:
                    if not self.is_lost:
                        self._backlog.append((buffers, descriptors))
                    return
        stream.send(buffers, descriptors)

    @property
    def was_open(self) -> bool:
        """Whether the peer was ever admitted."""
        return self.stream is not None

    @property
    def num_queued(self) -> int:
        """Buffers that are not with the kernel yet."""
        queued = self.stream.num_queued if self.stream is not None else len(self._backlog)
        return queued + self._sender.num_queued

    @property
    def bytes_owed(self) -> int:
        """What the peer has not taken of what was sent.

        In queues, and in shared memory that it has not given back.
        """
        owed = self._sender.num_queued_bytes
        if self.stream is not None:
            owed += self.stream.num_queued_bytes
        return owed if self.sharing is None else owed + self.sharing.bytes_owed

    # on the loop

    def open(self, stream: FrameStream, surplus: bytes) -> None:
        """The peer is admitted: what waited is sent, and reading begins."""
        with self._lock:
            for buffers, descriptors in self._backlog:
                stream.send(buffers, descriptors)
            self._backlog.clear()
            self.stream = stream
            self.only_stream = (
                stream if self.sharing is not None and POLICIES.caller_reads else None
            )
        stream.start(surplus)

    def open_bulk(
        self,
        make_stream: Callable[[Allocate, Callable[[Frame], None], Callable[[], None]], FrameStream],
        surplus: bytes,
    ) -> None:
        """One more stream, for large tensors."""
        stream = make_stream(
            self._receiver.allocate, self._on_chunk, lambda: self._sender.pull(stream)
        )
        self._bulk_streams.append(stream)
        self._sender.add(stream)
        stream.start(surplus)

    def lose(self, reason: str) -> None:
        """Close it for good."""
        with self._lock:
            if self.is_lost:
                return
            # in this order, for whoever looks without the lock
            self.loss = reason
            self.is_lost = True
            self._backlog.clear()
        for stream in (*self._bulk_streams, *([self.stream] if self.stream is not None else [])):
            stream.close(reason)
        self._sender.clear()
        self._receiver.clear()
        self._incomplete.clear()
        if self.sharing is not None:
            self.sharing.close()
        self._on_lost(self, reason)

    def allocate(self, frame: Frame) -> list[memoryview]:
        """Memory for a frame's payload (``frames.Allocate``)."""
        if frame.kind not in _MESSAGES:
            raise ProtocolError(f"a payload behind a frame of kind {frame.kind.name}", "none")
        envelope = decode_envelope(frame.metadata)
        inline = [info for info in envelope.tensors if info.is_inline]
        expected = sum(info.num_bytes() for info in inline)
        if expected != frame.payload_bytes:
            raise ProtocolError(
                f"{frame.payload_bytes:,} bytes of tensors", f"{expected:,}, as their shapes say"
            )
        arriving = _Arriving(envelope)
        buffers = []
        for info in inline:
            tensor, buffer = empty(info)
            arriving.tensors.append(tensor)
            buffers.append(buffer)
        frame.target = arriving
        return buffers

    def on_frame(self, frame: Frame) -> None:
        """A whole frame is there."""
        if self._is_deaf:  # what was read together with the frame that was one too many
            raise ProtocolError(_DEAF)
        if frame.kind in _MESSAGES:
            message = self._message(frame)
            if message is not None:
                self._on_message(self, message)
        elif frame.kind == Kind.FAILURE:
            self._on_failure(self, frame.number, frame.metadata)
        elif frame.kind == Kind.GOODBYE:
            self.left_on_purpose = True
        elif self.sharing is not None and frame.kind in _SHARED_MEMORY:
            self._on_shared_memory(self.sharing, frame)
        else:
            raise ProtocolError(
                f"a frame of kind {frame.kind.name}", "one that belongs on this stream"
            )

    def _on_shared_memory(self, sharing: Sharing, frame: Frame) -> None:
        if frame.kind == Kind.FREE:
            sharing.on_free(frame.metadata)
        elif frame.kind == Kind.DROP:
            sharing.on_drop(frame.number)
        else:
            assert self.stream is not None
            sharing.on_segment(frame.number, frame.metadata, self.stream.take_descriptor())

    def _message(self, frame: Frame) -> Message | None:
        """The message of a frame, if complete.

        An unreadable one is reported to its sender, and the connection lives on.
        """
        try:
            arriving = frame.target
            if not isinstance(arriving, _Arriving):
                envelope = decode_envelope(frame.metadata)
                arriving = _Arriving(
                    envelope,
                    cut([each for each in envelope.tensors if each.is_inline], frame.payload),
                )
            arriving.kind = frame.kind
            arriving.number = frame.number
            if self._waits(arriving):
                return None
            return Message(frame.kind, frame.number, arriving.envelope, self._in_order(arriving))
        except RpcError as error:
            log.warning("an unreadable message of worker %r: %s", self.peer.name, error)
            self.unreadable(frame.kind, frame.number, error)
            return None

    def _waits(self, arriving: _Arriving) -> bool:
        """Whether some of a message's transfers are not complete; it goes on with the last of them."""
        for info in arriving.envelope.tensors:
            if info.transfer is not None and not self._receiver.is_complete(info.transfer):
                if len(self._incomplete) >= self.limits.requests:
                    raise ProtocolError(
                        f"{len(self._incomplete):,} messages that wait for their transfers", "fewer"
                    )
                self._incomplete[info.transfer] = arriving
                return True
        return False

    def _on_chunk(self, frame: Frame) -> None:
        if not self._receiver.arrived(frame):
            return
        arriving = self._incomplete.pop(frame.number, None)
        if arriving is None:
            return
        try:
            if self._waits(arriving):
                return
            message = Message(
                arriving.kind, arriving.number, arriving.envelope, self._in_order(arriving)
            )
        except RpcError as error:
            self.unreadable(arriving.kind, arriving.number, error)
            return
        self._on_message(self, message)

    def unreadable(self, kind: Kind, number: int, error: RpcError) -> None:
        """Tell whoever waits for it that a message could not be read."""
        failure = encode(failure_of(error))
        if kind == Kind.REQUEST:
            self.send_failure(number, failure)
        elif kind == Kind.ANSWER:
            self._on_failure(self, number, failure)

    def _in_order(self, arriving: _Arriving) -> list[torch.Tensor]:
        """All tensors of a message, those in shared memory among them."""
        infos = arriving.envelope.tensors
        tensors = arriving.tensors
        if not all(info.is_inline for info in infos):
            inline = iter(tensors)
            tensors = [next(inline) if info.is_inline else self._elsewhere(info) for info in infos]
        with_room = sum(bytes_with_room(info) for info in infos if info.layout is not None)
        # a place in shared memory may be named many times
        if with_room > self.limits.message_bytes:
            raise ProtocolError(
                f"tensors of up to {with_room:,} bytes with room between their rows",
                f"at most {self.limits.message_bytes:,}",
                "send them contiguous",
            )
        for place, info in enumerate(infos):
            if info.layout is not None:
                tensors[place] = in_own_order(tensors[place], info)
            if info.device is not None:
                tensors[place] = unstage(tensors[place], info.device)
            if info.requires_grad and (
                tensors[place].is_floating_point() or tensors[place].is_complex()
            ):
                tensors[place].requires_grad_()
        return tensors

    def _elsewhere(self, info: TensorInfo) -> torch.Tensor:
        if info.transfer is not None:
            return self._receiver.take(info)
        if self.sharing is None:
            raise ProtocolError("a tensor in shared memory", "its bytes")
        return self.sharing.get(info)
