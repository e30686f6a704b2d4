"""Large tensors in chunks on streams of their own, so that small calls do not wait behind them.

The sender numbers its transfers (one tensor each). The chunks of a transfer and the message that it
belongs to arrive in any order, on any stream.

Threads: ``send`` is called from any thread, ``pull`` by the loop when a stream has nothing left to
write; the lock guards the queue of chunks between them. The receiver is used by the loop alone.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass, field

import msgspec
import torch

from pibroch.errors import ProtocolError
from pibroch.rpc.transport.frames import Frame, Kind, header
from pibroch.rpc.transport.stream import FrameStream
from pibroch.rpc.values.messages import DTYPE_OF_CODE, TensorInfo, encode
from pibroch.rpc.values.tensors import bytes_of

BULK_FROM_BYTES = 1 << 20
CHUNK_BYTES = 1 << 20

_place_decoder = msgspec.msgpack.Decoder(tuple[int, int])


class BulkSender:
    """A queue of chunks and the streams that take the next one whenever they have none left."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._chunks: deque[tuple[bytes, memoryview]] = deque()
        self._num_waiting_bytes = 0  # of these chunks
        self._streams: list[FrameStream] = []
        self._lock = threading.Lock()

    @property
    def is_ready(self) -> bool:
        """Whether there are streams to send on."""
        return bool(self._streams)

    @property
    def num_queued_bytes(self) -> int:
        """Bytes of chunks that the kernel has not taken yet."""
        queued = sum(stream.num_queued_bytes for stream in self._streams) if self._streams else 0
        return self._num_waiting_bytes + queued

    def add(self, stream: FrameStream) -> None:
        """Use one more stream."""
        self._streams.append(stream)

    def clear(self) -> None:
        """Drop what is queued, as nothing can be sent any more."""
        with self._lock:
            self._chunks.clear()
            self._num_waiting_bytes = 0

    def send(self, data: memoryview) -> int:
        """Queue a transfer and return its number; ``data`` must not change until it is sent."""
        number = next(self._numbers)
        chunks = []
        for offset in range(0, data.nbytes, CHUNK_BYTES):
            chunk = data[offset : offset + CHUNK_BYTES]
            metadata = encode((data.nbytes, offset))
            chunks.append(
                (header(Kind.BULK, number, len(metadata), chunk.nbytes) + metadata, chunk)
            )
        with self._lock:
            self._chunks += chunks
            self._num_waiting_bytes += data.nbytes
        for stream in self._streams:
            if not stream.num_queued_bytes:
                self.pull(stream)
        return number

    def pull(self, stream: FrameStream) -> None:
        """Send the next chunks on an idle stream, until the kernel takes no more."""
        while not stream.num_queued_bytes:
            with self._lock:
                if not self._chunks or stream.num_queued_bytes:
                    return
                chunk = self._chunks.popleft()
                self._num_waiting_bytes -= chunk[1].nbytes
                stream.send(chunk)


@dataclass(slots=True)
class _Transfer:
    """A tensor of which some chunks have arrived."""

    data: torch.Tensor
    memory: memoryview
    missing_bytes: int
    started: set[int] = field(default_factory=set)  # offsets of chunks that have begun to arrive


class BulkReceiver:
    """Transfers under way, on the loop.

    Args:
        max_bytes: limit on all transfers together whose message has not been handled.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._transfers: dict[int, _Transfer] = {}
        self._pending_bytes = 0

    def allocate(self, frame: Frame) -> list[memoryview]:
        """Memory for a chunk (``frames.Allocate`` of a bulk stream).

        Raises:
            ProtocolError: for a chunk that does not fit its transfer.
        """
        if frame.kind != Kind.BULK:
            raise ProtocolError(f"a frame of kind {frame.kind.name} on a bulk stream", "chunks")
        try:
            total_bytes, offset = _place_decoder.decode(frame.metadata)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a chunk whose place cannot be read ({error})") from error
        transfer = self._transfers.get(frame.number) or self._begin(frame.number, total_bytes)
        end = offset + frame.payload_bytes
        is_chunk = offset % CHUNK_BYTES == 0 and end == min(offset + CHUNK_BYTES, total_bytes)
        if (
            transfer.memory.nbytes != total_bytes
            or not is_chunk
            or offset < 0
            or offset in transfer.started
        ):
            raise ProtocolError(
                f"bytes {offset} to {end} of a transfer of {total_bytes}", "each byte once"
            )
        transfer.started.add(offset)
        return [transfer.memory[offset:end]]

    def arrived(self, frame: Frame) -> bool:
        """Count a chunk that has arrived; returns whether its transfer is complete."""
        transfer = self._transfers.get(frame.number)
        if transfer is None or not frame.payload_bytes:
            raise ProtocolError("an empty chunk", "bytes")
        transfer.missing_bytes -= frame.payload_bytes
        return transfer.missing_bytes <= 0

    def is_complete(self, number: int) -> bool:
        """Whether all chunks of a transfer have arrived."""
        transfer = self._transfers.get(number)
        return transfer is not None and transfer.missing_bytes <= 0

    def take(self, info: TensorInfo) -> torch.Tensor:
        """The tensor of a complete transfer.

        Raises:
            ProtocolError: when it has another size.
        """
        transfer = self._transfers.pop(info.transfer or 0, None)
        if transfer is None:
            raise ProtocolError(f"transfer {info.transfer} in two places", "each in one")
        self._pending_bytes -= transfer.memory.nbytes
        if transfer.memory.nbytes != info.num_bytes():
            raise ProtocolError(
                f"a transfer of {transfer.memory.nbytes} bytes",
                f"{info.num_bytes()}, as its shape says",
            )
        storage = transfer.data.untyped_storage()
        return torch.empty(0, dtype=DTYPE_OF_CODE[info.dtype]).set_(storage, 0, info.shape)  # type: ignore[call-overload,no-any-return]

    def clear(self) -> None:
        """Drop all transfers, as no more chunks will arrive."""
        self._transfers.clear()
        self._pending_bytes = 0

    def _begin(self, number: int, total_bytes: int) -> _Transfer:
        if not 0 < total_bytes <= self._max_bytes - self._pending_bytes:
            raise ProtocolError(
                f"a transfer of {total_bytes:,} bytes, with {self._pending_bytes:,} under way",
                f"at most {self._max_bytes:,} together",
                "send less at once, or raise limits.message_bytes",
            )
        data = torch.empty(total_bytes, dtype=torch.uint8)
        transfer = self._transfers[number] = _Transfer(data, bytes_of(data), total_bytes)
        self._pending_bytes += total_bytes
        return transfer
