"""A connection between two workers: messages with their tensors over one stream.

Large tensors travel through shared memory or over further streams.

Threads: any thread sends. Frames are handled (``on_frame`` and what it calls) by whoever reads the
stream: the loop, or a caller that waits for its own answer (``stream.py``), never both at once. The
lock only orders ``open`` and ``lose`` with threads that send before there is a stream.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import msgspec
import torch

from pibroch.errors import PibrochError, ProtocolError, RpcError
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.options import Limits
from pibroch.rpc.transport.bulk import BULK_FROM_BYTES, BulkReceiver, BulkSender
from pibroch.rpc.transport.frames import Frame, Kind, header
from pibroch.rpc.transport.sharing import SHARE_FROM_BYTES, Sharing
from pibroch.rpc.transport.stream import Buffer, FrameStream
from pibroch.rpc.values.devices import DeviceMap, stage, unstage
from pibroch.rpc.values.failures import encode_failure
from pibroch.rpc.values.messages import Envelope, TensorInfo, decode_envelope
from pibroch.rpc.values.tensors import (
    bytes_of,
    bytes_with_room,
    cut,
    describe,
    empty,
    in_memory_order,
    in_own_order,
    read_only_bytes,
)
from pibroch.wire.segments import OwnSegment

log = logging.getLogger(__name__)

_MESSAGES = (Kind.REQUEST, Kind.NOTE, Kind.ANSWER)
_SHARED_MEMORY = (Kind.SEGMENT, Kind.FREE, Kind.DROP)
UNREAD_BYTES = 64 << 20
"""A peer that leaves so many bytes of errors in place of answers unread is lost."""
_DOES_NOT_READ = "it does not read its answers"
# small tensors are copied behind their metadata: one buffer, one system call
_COPY_BELOW_BYTES = 16 << 10


@dataclass(slots=True)
class Message:
    """A message that was received, or is being received.

    Attributes:
        tensors: those behind the metadata; in the end all, in their order.
        references: the remote references, once somebody has counted them (``calls/packing.py``).
        num_bytes: of the tensors, where they were counted (``calls/service.py``).
    """

    kind: Kind
    number: int
    envelope: Envelope
    tensors: list[torch.Tensor]
    references: list[Any] = field(default_factory=list)
    num_bytes: int = 0


class Inbox(Protocol):
    """Receives what a connection reports, in the thread that handles its frames."""

    def on_message(self, connection: Connection, message: Message) -> None:
        """Handle a whole message."""

    def on_failure(self, connection: Connection, number: int, metadata: bytes) -> None:
        """Handle a ``FAILURE`` frame: its number and metadata."""

    def on_lost(self, connection: Connection, reason: str) -> None:
        """Handle the connection's end; called once."""


class Connection:
    """A connection that one worker dialled: requests and notes one way, answers the other.

    Args:
        peer: the worker at the other end.
        incarnation: its incarnation, 0 while unknown.
        limits: on what it may send.
        inbox: receives what arrives.
    """

    # so many requests of the peer may be under way before their tensors are counted
    uncounted_requests: ClassVar[int] = 16

    def __init__(self, peer: WorkerInfo, incarnation: int, limits: Limits, inbox: Inbox) -> None:
        self.peer = peer
        self.incarnation = incarnation
        self.limits = limits
        self.number = 0  # the connection id that the dialler chose; set on the accepting side
        self._on_message = inbox.on_message
        self._on_failure = inbox.on_failure
        self._on_lost = inbox.on_lost
        self._lock = threading.Lock()
        self.stream: FrameStream | None = None
        # the same stream, when all answers come on it, so that callers may read their own
        self.only_stream: FrameStream | None = None
        # what to send once there is a stream
        self._backlog: list[tuple[Sequence[Buffer], Sequence[OwnSegment]]] = []
        self.sharing: Sharing | None = None
        self._further_streams: list[FrameStream] = []
        self._sender = BulkSender()
        self._receiver = BulkReceiver(limits.message_bytes)
        # with ``on_chunk`` what a further stream for large tensors needs
        self.pull = self._sender.pull
        self.allocate_chunk = self._receiver.allocate
        # messages by the number of the transfer that they wait for
        self._incomplete: dict[int, Message] = {}
        self.refusal: PibrochError | None = None  # why the peer did not admit this worker
        self.is_lost = False
        self.loss = ""  # why it is lost
        self.left_on_purpose = False
        self.is_overdue = False  # whether the peer has not taken its answers in time
        # bytes of errors that were sent since the queue was last empty
        self._unread_bytes = 0
        self._does_not_read = False
        # the peer's requests under way, and bytes of their tensors: counted by ``calls/service.py``
        self.num_at_work = 0
        self.bytes_at_work = 0

    # sending, from any thread

    def place(
        self, tensors: list[torch.Tensor], device_maps: Mapping[str, DeviceMap]
    ) -> tuple[list[TensorInfo], list[Any]]:
        """Choose where each tensor's bytes travel.

        Returns:
            The description of each tensor, and the buffers that go behind the metadata.
        """
        infos = list[TensorInfo]()
        payload = list[Buffer]()
        devices = stage(tensors, device_maps, self.peer.name)
        # all before anything is placed: this raises for tensors that cannot be sent
        described = [describe(tensor) for tensor in tensors]
        for tensor, info in zip(tensors, described, strict=True):
            tensor = in_memory_order(tensor, info)
            num_bytes = tensor.numel() * tensor.element_size()
            shared: TensorInfo | None = None
            if self.sharing is not None and num_bytes >= SHARE_FROM_BYTES:
                shared = self.sharing.put(tensor, info, num_bytes)
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

        Once the connection is lost, frames are dropped silently: ``on_lost`` has reported it.
        """
        payload_bytes = sum(map(len, payload))
        start = header(kind, number, len(metadata), payload_bytes)
        if self.sharing is not None:
            start = self.sharing.report() + start
        buffers: list[Buffer]
        if payload_bytes <= _COPY_BELOW_BYTES:
            buffers = [b"".join((start, metadata, *payload))]
        else:
            buffers = [start + metadata, *payload]
        stream = self.stream
        if stream is not None:
            stream.send(buffers)
        else:
            self.send_buffers(buffers)

    def send_failure(self, number: int, metadata: bytes) -> None:
        """Send an error in place of an answer; never blocks.

        A peer that reads none of them is lost after ``UNREAD_BYTES``.
        """
        self.send(Kind.FAILURE, number, metadata)
        self._unread_bytes = self._unread_bytes + len(metadata) if self.is_sending else 0
        stream = self.stream
        if stream is not None and min(self._unread_bytes, stream.num_queued_bytes) > UNREAD_BYTES:
            self._does_not_read = True
            stream.close_soon(_DOES_NOT_READ)

    def send_buffers(
        self, buffers: Sequence[Buffer], descriptors: Sequence[OwnSegment] = ()
    ) -> None:
        """Send whole frames, with descriptors beside their first byte."""
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
    def is_sending(self) -> bool:
        """Whether something waits that the kernel has not taken yet."""
        queued = self._backlog if self.stream is None else self.stream.num_queued_bytes
        return bool(queued or self._sender.num_queued_bytes)

    @property
    def bytes_owed(self) -> int:
        """Bytes that the peer has not taken: queued here, or in shared memory not given back."""
        owed = self._sender.num_queued_bytes
        if self.stream is not None:
            owed += self.stream.num_queued_bytes
        return owed if self.sharing is None else owed + self.sharing.bytes_owed

    # on the loop

    def open(self, stream: FrameStream, surplus: bytes) -> None:
        """Use ``stream``, as the peer is admitted: send the backlog and begin to read."""
        with self._lock:
            for buffers, descriptors in self._backlog:
                stream.send(buffers, descriptors)
            self._backlog.clear()
            self.stream = stream
            self.only_stream = stream if self.sharing is not None else None
        stream.start(surplus)

    def open_further(self, stream: FrameStream, surplus: bytes, is_bulk: bool) -> None:
        """Use one more stream: for large tensors, or idle, as its end is the connection's."""
        self._further_streams.append(stream)
        if is_bulk:
            self._sender.add(stream)
        stream.start(surplus)

    def lose(self, reason: str) -> None:
        """Close the connection for good and report it."""
        with self._lock:
            if self.is_lost:
                return
            # in this order, for threads that read them without the lock
            self.loss = reason
            self.is_lost = True
            self._backlog.clear()
        for stream in (*self._further_streams, *([self.stream] if self.stream is not None else [])):
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
        message = Message(frame.kind, frame.number, envelope, [empty(info) for info in inline])
        frame.target = message
        return [bytes_of(tensor) for tensor in message.tensors]

    def on_frame(self, frame: Frame) -> None:
        """Handle a whole frame."""
        if self._does_not_read:  # the stream closes soon; frames read before that do not count
            raise ProtocolError(_DOES_NOT_READ)
        if frame.kind in _MESSAGES:
            self._on_message_frame(frame)
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

    def _on_message_frame(self, frame: Frame) -> None:
        message = frame.target
        if not isinstance(message, Message):
            try:
                envelope = decode_envelope(frame.metadata)
                inline = [each for each in envelope.tensors if each.is_inline]
                # no name for the tensors, which are to live no longer than their user wants
                message = Message(frame.kind, frame.number, envelope, cut(inline, frame.payload))
            except RpcError as error:
                self.unreadable(frame.kind, frame.number, error)
                return
        self._deliver(message)

    def _deliver(self, message: Message) -> None:
        """Hand a message on, once all its transfers are complete.

        An unreadable message is reported to its sender, and the connection lives on.
        """
        try:
            for info in message.envelope.tensors:
                if info.transfer is not None and not self._receiver.is_complete(info.transfer):
                    self._await_transfer(info.transfer, message)
                    return
            message.tensors = self._in_order(message)
        except RpcError as error:
            self.unreadable(message.kind, message.number, error)
            return
        self._on_message(self, message)

    def _await_transfer(self, number: int, message: Message) -> None:
        """Have ``on_chunk`` go on with a message once this transfer is complete."""
        if len(self._incomplete) >= self.limits.requests:
            raise ProtocolError(
                f"{len(self._incomplete):,} messages that wait for their transfers", "fewer"
            )
        self._incomplete[number] = message

    def on_chunk(self, frame: Frame) -> None:
        """Handle a chunk on a further stream."""
        if self._receiver.arrived(frame):
            message = self._incomplete.pop(frame.number, None)
            if message is not None:
                self._deliver(message)

    def unreadable(self, kind: Kind, number: int, error: RpcError) -> None:
        """Report a message that could not be read to the caller that waits for its answer."""
        log.warning("an unreadable message of worker %r: %s", self.peer.name, error)
        failure = encode_failure(error)
        if kind == Kind.REQUEST:
            self.send_failure(number, failure)
        elif kind == Kind.ANSWER:
            self._on_failure(self, number, failure)

    def _in_order(self, message: Message) -> list[torch.Tensor]:
        """All tensors of a message in its order, wherever their bytes travelled."""
        infos = message.envelope.tensors
        tensors = message.tensors
        if not all(info.is_inline for info in infos):
            inline = iter(tensors)
            tensors = [
                next(inline) if info.is_inline else self._out_of_line(info) for info in infos
            ]
        with_room = sum(map(bytes_with_room, infos))
        # a check of its own, as many tensors may name the same place in shared memory
        if with_room > self.limits.message_bytes:
            raise ProtocolError(
                f"tensors of up to {with_room:,} bytes with room between their rows",
                f"at most {self.limits.message_bytes:,}",
                "send them contiguous",
            )
        for place, info in enumerate(infos):
            tensors[place] = in_own_order(tensors[place], info)
            if info.device is not None:
                tensors[place] = unstage(tensors[place], info.device)
            if info.requires_grad and (
                tensors[place].is_floating_point() or tensors[place].is_complex()
            ):
                tensors[place].requires_grad_()
        return tensors

    def _out_of_line(self, info: TensorInfo) -> torch.Tensor:
        if info.transfer is not None:
            return self._receiver.take(info)
        if self.sharing is None:
            raise ProtocolError("a tensor in shared memory", "its bytes")
        return self.sharing.get(info)
