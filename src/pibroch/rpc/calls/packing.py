"""Messages of Python values and back: their encoding, their references, their part in autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.transport.connection import Connection, Message
from pibroch.rpc.transport.frames import Kind
from pibroch.rpc.transport.stream import Buffer
from pibroch.rpc.values.codec import Codec
from pibroch.rpc.values.devices import DeviceMap
from pibroch.rpc.values.messages import Envelope, encode


class ReferenceTable(Protocol):
    """The remote references of a worker (``references/runtime.py``)."""

    def send(self, rref: Any, to: WorkerInfo, incarnation: int) -> msgspec.Struct:
        """The form of a reference in a message to ``to``; its incarnation is 0 while unknown."""

    def unsend(self, wire: Any) -> None:
        """Undo ``send``, as the message was not sent."""

    def receive(self, wire: Any, origin: WorkerInfo, incarnation: int) -> object:
        """The reference that arrived in a message; an incarnation of 0 is this worker's own."""


class Recorder(Protocol):
    """The distributed autograd of a worker (``autograd/``)."""

    def current_context(self) -> int | None:
        """The calling thread's context."""

    def entered(self, context: int) -> Any:
        """A context manager inside which ``context`` is the calling thread's."""

    def outgoing(
        self, context: int, to: WorkerInfo, tensors: list[torch.Tensor]
    ) -> tuple[msgspec.Struct | None, list[torch.Tensor]]:
        """Record tensors that leave: their part in the graph, and the tensors to send."""

    def incoming(
        self, origin: WorkerInfo, graph: object, tensors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Record tensors that arrived, and return them as parts of the graph."""


class PackedMessage(NamedTuple):
    """A message as it travels: metadata, tensors' bytes, and the forms of its references."""

    metadata: bytes
    payload: Sequence[Buffer]
    wires: list[Any]


class Packer:
    """Packs and unpacks messages for one worker."""

    def __init__(self, codec: Codec, device_maps: Mapping[str, DeviceMap]) -> None:
        self._codec = codec
        self._device_maps = device_maps
        self.references: ReferenceTable | None = None
        self.recorder: Recorder | None = None

    def pack(
        self, connection: Connection, body: msgspec.Raw, value: object, context: int | None
    ) -> PackedMessage:
        """A message that ``send`` is to send next; its references count from now on."""
        raw, tensors, references = self._codec.encode(value)
        peer = connection.peer
        wires: list[Any] = []
        graph = None
        try:
            for reference in references:
                assert self.references is not None
                wires.append(self.references.send(reference, peer, connection.incarnation))
            if context is not None and self.recorder is not None:
                graph, tensors = self.recorder.outgoing(context, peer, tensors)
            infos, payload = connection.place(tensors, self._device_maps)
        except BaseException:
            self._unsend(wires)
            raise
        metadata = encode(Envelope(body, raw, infos, context, graph, wires))
        return PackedMessage(metadata, payload, wires)

    def send(self, connection: Connection, kind: Kind, number: int, packed: PackedMessage) -> None:
        """Send a message; if the connection is lost by then, the references in it are released."""
        connection.send(kind, number, packed.metadata, packed.payload)
        if connection.is_lost:
            self._unsend(packed.wires)

    def receive_references(self, connection: Connection, message: Message) -> None:
        """Take the references of a message, which count from now on even if the message fails."""
        if self.references is not None:
            for wire in message.envelope.references:
                reference = self.references.receive(wire, connection.peer, connection.incarnation)
                message.references.append(reference)

    def unpack(self, message: Message, origin: WorkerInfo) -> object:
        """A message's value; the message then no longer refers to its tensors and references."""
        envelope = message.envelope
        tensors = message.tensors
        references = message.references
        message.tensors = []
        message.references = []
        if envelope.graph is not None and self.recorder is not None:
            tensors = self.recorder.incoming(origin, envelope.graph, tensors)
        return self._codec.decode(envelope.value, tensors, references)

    def _unsend(self, wires: list[Any]) -> None:
        for wire in wires:
            assert self.references is not None
            self.references.unsend(wire)
