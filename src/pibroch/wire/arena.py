"""The allocator of shared memory: which bytes of which segment are used, and which are free.

Pure: it knows sizes, not maps. One arena serves one direction of one connection, under its caller's
lock.

Blocks up to ``SHARED_BLOCK_BYTES`` lie together in segments of ``SHARED_SEGMENT_BYTES``: best fit
over the free ranges, which merge with their neighbours. Larger ones have a segment of their own, of
a size class at most a quarter above their size, which is kept for the next block of that class.
In both cases the bytes freed last are used first, as their pages are still mapped and cached.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from pibroch.errors import ProtocolError

ALIGNMENT_BYTES = 64
SHARED_BLOCK_BYTES = 16 << 20
SHARED_SEGMENT_BYTES = 64 << 20
IDLE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ArenaPlace:
    """Where a block lies: ``nbytes`` from ``offset`` on (a multiple of 64) in one segment."""

    segment_id: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class NeedSegment:
    """No room: the caller makes a segment of ``nbytes``, adds it and allocates again."""

    nbytes: int


@dataclass(slots=True)
class _Segment:
    nbytes: int
    blocks: dict[int, int] = field(default_factory=dict)  # offset to size of each allocated block
    free_until: dict[int, int] = field(default_factory=dict)  # free ranges: start to end
    free_from: dict[int, int] = field(default_factory=dict)  # free ranges: end to start


class Arena:
    """Allocates blocks of bytes in segments and frees them.

    Both take O(log n) in the number of different sizes of free ranges.

    >>> arena = Arena()
    >>> arena.allocate(100)
    NeedSegment(nbytes=67108864)
    >>> arena.add_segment(7, 67108864)
    >>> arena.allocate(100)
    ArenaPlace(segment_id=7, offset=0, nbytes=100)
    >>> arena.allocate(20)
    ArenaPlace(segment_id=7, offset=128, nbytes=20)
    >>> arena.free(7, 0)
    >>> arena.allocate(128)
    ArenaPlace(segment_id=7, offset=0, nbytes=128)
    """

    def __init__(self) -> None:
        self._segments: dict[int, _Segment] = {}
        self._idle: dict[int, None] = {}  # wholly free segments, the one freed first in front
        self._sizes: list[int] = []  # sizes of free ranges in shared segments, sorted, each once
        # size to (segment, offset) of the free ranges of that size, freed last at the end
        self._ranges: dict[int, dict[tuple[int, int], None]] = {}
        # size class to the free segments of that size, freed last at the end
        self._whole: dict[int, dict[int, None]] = {}
        self.idle_bytes = 0
        self.total_bytes = 0
        self.allocated_bytes = 0

    def allocate(self, nbytes: int) -> ArenaPlace | NeedSegment:
        """A place for ``nbytes``, or the size of the segment that is needed first."""
        if nbytes < 0:
            raise ValueError(f"got a block of {nbytes} bytes, need 0 or more")
        if nbytes > SHARED_BLOCK_BYTES:
            return self._allocate_whole(nbytes)
        size = max(-(-nbytes // ALIGNMENT_BYTES), 1) * ALIGNMENT_BYTES
        at = bisect_left(self._sizes, size)
        if at == len(self._sizes):
            return NeedSegment(SHARED_SEGMENT_BYTES)
        segment_id, start = next(reversed(self._ranges[self._sizes[at]]))
        segment = self._segments[segment_id]
        end = segment.free_until[start]
        self._take_range(segment_id, segment, start, end)
        if start + size < end:
            self._put_range(segment_id, segment, start + size, end)
        self._add_block(segment_id, segment, start, size)
        return ArenaPlace(segment_id, start, nbytes)

    def add_segment(self, segment_id: int, nbytes: int) -> None:
        """Add a new segment, as ``allocate`` demanded; ids are never used twice."""
        if segment_id in self._segments:
            raise ValueError(f"got segment {segment_id} a second time, need a new id")
        segment = self._segments[segment_id] = _Segment(nbytes)
        self.total_bytes += nbytes
        self._set_idle(segment_id, segment)

    def free(self, segment_id: int, offset: int) -> None:
        """Free a block.

        Raises:
            ProtocolError: when there is no block at that place, or no longer.
        """
        segment = self._segments.get(segment_id)
        size = segment.blocks.pop(offset, None) if segment is not None else None
        if segment is None or size is None:
            raise ProtocolError(
                f"a block freed at {offset} of shared segment {segment_id}, where none is"
                " allocated",
                "each block freed once, by the worker that it was sent to",
            )
        self.allocated_bytes -= size
        if not segment.blocks:
            self._forget_ranges(segment_id, segment)
            self._set_idle(segment_id, segment)
        elif segment.nbytes == SHARED_SEGMENT_BYTES:
            self._merge(segment_id, segment, offset, offset + size)

    def trim(self, keep_bytes: int) -> list[int]:
        """Forget wholly free segments, longest free first, until at most ``keep_bytes`` stay.

        Returns:
            The ids of the segments to drop.
        """
        dropped: list[int] = []
        while self.idle_bytes > keep_bytes:
            segment_id = next(iter(self._idle))
            segment = self._segments[segment_id]
            self._forget_ranges(segment_id, segment)
            self._end_idle(segment_id, segment)
            del self._segments[segment_id]
            self.total_bytes -= segment.nbytes
            dropped.append(segment_id)
        return dropped

    def _allocate_whole(self, nbytes: int) -> ArenaPlace | NeedSegment:
        size = size_class(nbytes)
        waiting = self._whole.get(size)
        if not waiting:
            return NeedSegment(size)
        segment_id = next(reversed(waiting))
        self._add_block(segment_id, self._segments[segment_id], 0, size)
        return ArenaPlace(segment_id, 0, nbytes)

    def _add_block(self, segment_id: int, segment: _Segment, offset: int, size: int) -> None:
        if not segment.blocks:
            self._end_idle(segment_id, segment)
        segment.blocks[offset] = size
        self.allocated_bytes += size

    def _set_idle(self, segment_id: int, segment: _Segment) -> None:
        self._idle[segment_id] = None
        self.idle_bytes += segment.nbytes
        if segment.nbytes == SHARED_SEGMENT_BYTES:
            self._put_range(segment_id, segment, 0, segment.nbytes)
        else:
            self._whole.setdefault(segment.nbytes, {})[segment_id] = None

    def _end_idle(self, segment_id: int, segment: _Segment) -> None:
        del self._idle[segment_id]
        self.idle_bytes -= segment.nbytes
        if segment.nbytes != SHARED_SEGMENT_BYTES:
            del self._whole[segment.nbytes][segment_id]
            if not self._whole[segment.nbytes]:
                del self._whole[segment.nbytes]

    def _merge(self, segment_id: int, segment: _Segment, start: int, end: int) -> None:
        """Make ``start`` to ``end`` free, as one range with the free ranges that touch it."""
        after = segment.free_until.get(end)
        if after is not None:
            self._take_range(segment_id, segment, end, after)
            end = after
        before = segment.free_from.get(start)
        if before is not None:
            self._take_range(segment_id, segment, before, start)
            start = before
        self._put_range(segment_id, segment, start, end)

    def _forget_ranges(self, segment_id: int, segment: _Segment) -> None:
        for start, end in list(segment.free_until.items()):
            self._take_range(segment_id, segment, start, end)

    def _put_range(self, segment_id: int, segment: _Segment, start: int, end: int) -> None:
        segment.free_until[start] = end
        segment.free_from[end] = start
        ranges = self._ranges.get(end - start)
        if ranges is None:
            ranges = self._ranges[end - start] = {}
            insort(self._sizes, end - start)
        ranges[(segment_id, start)] = None

    def _take_range(self, segment_id: int, segment: _Segment, start: int, end: int) -> None:
        del segment.free_until[start], segment.free_from[end]
        ranges = self._ranges[end - start]
        del ranges[(segment_id, start)]
        if not ranges:
            del self._ranges[end - start]
            del self._sizes[bisect_left(self._sizes, end - start)]


def size_class(nbytes: int) -> int:
    """The size of the segment of one large block: at most a quarter above ``nbytes``.

    Classes are 1, 1.25, 1.5 and 1.75 times each power of two; 64 MiB, the size of shared segments,
    is left out.

    >>> size_class(400_000_000) / 400_000_000
    1.00663296
    """
    step = 1 << max((nbytes - 1).bit_length() - 3, 12)
    size = -(-nbytes // step) * step
    return size + 4096 if size == SHARED_SEGMENT_BYTES else size
