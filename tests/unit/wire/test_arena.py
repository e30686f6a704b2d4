import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pibroch.errors import ProtocolError
from pibroch.wire.arena import (
    ALIGNMENT_BYTES,
    SHARED_BLOCK_BYTES,
    SHARED_SEGMENT_BYTES,
    Arena,
    ArenaPlace,
    NeedSegment,
    size_class,
)

MIB = 1 << 20


class Owner:
    """An arena with the segments that it demanded, and a check of all that it allocated."""

    def __init__(self) -> None:
        self.arena = Arena()
        self.segments: dict[int, int] = {}
        self.blocks: dict[tuple[int, int], int] = {}
        self.made = 0

    def allocate(self, nbytes: int) -> ArenaPlace:
        place = self.arena.allocate(nbytes)
        if isinstance(place, NeedSegment):
            self.made += 1
            self.segments[self.made] = place.nbytes
            self.arena.add_segment(self.made, place.nbytes)
            place = self.arena.allocate(nbytes)
        assert isinstance(place, ArenaPlace)
        assert place.nbytes == nbytes
        self.blocks[(place.segment_id, place.offset)] = nbytes
        return place

    def free(self, place: ArenaPlace | tuple[int, int]) -> None:
        key = (place.segment_id, place.offset) if isinstance(place, ArenaPlace) else place
        self.arena.free(*key)
        del self.blocks[key]

    def trim(self, keep_bytes: int) -> list[int]:
        dropped = self.arena.trim(keep_bytes)
        for segment_id in dropped:
            del self.segments[segment_id]
        return dropped

    def check(self) -> None:
        used: dict[int, list[tuple[int, int]]] = {}
        for (segment_id, offset), nbytes in self.blocks.items():
            assert offset % ALIGNMENT_BYTES == 0
            used.setdefault(segment_id, []).append((offset, offset + nbytes))
        for segment_id, spans in used.items():
            end = 0
            for start, stop in sorted(spans):
                assert start >= end, "blocks overlap"
                end = stop
            assert end <= self.segments[segment_id], "a block leaves its segment"
        segments = self.arena._segments.values()
        assert sum(len(each.blocks) for each in segments) == len(self.blocks)
        assert self.arena.total_bytes == sum(self.segments.values())
        assert self.arena.idle_bytes == sum(n for s, n in self.segments.items() if s not in used)


SIZES = st.one_of(
    st.integers(0, 200),
    st.integers(0, SHARED_BLOCK_BYTES),
    st.integers(SHARED_BLOCK_BYTES - 1, 100 * MIB),
    st.just(SHARED_SEGMENT_BYTES),
)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(
        st.one_of(SIZES, st.tuples(st.just("free"), st.integers(0)), st.just("trim")), max_size=60
    ),
    idle_bytes=st.sampled_from([0, 64 * MIB, 1 << 30]),
)
def test_blocks_never_overlap_stay_inside_and_all_come_back(steps, idle_bytes):
    owner = Owner()
    for step in steps:
        if isinstance(step, int):
            owner.allocate(step)
        elif step == "trim":
            assert not {s for s, _ in owner.blocks} & set(owner.trim(idle_bytes))
            assert owner.arena.idle_bytes <= idle_bytes
        elif owner.blocks:
            owner.free(list(owner.blocks)[step[1] % len(owner.blocks)])
        owner.check()
    for key in list(owner.blocks):
        owner.free(key)
    owner.check()
    for segment_id, nbytes in list(owner.segments.items()):
        if nbytes == SHARED_SEGMENT_BYTES:
            blocks = [owner.allocate(SHARED_BLOCK_BYTES) for _ in range(4)]
            assert len({b.segment_id for b in blocks}) == 1, (
                f"segment {segment_id} did not merge to one range"
            )
    owner.check()


def test_everything_can_be_dropped_once_all_is_free():
    owner = Owner()
    places = [owner.allocate(n) for n in (1, 5 * MIB, 16 * MIB, 40 * MIB, 400 * MIB)]
    for place in places:
        owner.free(place)
    assert len(owner.trim(0)) == 3
    assert (owner.arena.total_bytes, owner.arena.idle_bytes, owner.arena.allocated_bytes) == (
        0,
        0,
        0,
    )
    assert owner.arena.allocate(1) == NeedSegment(SHARED_SEGMENT_BYTES)
    assert owner.arena.allocate(400 * MIB) == NeedSegment(size_class(400 * MIB))


def test_what_was_freed_last_is_allocated_first():
    owner = Owner()
    small = [owner.allocate(1000) for _ in range(9)]
    large = [owner.allocate(40 * MIB) for _ in range(3)]
    for place in (small[1], small[7], small[4], large[2], large[0]):
        owner.free(place)
    assert owner.allocate(1000).offset == small[4].offset
    assert owner.allocate(40 * MIB).segment_id == large[0].segment_id
    assert owner.allocate(40 * MIB).segment_id == large[2].segment_id


def test_best_fit_spares_large_ranges():
    owner = Owner()
    blocks = [owner.allocate(n) for n in (5 * MIB, 64, MIB, 64, 3 * MIB, 64)]
    for block in blocks[::2]:
        owner.free(block)
    assert owner.allocate(MIB - 64).offset == blocks[2].offset
    assert owner.allocate(2 * MIB).offset == blocks[4].offset
    assert owner.allocate(5 * MIB).offset == blocks[0].offset


def test_idle_bytes_are_bounded_and_the_longest_free_go_first():
    owner = Owner()
    places = [owner.allocate(40 * MIB) for _ in range(4)]
    for place in (places[2], places[0], places[3], places[1]):
        owner.free(place)
    assert owner.arena.idle_bytes == 160 * MIB
    assert owner.trim(100 * MIB) == [places[2].segment_id, places[0].segment_id]
    assert owner.trim(100 * MIB) == []
    assert owner.allocate(40 * MIB).segment_id == places[1].segment_id


@pytest.mark.parametrize("nbytes", [1000, 40 * MIB])
def test_a_block_is_freed_only_once_and_only_where_it_was_allocated(nbytes):
    owner = Owner()
    place = owner.allocate(nbytes)
    other = owner.allocate(nbytes)
    for segment_id, offset in (
        (place.segment_id, 8),
        (99, 0),
        (place.segment_id, -64),
        (place.segment_id, 1 << 40),
    ):
        with pytest.raises(ProtocolError, match=f"{offset} of shared segment {segment_id}"):
            owner.arena.free(segment_id, offset)
    owner.free(place)
    with pytest.raises(ProtocolError, match="where none is allocated"):
        owner.arena.free(place.segment_id, place.offset)
    owner.free(other)
    owner.trim(0)
    with pytest.raises(ProtocolError):
        owner.arena.free(other.segment_id, other.offset)
    owner.check()


@given(st.integers(SHARED_BLOCK_BYTES + 1, 1 << 44))
def test_size_classes_waste_a_quarter_at_most_and_are_not_shared_segments(nbytes):
    size = size_class(nbytes)
    assert nbytes <= size <= nbytes * 1.25
    assert size % 4096 == 0
    assert size != SHARED_SEGMENT_BYTES


def test_wrong_use_is_refused():
    owner = Owner()
    owner.allocate(1)
    with pytest.raises(ValueError, match="a second time"):
        owner.arena.add_segment(1, SHARED_SEGMENT_BYTES)
    with pytest.raises(ValueError, match="-1 bytes"):
        owner.arena.allocate(-1)


def test_tens_of_thousands_of_live_blocks_cost_no_more_than_a_few():
    def seconds_of_2000(live: int) -> float:
        owner = Owner()
        rng = random.Random(3)
        sizes = [rng.randrange(64, 4096) for _ in range(live + 2000)]
        places = [owner.allocate(n) for n in sizes[:live]]
        rng.shuffle(places)
        start = time.thread_time()
        for n in sizes[live:]:
            owner.free(places.pop())
            places.insert(0, owner.allocate(n))
        return time.thread_time() - start

    assert min(seconds_of_2000(40_000) for _ in range(3)) < 10 * min(
        seconds_of_2000(100) for _ in range(3)
    )
