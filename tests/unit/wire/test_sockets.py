"""Bytes over connected sockets: what a wait that takes too long does, and what an end says."""

import socket
import threading
import time

import numpy as np
import pytest

from pibroch.wire.alive import HostWatch
from pibroch.wire.sockets import fill, give_up, send_all

LARGE = 8 << 20  # more than a socket holds


@pytest.fixture
def pair():
    here, there = socket.socketpair()
    for each in (here, there):
        each.settimeout(0.05)
    with here, there:
        yield here, there


def test_who_waits_may_look_around_and_wait_on(pair):
    here, there = pair
    room = np.zeros(6, np.uint8)
    looks = []

    def look():
        looks.append(len(looks))
        if len(looks) in (2, 4):
            there.sendall(b"abc")

    fill(here, room.data, look)
    assert room.tobytes() == b"abcabc" and len(looks) == 4


def test_without_a_look_the_first_silence_is_the_end(pair):
    here, there = pair
    there.sendall(b"abc")
    with pytest.raises(TimeoutError):
        fill(here, memoryview(bytearray(6)))
    with pytest.raises(TimeoutError):
        send_all(here, memoryview(bytes(LARGE)))


def test_an_end_in_the_middle_is_no_silence(pair):
    here, there = pair
    there.sendall(b"abc")
    there.close()
    with pytest.raises(ConnectionError, match="the stream ended"):
        fill(here, memoryview(bytearray(6)))


def test_all_is_sent_however_late_it_is_taken(pair):
    here, there = pair
    sent = np.random.default_rng(1).integers(0, 256, LARGE, np.uint8)
    received = np.zeros(LARGE, np.uint8)
    looks = []

    def take():
        time.sleep(0.2)
        fill(there, received.data, lambda: None)

    taker = threading.Thread(target=take)
    taker.start()
    send_all(here, sent.data, lambda: looks.append(time.monotonic()))
    taker.join()
    assert len(looks) >= 2 and np.array_equal(sent, received)


def test_giving_up_is_a_timeout():
    with pytest.raises(TimeoutError) as raised:
        give_up()
    assert raised.value.errno is None  # no end of a connection


def test_a_process_that_ends_is_no_lost_host():
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    watch = HostWatch({1: here})
    assert not watch.is_lost(1) and not watch.is_lost(2)
    there.close()
    time.sleep(0.05)
    assert not watch.is_lost(1)
    watch.close()
    watch.close()
    assert not watch.is_lost(1)
