"""Tensors of one connection in shared memory.

The sender copies them into its segments, the receiver looks at them there.

What the receiver needs no more is reported back in ``FREE`` frames, which ride with the next
message or follow shortly. A result that is a received tensor which nobody else holds is *returned*:
by its place, without a copy.
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
from typing import Any, Protocol

import msgspec
import torch

from pibroch.errors import ProtocolError
from pibroch.rpc.policies import POLICIES
from pibroch.rpc.transport.arena import SHARED_SEGMENT_BYTES, Arena, NeedSegment, size_class
from pibroch.rpc.transport.frames import Kind, header
from pibroch.rpc.transport.segments import (
    ForeignSegment,
    OwnSegment,
    give_back,
    loan_of,
    view,
    write,
)
from pibroch.rpc.values.messages import DTYPE_OF_CODE, TensorInfo, encode

log = logging.getLogger(__name__)

SHARE_FROM_BYTES = 32 << 10
_REPORT_AFTER_S = 0.02
_IDLE_S = 10.0
_KEEP_IDLE_BYTES = 64 << 20
_MAX_SEGMENTS = 1 << 16

_freed_decoder = msgspec.msgpack.Decoder(list[tuple[int, int]])
_size_decoder = msgspec.msgpack.Decoder(int)


class Loop(Protocol):
    """What is needed of the reactor."""

    def call_soon(self, function: Callable[[], None]) -> None:
        """Run it on the loop; takes no lock."""

    def call_at(self, when: float, function: Callable[[], None]) -> None:
        """Run it on the loop at that time."""


class Sharing:
    """Both directions of one connection.

    Args:
        loop: timers.
        send: sends a frame, with a segment's descriptor beside it.
        discard: drops what it gets on another thread: unmapping takes its time.
        max_tensor_bytes: of the peer's; its segments may be a little larger.
    """

    def __init__(
        self,
        loop: Loop,
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
        self._lent: dict[tuple[int, int], int] = {}
        # own places whose views have died; filled by the garbage collector
        self._came_home: deque[tuple[int, int]] = deque()
        # own places that came back and still have views
        self._returned: set[tuple[int, int]] = set()
        self._foreign: dict[int, ForeignSegment] = {}
        self._dead: deque[tuple[int, int]] = deque()  # places of the peer's, likewise
        self._report_is_planned = self._trim_is_planned = False
        self._last_use = 0.0
        self._is_closed = False
        self._gives_back = POLICIES.give_back

    # out

    def put(self, tensor: torch.Tensor, info: TensorInfo, num_bytes: int) -> TensorInfo | None:
        """Copy a tensor into a segment; where it is now, ``None`` once the connection is gone."""
        with self._lock:
            if self._is_closed:
                return None
            self._last_use = time.monotonic()
            self._take_home()
            while isinstance(place := self._arena.allocate(num_bytes), NeedSegment):
                self._add_segment(place.nbytes)
            segment = self._own[place.segment_id]
            self._lent[place.segment_id, place.offset] = num_bytes
        write(segment, place.offset, tensor)
        return msgspec.structs.replace(info, segment=place.segment_id, offset=place.offset)

    def give_back(
        self, tensor: torch.Tensor, info: TensorInfo, references: int
    ) -> TensorInfo | None:
        """The place of a received tensor that goes back, if only the caller holds it (``references`` as in ``segments``)."""
        loan = loan_of(tensor)
        if (
            loan is None
            or self._foreign.get(loan.segment.segment_id) is not loan.segment
            or not self._gives_back
        ):
            return None
        loan = give_back(tensor, references + 1)
        if loan is None:
            return None
        return msgspec.structs.replace(
            info, segment=loan.segment.segment_id, offset=loan.offset, returned=True
        )

    @property
    def bytes_owed(self) -> int:
        """What the peer has not given back.

        The blocks lent to it, or the segments that they keep from being let go.

        One segment is there for the first small block already, and does not count.
        """
        arena = self._arena
        return max(arena.lent_bytes, arena.total_bytes - arena.idle_bytes - SHARED_SEGMENT_BYTES)

    def report(self) -> bytes:
        """A ``FREE`` frame with what died since the last one, or nothing.

        To be sent before anything else.
        """
        if not self._dead:
            return b""
        places = []
        while self._dead:
            places.append(self._dead.popleft())
        metadata = encode(places)
        return header(Kind.FREE, 0, len(metadata), 0) + metadata

    # in, on the loop

    def get(self, info: TensorInfo) -> torch.Tensor:
        """The tensor at a place.

        Raises:
            ProtocolError: when there is no such place.
        """
        num_bytes = info.num_bytes()
        key = (info.segment or 0, info.offset)
        if info.returned:
            if self._lent.get(key, -1) < num_bytes or key in self._returned:
                raise ProtocolError(f"a tensor returned at {key}", "a place that was lent")
            segment: Any = self._own.get(key[0])
            when_dead = functools.partial(self._came_home.append, key)
        else:
            segment = self._foreign.get(key[0])
            when_dead = functools.partial(self._died, key)
        if segment is None or info.offset % 64:
            raise ProtocolError(
                f"a tensor in shared segment {key[0]} at {info.offset}",
                "a segment that was announced",
            )
        try:
            tensor = view(segment, info.offset, DTYPE_OF_CODE[info.dtype], info.shape, when_dead)
        except ValueError as error:
            raise ProtocolError(
                f"a tensor out of its segment ({error})", "a place within it"
            ) from error
        if info.returned:
            self._returned.add(key)
        return tensor

    def on_segment(self, segment_id: int, metadata: bytes, descriptor: int) -> None:
        """The peer made a segment; its descriptor is closed in any case."""
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
        """The peer needs a segment no more."""
        segment = self._foreign.pop(segment_id, None)
        if segment is None:
            raise ProtocolError(f"the end of shared segment {segment_id}", "one that was announced")
        self._discard(segment)

    def on_free(self, metadata: bytes) -> None:
        """The peer looks at these places no more."""
        with self._lock:
            for key in _decoded(_freed_decoder, metadata):
                if key in self._returned:
                    raise ProtocolError(f"the place {key} back twice", "each place once")
                self._free(key)
            self._trim(None)
        self._plan_trim()

    def close(self) -> None:
        """The connection is gone: places need not be reported any more. Views live on."""
        self._is_closed = True
        with self._lock:
            segments = [*self._own.values(), *self._foreign.values()]
            self._own.clear()
            self._foreign.clear()
        if segments:
            self._discard(segments)

    # inside

    def _died(self, key: tuple[int, int]) -> None:
        """A view of the peer's memory is gone.

        Runs anywhere, inside the garbage collector too: no locks.
        """
        self._dead.append(key)
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

    def _free(self, key: tuple[int, int]) -> None:
        self._arena.free(*key)
        self._lent.pop(key, None)

    def _take_home(self) -> None:
        while self._came_home:
            key = self._came_home.popleft()
            self._returned.discard(key)
            try:
                self._free(key)
            except ProtocolError as error:
                # the peer said that it was free, too: its mistake, not the caller's
                log.warning("a place in shared memory was given back twice: %s", error)

    def _trim(self, keep_bytes: int | None) -> None:
        for segment_id in self._arena.trim(keep_bytes):
            self._discard(self._own.pop(segment_id, None))
            self._send([header(Kind.DROP, segment_id, 0, 0)], [])

    def _plan_trim(self) -> None:
        if not self._trim_is_planned and self._arena.idle_bytes > _KEEP_IDLE_BYTES:
            self._trim_is_planned = True
            self._loop.call_at(time.monotonic() + _IDLE_S, self._trim_idle)

    def _trim_idle(self) -> None:
        """Give memory back that was not needed for a while."""
        self._trim_is_planned = False
        if self._is_closed:
            return
        if time.monotonic() - self._last_use >= _IDLE_S:
            with self._lock:
                self._take_home()
                self._trim(_KEEP_IDLE_BYTES)
        else:
            self._plan_trim()


def _decoded(decoder: msgspec.msgpack.Decoder[Any], metadata: bytes) -> Any:
    try:
        return decoder.decode(metadata)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a frame about shared memory that cannot be read ({error})") from error
