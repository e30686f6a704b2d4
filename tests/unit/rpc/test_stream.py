"""A stream on a real loop and socket: long payloads, and callers that read their own answers."""

import socket
import threading
import time
import tracemalloc

import pytest

from pibroch.rpc.transport import frames
from pibroch.rpc.transport import stream as stream_module
from pibroch.rpc.transport.frames import FrameReader, Kind, header
from pibroch.rpc.transport.stream import FrameStream
from pibroch.wire.reactor import Reactor

pytestmark = pytest.mark.alone  # times of tenths of a second

TIMEOUT_S = 60.0
PIECE = bytes(1000)
NUM_PIECES = 800
PAUSE_S = 0.0003


@pytest.fixture
def loop():
    made = Reactor("test-stream")
    made.start()
    yield made
    made.stop()


def run_on(loop, function):
    done = threading.Event()
    results = []
    loop.call_soon(lambda: (results.append(function()), done.set()))
    assert done.wait(TIMEOUT_S)
    return results[0]


class Ends:
    """A stream that is not started yet, the socket at its other end, and what came of it."""

    def __init__(self, loop, max_payload_bytes=0):
        self.sock, self.theirs = socket.socketpair()
        self.sock.setblocking(False)
        self.frames = []
        self.arrived = threading.Semaphore(0)
        self.reasons = []
        reader = FrameReader(
            1000, max_payload_bytes, lambda frame: [memoryview(bytearray(frame.payload_bytes))]
        )
        self.stream = FrameStream(loop, self.sock, reader, self._on_frame, self.reasons.append)

    def _on_frame(self, frame):
        self.frames.append(frame)
        self.arrived.release()


@pytest.fixture
def make_ends(loop):
    made = []

    def make(*args):
        made.append(Ends(loop, *args))
        return made[-1]

    yield make
    for ends in made:
        run_on(loop, lambda ends=ends: ends.stream.close("over"))
        ends.theirs.close()


def test_the_loop_sleeps_between_the_pieces_of_a_long_payload(loop, make_ends):
    size = NUM_PIECES * len(PIECE)
    ends = make_ends(size)
    run_on(loop, lambda: ends.stream.start(b""))
    ends.theirs.sendall(header(Kind.BULK, 1, 0, size))
    began = time.monotonic()
    cpu_before = run_on(loop, time.thread_time)
    for _ in range(NUM_PIECES):
        ends.theirs.sendall(PIECE)
        time.sleep(PAUSE_S)
    assert ends.arrived.acquire(timeout=TIMEOUT_S) and ends.frames[0].payload_bytes == size
    took_s = time.monotonic() - began
    cpu_s = run_on(loop, time.thread_time) - cpu_before
    assert cpu_s < took_s / 3, f"{cpu_s:.3f} s of CPU in {took_s:.3f} s"


def test_a_caller_leaves_what_comes_before_the_start(loop, make_ends):
    ends = make_ends()
    frame = header(Kind.NOTE, 0, 5, 0) + b"hello"
    ends.theirs.sendall(frame[10:])
    ends.stream.read_until(lambda: bool(ends.frames), 0.1)
    run_on(loop, lambda: ends.stream.start(frame[:10]))
    assert ends.arrived.acquire(timeout=TIMEOUT_S), ends.reasons
    assert ends.frames[0].metadata == b"hello"


def test_a_caller_waits_no_longer_because_of_the_frames_of_others(loop, make_ends):
    ends = make_ends()
    timeout_s = 2.0
    run_on(loop, lambda: ends.stream.start(b""))
    late = threading.Timer(0.5 * timeout_s, ends.theirs.sendall, (header(Kind.NOTE, 0, 0, 0),))
    late.start()
    began = time.monotonic()
    ends.stream.read_until(lambda: False, timeout_s)
    took_s = time.monotonic() - began
    late.join()
    assert timeout_s <= took_s < 1.45 * timeout_s and len(ends.frames) == 1


def test_who_reads_sees_that_the_stream_is_closed(loop, make_ends):
    ends = make_ends()
    run_on(loop, lambda: ends.stream.start(b""))
    reading = threading.Thread(target=ends.stream.read_until, args=(lambda: False, 0.0))
    reading.start()
    time.sleep(0.02)  # it sleeps
    run_on(loop, lambda: ends.stream.close("over"))
    reading.join(TIMEOUT_S)
    assert not reading.is_alive() and ends.reasons == ["over"]


class ByHand:
    """A loop that runs what it was given when it is told to."""

    def __init__(self):
        self.soon = []
        self.reader = threading.local()
        self.spin_s = 0.0
        self.call_soon = self.soon.append

    def is_loop_thread(self):
        return True

    def watch(self, *_):
        pass

    change = forget = expect_bulk = watch


def test_what_the_peer_said_before_it_went_is_read_although_nothing_can_be_written():
    """Its last answer and its goodbye: else a graceful end looks like a loss."""
    loop = ByHand()
    ends = Ends(loop)
    ends.stream.start(b"")
    ends.theirs.sendall(header(Kind.NOTE, 1, 6, 0) + b"answer" + header(Kind.GOODBYE, 0, 0, 0))
    ends.theirs.close()
    ends.stream.send([b"one word more"])
    loop.soon.pop(0)()
    assert [frame.kind for frame in ends.frames] == [Kind.NOTE, Kind.GOODBYE]
    assert ends.reasons == ["the connection was closed"]


def test_a_peer_that_writes_on_and_on_but_reads_nothing_does_not_keep_the_loop(monkeypatch):
    monkeypatch.setattr(frames, "READ_AHEAD_BYTES", 4096)
    monkeypatch.setattr(stream_module, "_READS_AT_A_TIME", 1)
    monkeypatch.setattr(stream_module, "_LAST_ROUNDS", 1)
    loop = ByHand()
    num_frames = 150
    ends = Ends(loop)
    ends.stream.start(b"")
    ends.theirs.sendall((header(Kind.NOTE, 1, 900, 0) + bytes(900)) * num_frames)
    ends.theirs.shutdown(socket.SHUT_RD)
    ends.stream.send([b"a word"])
    loop.soon.pop(0)()
    assert 0 < len(ends.frames) < num_frames and len(ends.reasons) == 1
    ends.theirs.close()


def test_a_frame_whose_length_is_wrong_closes_the_stream_soon(loop, make_ends, monkeypatch):
    monkeypatch.setattr(stream_module, "STALL_S", 0.2)
    ends = make_ends()
    good = header(Kind.NOTE, 0, 4, 0) + b"good"
    run_on(loop, lambda: ends.stream.start(b""))
    # the second length should be 4
    ends.theirs.sendall(good + header(Kind.NOTE, 0, 900, 0) + b"good" + 3 * good)
    ends.theirs.settimeout(TIMEOUT_S)
    assert ends.theirs.recv(1) == b"" and len(ends.frames) == 1
    run_on(loop, lambda: None)
    assert "length" in ends.reasons[0]


def test_a_frame_that_comes_slowly_is_waited_for(loop, make_ends, monkeypatch):
    monkeypatch.setattr(stream_module, "STALL_S", 0.2)
    monkeypatch.setattr(stream_module, "STALL_BYTES", 10)
    ends = make_ends()
    run_on(loop, lambda: ends.stream.start(b""))
    ends.theirs.sendall(header(Kind.NOTE, 0, 900, 0))
    for _ in range(9):
        assert not ends.arrived.acquire(timeout=0.07) and not ends.reasons
        ends.theirs.sendall(bytes(100))
    assert ends.arrived.acquire(timeout=TIMEOUT_S)


def test_a_closed_stream_keeps_no_memory_until_the_garbage_collector_comes(loop, make_ends):
    begun = header(Kind.GOODBYE, 1, 0, 0) + header(Kind.REQUEST, 2, 0, 1 << 20) + bytes(100)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        all_ends = [make_ends(1 << 20) for _ in range(8)]
        for ends in all_ends:
            run_on(loop, lambda ends=ends: ends.stream.start(b""))
            ends.theirs.sendall(begun)
            assert ends.arrived.acquire(timeout=TIMEOUT_S)
        during, _ = tracemalloc.get_traced_memory()
        for ends in all_ends:
            run_on(loop, lambda ends=ends: ends.stream.close("over"))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert during - before > 8 << 20 and after - before < 1 << 18
