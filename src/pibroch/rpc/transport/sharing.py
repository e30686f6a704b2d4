"""Tensors of one connection in shared memory.

The sender copies tensors into segments of its own; the receiver maps the segments and gets views.
When the last user of a view is gone, its place is reported to the sender in a ``FREE`` frame, which
goes out with the next message or shortly after.

Threads: ``put`` and ``report`` run in whichever thread sends; ``get`` and the ``on_...`` methods
run where frames are handled, on the loop or in a caller that reads its own answer. The lock covers
the arena and the own segments. Views die on any thread, also inside the garbage collector, so what
happens then takes no lock: it only appends to a deque.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from pibroch.errors import ProtocolError
from pibroch.rpc.transport.frames import Kind, header
from pibroch.rpc.values.messages import DTYPE_OF_CODE, TensorInfo, encode
from pibroch.wire.arena import IDLE_BYTES, SHARED_SEGMENT_BYTES, Arena, NeedSegment, size_class
from pibroch.wire.reactor import Reactor
from pibroch.wire.segments import ForeignSegment, OwnSegment, view, write

log = logging.getLogger(__name__)

SHARE_FROM_BYTES = 32 << 10
_REPORT_AFTER_S = 0.02
_IDLE_S = 10.0
_KEEP_IDLE_BYTES = 64 << 20
_MAX_SEGMENTS = 1 << 16

_freed_decoder = msgspec.msgpack.Decoder(list[tuple[int, int]])
_size_decoder = msgspec.msgpack.Decoder(int)


class Sharing:
    """Shared memory of one connection, for both directions.

    A place is a pair of a segment's id and an offset in bytes.

    Args:
        loop: runs the timers.
        send: sends a frame, with a segment's descriptor beside it.
        discard: drops its argument on another thread, as unmapping takes time.
        max_tensor_bytes: limit on the peer's tensors; its segments may be a little larger.
    """

    def __init__(
        self,
        loop: Reactor,
        send: Callable[[list[bytes], list[OwnSegment]], None],
        discard: Callable[[object], None],
        max_tensor_bytes: int,
    ) -> None:
        self._loop = loop
        self._send = send
        self._discard = discard
        self._max_segment_bytes = max(SHARED_SEGMENT_BYTES, size_class(max_tensor_bytes))
        self._lock = threading.Lock()
        self._arena = Arena()
        self._own: dict[int, OwnSegment] = {}
        self._ids = itertools.count(1)
        self._foreign: dict[int, ForeignSegment] = {}
        # places in the peer's segments whose views have died; filled by the garbage collector
        self._unreported: deque[tuple[int, int]] = deque()
        self._report_is_planned = self._trim_is_planned = False
        self._last_use = 0.0
        self._is_closed = False

    # sending

    def put(self, tensor: torch.Tensor, info: TensorInfo, num_bytes: int) -> TensorInfo | None:
        """Copy a tensor into a segment.

        Returns:
            ``info`` with the place; ``None`` once the connection is closed.
        """
        with self._lock:
            if self._is_closed:
                return None
            self._last_use = time.monotonic()
            while isinstance(place := self._arena.allocate(num_bytes), NeedSegment):
                self._add_segment(place.nbytes)
            segment = self._own[place.segment_id]
        write(segment, place.offset, tensor)
        return msgspec.structs.replace(info, segment=place.segment_id, offset=place.offset)

    @property
    def bytes_owed(self) -> int:
        """What the peer has not given back: its blocks, or the segments that these keep, if more.

        The first segment is not counted, as one small block needs it already.
        """
        arena = self._arena
        segment_bytes = arena.total_bytes - arena.idle_bytes - SHARED_SEGMENT_BYTES
        return max(arena.allocated_bytes, segment_bytes)

    def report(self) -> bytes:
        """A ``FREE`` frame with the places that died since the last one, or no bytes.

        It must be sent before any other frame.
        """
        if not self._unreported:
            return b""
        places = []
        while self._unreported:
            places.append(self._unreported.popleft())
        metadata = encode(places)
        return header(Kind.FREE, 0, len(metadata), 0) + metadata

    # receiving

    def get(self, info: TensorInfo) -> torch.Tensor:
        """The tensor at the place that ``info`` names.

        Raises:
            ProtocolError: when there is no such place.
        """
        info.num_bytes()  # checks the type and the shape
        key = (info.segment or 0, info.offset)
        segment = self._foreign.get(key[0])
        if segment is None or info.offset % 64:
            raise ProtocolError(
                f"a tensor in shared segment {key[0]} at {info.offset}",
                "a segment that was announced",
            )
        try:
            return view(
                segment,
                info.offset,
                DTYPE_OF_CODE[info.dtype],
                info.shape,
                functools.partial(self._died, key),
            )
        except ValueError as error:
            raise ProtocolError(
                f"a tensor out of its segment ({error})", "a place within it"
            ) from error

    def on_segment(self, segment_id: int, metadata: bytes, descriptor: int) -> None:
        """Map a segment that the peer made; its descriptor is closed in any case."""
        try:
            num_bytes = _decoded(_size_decoder, metadata)
            is_new = segment_id not in self._foreign and len(self._foreign) < _MAX_SEGMENTS
            if not is_new or not 0 < num_bytes <= self._max_segment_bytes:
                raise ProtocolError(
                    f"shared segment {segment_id} of {num_bytes} bytes",
                    "a new one within the limits",
                )
        except ProtocolError:
            os.close(descriptor)
            raise
        self._foreign[segment_id] = ForeignSegment.open(descriptor, num_bytes, segment_id)

    def on_drop(self, segment_id: int) -> None:
        """Unmap a segment that the peer no longer uses."""
        segment = self._foreign.pop(segment_id, None)
        if segment is None:
            raise ProtocolError(f"the end of shared segment {segment_id}", "one that was announced")
        self._discard(segment)

    def on_free(self, metadata: bytes) -> None:
        """Free the own places that the peer no longer uses."""
        with self._lock:
            for key in _decoded(_freed_decoder, metadata):
                self._arena.free(*key)
            self._trim(IDLE_BYTES)
        self._plan_trim()

    def close(self) -> None:
        """Drop all segments, as the connection is gone. Views stay valid."""
        self._is_closed = True
        with self._lock:
            segments = [*self._own.values(), *self._foreign.values()]
            self._own.clear()
            self._foreign.clear()
        if segments:
            self._discard(segments)

    def _died(self, key: tuple[int, int]) -> None:
        """Plan to report a view of the peer's memory that has died.

        Runs on any thread, also inside the garbage collector, so it takes no lock.
        """
        self._unreported.append(key)
        if not self._report_is_planned and not self._is_closed:
            self._report_is_planned = True
            self._loop.call_soon(
                lambda: self._loop.call_at(time.monotonic() + _REPORT_AFTER_S, self._report_late)
            )

    def _report_late(self) -> None:
        self._report_is_planned = False
        frame = self.report()
        if frame and not self._is_closed:
            self._send([frame], [])

    def _add_segment(self, num_bytes: int) -> None:
        segment = OwnSegment.create(num_bytes, next(self._ids))
        self._own[segment.segment_id] = segment
        self._arena.add_segment(segment.segment_id, num_bytes)
        metadata = encode(num_bytes)
        self._send(
            [header(Kind.SEGMENT, segment.segment_id, len(metadata), 0) + metadata], [segment]
        )

    def _trim(self, keep_bytes: int) -> None:
        for segment_id in self._arena.trim(keep_bytes):
            self._discard(self._own.pop(segment_id, None))
            self._send([header(Kind.DROP, segment_id, 0, 0)], [])

    def _plan_trim(self) -> None:
        if not self._trim_is_planned and self._arena.idle_bytes > _KEEP_IDLE_BYTES:
            self._trim_is_planned = True
            self._loop.call_at(time.monotonic() + _IDLE_S, self._trim_idle)

    def _trim_idle(self) -> None:
        """Drop segments that were not used for a while."""
        self._trim_is_planned = False
        if self._is_closed:
            return
        if time.monotonic() - self._last_use >= _IDLE_S:
            with self._lock:
                self._trim(_KEEP_IDLE_BYTES)
        else:
            self._plan_trim()


def _decoded(decoder: msgspec.msgpack.Decoder[Any], metadata: bytes) -> Any:
    try:
        return decoder.decode(metadata)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a frame about shared memory that cannot be read ({error})") from error
