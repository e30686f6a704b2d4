"""Who may knock at a Unix socket, what happens while its queue is full, and how much is written about it."""

import errno
import functools
import logging
import os
import secrets
import socket
import threading
import time

import pytest

from pibroch.rpc import link
from pibroch.rpc.handshake import Identity, Server
from pibroch.rpc.link import Address, BoundedLog, Dialling, Listener, dial
from pibroch.rpc.reactor import Reactor

NOBODY = 65534
PATIENCE_S = 20


@pytest.fixture
def reactor():
    made = Reactor("test-link")
    made.start()
    yield made
    made.stop()


@pytest.fixture
def name():
    return f"pibroch-test-{secrets.token_hex(8)}"


def listening(name, queue=16):
    sock = socket.socket(socket.AF_UNIX)
    sock.bind("\0" + name)
    sock.listen(queue)
    return sock


def as_nobody(function):
    """The exit code of ``function()`` in a process of another user."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os._exit(function())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def greeted(name):
    """Whether a worker says hello to who knocks."""
    with socket.socket(socket.AF_UNIX) as knocking:
        knocking.settimeout(PATIENCE_S)
        knocking.connect("\0" + name)
        try:
            return bool(knocking.recv(4096))
        except ConnectionResetError:
            return False


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can be another user")
def test_another_user_of_this_machine_is_turned_away_before_anything_is_said(reactor, name, monkeypatch, caplog):
    monkeypatch.setattr(link, "_foreigners", BoundedLog(at_once=3, per_s=1e-9))
    sock = listening(name)
    make_core = functools.partial(Server, b"a secret of sixteen bytes", Identity("me", 0, 1))
    with caplog.at_level(logging.DEBUG, logger="pibroch.rpc.link"):
        Listener(reactor, sock, make_core, lambda *_: None, max_strangers=4, handshake_s=5, lost_after_s=4)
        assert greeted(name)
        for _ in range(20):
            assert as_nobody(lambda: int(greeted(name))) == 0
        assert greeted(name)
    lines = [each for each in caplog.records if "another user" in each.getMessage()]
    assert len(lines) == 3


def test_a_full_queue_is_tried_again(reactor, name):
    sock = listening(name, queue=1)
    waiting = []
    while True:  # others fill the queue
        one = socket.socket(socket.AF_UNIX)
        one.setblocking(False)
        if one.connect_ex("\0" + name) == errno.EAGAIN:
            one.close()
            break
        waiting.append(one)
    done, outcome = threading.Event(), []
    address = Address("here", name, "", 0)

    def ended(result):
        outcome.append(result)
        done.set()

    reactor.call_soon(lambda: Dialling(reactor, lambda: dial(address, "here", 4.0), PATIENCE_S, ended, ended))
    assert not done.wait(0.2)
    for _ in range(len(waiting) + 1):
        sock.accept()[0].close()
    assert done.wait(PATIENCE_S) and isinstance(outcome[0], socket.socket)
    for each in (*waiting, *outcome, sock):
        each.close()


def test_nobody_there_is_known_at_once(reactor, name):
    done, outcome = threading.Event(), []

    def failed(error):
        outcome.append(error)
        done.set()

    began = time.monotonic()
    make_socket = functools.partial(dial, Address("here", name, "", 0), "here", 4.0)
    reactor.call_soon(lambda: Dialling(reactor, make_socket, PATIENCE_S, failed, failed))
    assert done.wait(PATIENCE_S) and outcome[0].errno == errno.ECONNREFUSED
    assert time.monotonic() - began < PATIENCE_S / 2


def test_lines_come_at_a_bounded_rate():
    lines = BoundedLog(at_once=5, per_s=2)
    assert sum(lines.wants_one(100.0) for _ in range(1000)) == 5 and lines.num_left_out == 995
    assert sum(lines.wants_one(101.0) for _ in range(1000)) == 2
    assert sum(lines.wants_one(200.0) for _ in range(1000)) == 5
