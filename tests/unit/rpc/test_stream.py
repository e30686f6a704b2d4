"""A stream on a real loop and socket: what arrives in the middle of a long payload is not worth spinning for."""

import socket
import threading
import time

import pytest

from pibroch.rpc.frames import FrameReader, Kind, header
from pibroch.rpc.reactor import Reactor
from pibroch.rpc.stream import Stream

PATIENCE_S = 20.0
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
    done, results = threading.Event(), []
    loop.call_soon(lambda: (results.append(function()), done.set()))
    assert done.wait(PATIENCE_S)
    return results[0]


def test_the_loop_sleeps_between_the_pieces_of_a_long_payload(loop):
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    frames, whole = [], threading.Event()

    def on_frame(frame):
        frames.append(frame)
        whole.set()

    size = NUM_PIECES * len(PIECE)
    reader = FrameReader(1000, size, lambda frame: [memoryview(bytearray(frame.payload_bytes))])
    stream = Stream(loop, ours, reader, on_frame, lambda reason: None)
    run_on(loop, lambda: stream.start(b""))
    theirs.sendall(header(Kind.BULK, 1, 0, size))
    began, cpu_before = time.monotonic(), run_on(loop, time.thread_time)
    for _ in range(NUM_PIECES):
        theirs.sendall(PIECE)
        time.sleep(PAUSE_S)
    assert whole.wait(PATIENCE_S) and frames[0].payload_bytes == size
    took_s, cpu_s = time.monotonic() - began, run_on(loop, time.thread_time) - cpu_before
    run_on(loop, lambda: stream.close("over"))
    theirs.close()
    assert cpu_s < took_s / 3, f"{cpu_s:.3f} s of CPU in {took_s:.3f} s"
