"""Bytes over connected sockets: what silence does, and what an end says."""

import socket
import time

import pytest

from pibroch.wire.alive import HostWatch
from pibroch.wire.sockets import fill


@pytest.fixture
def pair():
    here, there = socket.socketpair()
    for each in (here, there):
        each.settimeout(0.05)
    with here, there:
        yield here, there


def test_silence_ends_a_wait(pair):
    here, there = pair
    there.sendall(b"abc")
    with pytest.raises(TimeoutError):
        fill(here, memoryview(bytearray(6)))


def test_an_end_in_the_middle_is_no_silence(pair):
    here, there = pair
    there.sendall(b"abc")
    there.close()
    with pytest.raises(ConnectionError, match="the stream ended"):
        fill(here, memoryview(bytearray(6)))


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
