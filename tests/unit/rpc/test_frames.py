"""Frames: whatever the pieces in which a stream arrives, the same frames come out.

Anything else is a named error.
"""

import contextlib
import itertools
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pibroch.errors import ProtocolError
from pibroch.rpc.transport.frames import (
    CHECKED,
    HEADER,
    MAGIC,
    READ_AHEAD_BYTES,
    SHORT_BYTES,
    VERSION,
    FrameReader,
    Kind,
    header,
    seal,
)

MAX_METADATA = 1 << 20
MAX_PAYLOAD = 1 << 21

frames = st.lists(
    st.tuples(
        st.sampled_from(list(Kind)),
        st.integers(0, 2**64 - 1),
        st.binary(max_size=200),
        st.binary(max_size=200),
        st.integers(0, 3),
    ),
    max_size=8,
)


class Receiver:
    """A reader, and what it took in."""

    def __init__(self, pieces=1):
        self.reader = FrameReader(MAX_METADATA, MAX_PAYLOAD, self.allocate)
        self.frames = []
        self.pieces = pieces
        self.allocated = 0

    def allocate(self, frame):
        memory = bytearray(frame.payload_bytes)
        self.allocated += len(memory)
        frame.target = memory
        cuts = [len(memory) * i // self.pieces for i in range(self.pieces + 1)]
        return [memoryview(memory)[a:b] for a, b in itertools.pairwise(cuts)]

    def feed(self, data, sizes):
        """Bytes as they come off a socket.

        As many as one of ``sizes`` in turn, never more than there is room for.
        """
        view = memoryview(data)
        turn = 0
        while view:
            target = self.reader.buffer()
            assert target.nbytes > 0, "no room to read into: the stream would look closed"
            size = min(len(view), target.nbytes, sizes[turn % len(sizes)])
            target[:size] = view[:size]
            view = view[size:]
            turn = turn + 1
            for frame in self.reader.received(size):
                self.frames.append(
                    (
                        frame.kind,
                        frame.number,
                        frame.metadata,
                        bytes(frame.payload or frame.target or b""),
                    )
                )


def stream_of(frames):
    return b"".join(
        header(kind, number, len(metadata), len(payload)) + metadata + payload
        for kind, number, metadata, payload in frames
    )


def test_the_header_is_what_the_wire_format_says():
    assert header(Kind.REQUEST, 0x0102030405060708, 0x0A0B0C0D, 0x1112131415161718).hex() == (
        "706202010d0c0b0a08070605040302011817161514131211"
    )


@settings(max_examples=300, deadline=None)
@given(frames, st.lists(st.integers(1, 300), min_size=1, max_size=5), st.integers(1, 3))
def test_frames_come_out_as_they_went_in(frames, sizes, pieces):
    frames = [
        (kind, number, metadata * 2**growth, payload)
        for kind, number, metadata, payload, growth in frames
    ]
    receiver = Receiver(pieces)
    receiver.feed(stream_of(frames), sizes)
    assert receiver.frames == frames


@pytest.mark.parametrize(
    "size", [READ_AHEAD_BYTES - 1, READ_AHEAD_BYTES, READ_AHEAD_BYTES + 1, 1 << 30]
)
@pytest.mark.parametrize(
    "metadata_bytes",
    [0, 10, READ_AHEAD_BYTES - 24 - 1, READ_AHEAD_BYTES - 24, READ_AHEAD_BYTES, MAX_METADATA],
)
@pytest.mark.parametrize(
    "payload_bytes", [0, 1, READ_AHEAD_BYTES - 24, READ_AHEAD_BYTES, MAX_PAYLOAD]
)
def test_frames_around_the_size_of_the_buffer(size, metadata_bytes, payload_bytes):
    frames = [
        (Kind.NOTE, i, bytes([i]) * metadata_bytes, bytes([i + 9]) * payload_bytes)
        for i in range(3)
    ] + [(Kind.ANSWER, 7, b"end", b"")]
    receiver = Receiver()
    receiver.feed(stream_of(frames), [size])
    assert receiver.frames == frames


def test_memory_goes_back_after_a_long_frame():
    receiver = Receiver()
    receiver.feed(stream_of([(Kind.NOTE, 0, bytes(MAX_METADATA), b"")]), [1 << 16])
    assert len(receiver.reader.buffer()) == READ_AHEAD_BYTES


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (HEADER.pack(b"xx", VERSION, 1, 0, 0, 0), "begins with b'xx'"),
        (HEADER.pack(MAGIC, VERSION + 1, 1, 0, 0, 0), "version 3"),
        (HEADER.pack(MAGIC, VERSION, 0, 0, 0, 0), "kind 0"),
        (HEADER.pack(MAGIC, VERSION, 77, 0, 0, 0), "kind 77"),
        (header(Kind.NOTE, 0, MAX_METADATA + 1, 0), "bytes of metadata"),
        (header(Kind.NOTE, 0, 2**32 - 1, 0), "bytes of metadata"),
        (header(Kind.NOTE, 0, 0, MAX_PAYLOAD + 1), "bytes of tensors"),
        (header(Kind.NOTE, 0, 0, 2**64 - 1), "bytes of tensors"),
    ],
)
def test_what_is_no_frame_or_too_long_is_refused_at_the_header(data, message):
    receiver = Receiver()
    with pytest.raises(ProtocolError, match=message):
        receiver.feed(data, [1 << 20])
    assert not receiver.frames and not receiver.allocated


@settings(max_examples=500, deadline=None)
@given(
    frames,
    st.binary(min_size=1, max_size=100),
    st.integers(0, 2000),
    st.lists(st.integers(1, 300), min_size=1, max_size=3),
)
def test_any_bytes_give_frames_or_a_protocol_error(frames, noise, where, sizes):
    data = stream_of([frame[:4] for frame in frames])
    receiver = Receiver()
    with contextlib.suppress(ProtocolError):
        receiver.feed(data[:where] + noise + data[where + len(noise) :], sizes)
    assert receiver.allocated <= MAX_PAYLOAD * (len(frames) + 1)
    assert len(receiver.reader._staging) <= max(READ_AHEAD_BYTES, MAX_METADATA + HEADER.size)


def sealed(frames, pieces=1):
    """The stream of frames with checksums, as a sender hands them over.

    Joined, or the payload in buffers of its own.
    """
    buffers = []
    for kind, number, metadata, payload in frames:
        start = header(kind, number, len(metadata), len(payload)) + metadata
        step = max(1, len(payload) // pieces)
        parts = [memoryview(payload)[at : at + step] for at in range(0, len(payload), step)]
        buffers += [start + payload] if pieces == 1 else [start, *parts]
    return b"".join(seal(buffers))


@settings(max_examples=200, deadline=None)
@given(
    frames,
    st.lists(st.integers(1, 300), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_frames_with_checksums_come_out_as_they_went_in(frames, sizes, pieces, sent_pieces):
    frames = [
        (kind, number, metadata * 2**growth, payload)
        for kind, number, metadata, payload, growth in frames
    ]
    receiver = Receiver(pieces)
    receiver.feed(sealed(frames, sent_pieces), sizes)
    assert receiver.frames == frames


@pytest.mark.parametrize("payload_bytes", [0, 10, SHORT_BYTES + 1, MAX_PAYLOAD])
def test_each_damaged_bit_of_a_frame_with_checksums_is_found(payload_bytes):
    data = sealed([(Kind.NOTE, 3, b"metadata", bytes(payload_bytes))])
    places = [*range(60), *range(60, len(data), 1 + len(data) // 60)]
    for place in (place for place in places if place < len(data)):
        for bit in (0, 3, 7):
            if (place, bit) == (3, 7):
                continue  # that there are checksums
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            receiver = Receiver()
            with pytest.raises(ProtocolError):
                receiver.feed(bytes(damaged), [1 << 20])
            assert not receiver.frames


def test_checksums_of_the_wire_format():
    data = sealed([(Kind.NOTE, 0, b"a", b"")])
    assert (
        data.hex()
        == header(Kind.NOTE + CHECKED, 0, 1, 0).hex()
        + "".join(zlib.crc32(part).to_bytes(4, "little").hex() for part in (data[:24], b"a", b""))
        + b"a".hex()
    )
