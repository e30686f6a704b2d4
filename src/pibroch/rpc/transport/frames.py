"""A byte stream cut into frames, with limits on every length (pure: bytes in, frames out).

A frame is a header of 24 bytes, metadata, and raw tensor bytes::

    "pb"  version u8  kind u8  metadata length u32  number u64  payload length u64  (little endian)

The payload is received straight into memory that ``allocate`` provides once the metadata is there.

A sender may add checksums: then the kind is ``| CHECKED``, and 12 bytes behind the header are the
CRC-32 of the header, of the metadata and of the payload. They detect what a network or a memory
has damaged, not what somebody changed on purpose.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from pibroch.errors import ProtocolError

MAGIC = b"pb"
VERSION = 2
HEADER = struct.Struct("<2sBBIQQ")
READ_AHEAD_BYTES = 256 << 10
SHORT_BYTES = 64 << 10
CHECKED = 0x80
_CHECKS = struct.Struct("<III")


class Kind(enum.IntEnum):
    """What a frame is; in brackets the meaning of ``number`` in its header."""

    REQUEST = 1  # wants an answer [call]
    NOTE = 2  # wants none [0]
    ANSWER = 3  # [the request's number]
    FAILURE = 4  # the answer is an error [the request's number]
    SEGMENT = 5  # a shared-memory segment, its descriptor beside the first byte [segment]
    FREE = 6  # places in the receiver's segments that the sender needs no more [0]
    DROP = 7  # a segment of the sender's that holds nothing any more [segment]
    BULK = 8  # tensor bytes on a stream of their own [transfer]
    GOODBYE = 9  # nothing follows: the sender leaves on purpose [0]


_KINDS = {int(kind): kind for kind in Kind}


@dataclass(slots=True)
class Frame:
    """One frame that was received.

    A short payload is in ``payload``, a longer one in memory from ``allocate`` (see ``target``).
    """

    kind: Kind
    number: int
    metadata: bytes
    payload_bytes: int
    target: object = None
    payload: bytearray | None = None


def header(kind: Kind, number: int, metadata_bytes: int, payload_bytes: int) -> bytes:
    """The 24 bytes before a frame's metadata.

    >>> header(Kind.NOTE, 0, 5, 0).hex(" ", 8)
    '7062020205000000 0000000000000000 0000000000000000'
    """
    return HEADER.pack(MAGIC, VERSION, kind, metadata_bytes, number, payload_bytes)


def seal(buffers: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Add checksums to whole frames.

    ``buffers`` are as for ``FrameStream.send``: no header or metadata lies in two of them.
    """
    waiting = deque(memoryview(buffer).cast("B") for buffer in buffers)
    sealed: list[bytes | memoryview] = []
    view = memoryview(b"")
    while view.nbytes or waiting:
        if not view.nbytes:
            view = waiting.popleft()
            continue
        magic, version, kind, metadata_bytes, number, payload_bytes = HEADER.unpack_from(view)
        start = HEADER.pack(magic, version, kind | CHECKED, metadata_bytes, number, payload_bytes)
        metadata = bytes(view[HEADER.size : HEADER.size + metadata_bytes])
        view = view[HEADER.size + metadata_bytes :]
        payload: list[bytes | memoryview] = []
        checksum = 0
        while payload_bytes:
            if not view.nbytes:
                view = waiting.popleft()
                continue
            payload.append(part := view[:payload_bytes])
            checksum = zlib.crc32(part, checksum)
            payload_bytes -= part.nbytes
            view = view[part.nbytes :]
        sealed += [
            start + _CHECKS.pack(zlib.crc32(start), zlib.crc32(metadata), checksum) + metadata,
            *payload,
        ]
    return sealed


Allocate = Callable[[Frame], list[memoryview]]


class FrameReader:
    """Cuts what a stream delivers into frames.

    Args:
        max_metadata_bytes: longer metadata are an error.
        max_payload_bytes: likewise the payload.
        allocate: given a frame with its metadata, the writable buffers (their lengths add up to the
            payload's) that take its payload, in order; it may set ``frame.target``. Not called for
            frames without payload or with a short one that came with it.
    """

    def __init__(self, max_metadata_bytes: int, max_payload_bytes: int, allocate: Allocate) -> None:
        self._max_metadata_bytes = max_metadata_bytes
        self._max_payload_bytes = max_payload_bytes
        self._allocate = allocate
        self.num_frames = 0
        self._reset(READ_AHEAD_BYTES)

    def _reset(self, size: int) -> None:
        """Hold nothing but ``size`` bytes of room."""
        self._stage(size)
        self._start = self._end = 0  # of the bytes in ``_staging`` that are not parsed yet
        self._frame: Frame | None = None  # its payload is being received
        self._targets: list[memoryview] = []  # memory that is still to be filled, next one last
        self._checksum: int | None = None  # expected of the payload that is being received
        self._filling: list[memoryview] = []  # all memory of that payload

    @property
    def is_within_payload(self) -> bool:
        """Whether more of a long payload is to come."""
        return bool(self._targets)

    @property
    def num_staged(self) -> int:
        """Bytes of a frame whose metadata are not complete."""
        return self._end - self._start

    def buffer(self) -> memoryview:
        """Where to receive the stream's next bytes; never empty."""
        if self._targets:
            return self._targets[-1]
        return self._staged[self._end :] if self._end else self._staged

    def received(self, num_bytes: int) -> list[Frame]:
        """The frames completed by ``num_bytes`` new bytes in ``buffer()``.

        Raises:
            ProtocolError: for bytes that are not a frame, or a frame that is too long. The stream
                cannot be used after that.
        """
        frames: list[Frame] = []
        if self._targets:
            self._filled(num_bytes)
            self._finish(frames)
            return frames
        self._end += num_bytes
        while self._end - self._start >= HEADER.size and self._parse(frames):
            pass
        if self._start < self._end or len(self._staging) > READ_AHEAD_BYTES:
            self._compact()
        else:
            self._start = self._end = 0
        return frames

    def close(self) -> None:
        """Release all memory; nothing can be received any more."""
        self._reset(0)

    def _stage(self, size: int) -> None:
        self._staging = bytearray(size)
        self._staged = memoryview(self._staging)

    def _filled(self, num_bytes: int) -> None:
        rest = self._targets.pop()[num_bytes:]
        if rest.nbytes:
            self._targets.append(rest)

    def _finish(self, frames: list[Frame]) -> None:
        if not self._targets and self._frame is not None:
            if self._checksum is not None:
                checksum = self._checksum
                self._checksum = None
                filled = self._filling
                self._filling = []
                _check_sum("payload", checksum, filled)
            frames.append(self._frame)
            self._frame = None

    def _parse(self, frames: list[Frame]) -> bool:
        """Take one frame, whose header is there, out of the staging buffer.

        Whether it is complete up to its payload.
        """
        start = self._start
        magic, version, kind, metadata_bytes, number, payload_bytes = HEADER.unpack_from(
            self._staging, start
        )
        if (
            magic != MAGIC
            or version != VERSION
            or kind & ~CHECKED not in _KINDS
            or metadata_bytes > self._max_metadata_bytes
            or payload_bytes > self._max_payload_bytes
        ):
            self._refuse(magic, version, kind & ~CHECKED, metadata_bytes, payload_bytes)
        body_start = start + HEADER.size
        checks = None
        if kind & CHECKED:
            if self._end < body_start + _CHECKS.size:
                return False
            checks = _CHECKS.unpack_from(self._staging, body_start)
            _check_sum("header", checks[0], [self._staged[start:body_start]])
            body_start += _CHECKS.size
            kind -= CHECKED
        body_end = body_start + metadata_bytes
        if self._end < body_end:
            return False
        metadata = bytes(self._staged[body_start:body_end])
        if checks is not None:
            _check_sum("metadata", checks[1], [metadata])
        frame = Frame(_KINDS[kind], number, metadata, payload_bytes)
        self._start = body_end
        self.num_frames += 1
        if not payload_bytes:
            if checks is not None:
                _check_sum("payload", checks[2], [])
            frames.append(frame)
            return True
        payload_end = body_end + payload_bytes
        if payload_bytes <= SHORT_BYTES and payload_end <= self._end:
            frame.payload = self._staging[body_end:payload_end]
            if checks is not None:
                _check_sum("payload", checks[2], [frame.payload])
            self._start = payload_end
            frames.append(frame)
            return True
        return self._begin_payload(frame, frames, checks[2] if checks is not None else None)

    def _begin_payload(self, frame: Frame, frames: list[Frame], checksum: int | None) -> bool:
        targets = [target for target in self._allocate(frame) if target.nbytes]
        assert sum(target.nbytes for target in targets) == frame.payload_bytes
        self._checksum = checksum
        self._filling = targets if checksum is not None else []
        self._targets = targets[::-1]
        self._frame = frame
        while self._targets and self._start < self._end:
            num_bytes = min(self._targets[-1].nbytes, self._end - self._start)
            self._targets[-1][:num_bytes] = self._staged[self._start : self._start + num_bytes]
            self._start += num_bytes
            self._filled(num_bytes)
        self._finish(frames)
        return not self._targets

    def _refuse(
        self, magic: bytes, version: int, kind: int, metadata_bytes: int, payload_bytes: int
    ) -> NoReturn:
        if magic != MAGIC or version != VERSION or kind not in _KINDS:
            raise ProtocolError(
                f"a frame that begins with {magic!r}, version {version}, kind {kind}",
                f"{MAGIC!r}, version {VERSION}, a known kind",
                "let workers of one version of pibroch talk to each other",
            )
        if metadata_bytes > self._max_metadata_bytes:
            raise ProtocolError(
                f"{metadata_bytes:,} bytes of metadata",
                f"at most {self._max_metadata_bytes:,}",
                "send large data as tensors, or raise limits.metadata_bytes",
            )
        raise ProtocolError(
            f"{payload_bytes:,} bytes of tensors in one message",
            f"at most {self._max_payload_bytes:,}",
            "send less at once, or raise limits.message_bytes",
        )

    def _compact(self) -> None:
        """Make room for the next read.

        The staging buffer grows to hold one frame's metadata and shrinks again.
        """
        num_unparsed = self._end - self._start
        if not num_unparsed:
            if len(self._staging) > READ_AHEAD_BYTES:
                self._stage(READ_AHEAD_BYTES)
            self._start = self._end = 0
            return
        needed = HEADER.size
        if num_unparsed >= HEADER.size:
            _, _, kind, metadata_bytes, _, _ = HEADER.unpack_from(self._staging, self._start)
            needed += metadata_bytes + (_CHECKS.size if kind & CHECKED else 0)
        if len(self._staging) - self._start >= max(needed, READ_AHEAD_BYTES // 4):
            return
        size = max(READ_AHEAD_BYTES, needed)
        if size > len(self._staging):
            before = self._staged
            self._stage(size)
            self._staged[:num_unparsed] = before[self._start : self._end]
        else:
            self._staging[:num_unparsed] = self._staging[self._start : self._end]
        self._start = 0
        self._end = num_unparsed


def _check_sum(what: str, expected: int, parts: Sequence[bytes | bytearray | memoryview]) -> None:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    if checksum != expected:
        raise ProtocolError(
            f"a frame whose {what} has the checksum {checksum:08x}",
            f"{expected:08x}, as its sender says",
            "look for a network or memory that damages data",
        )
